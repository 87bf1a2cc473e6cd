"""Data of earlier versions: cache folders are read with the bits of a cold run, or not found; other files likewise.

tests/data/cache_folders/VERSION was written by that version with the command in the README.md there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import kvanta

from kvanta import LLM, InputError, RequestOutput, SamplingParams, _core

FOLDERS = Path(__file__).resolve().parents[1] / "data" / "cache_folders"
VERSIONS = sorted(path.name for path in FOLDERS.iterdir() if path.is_dir())
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends."
PAGE = 16
STORED_TOKENS = 2 * PAGE


def answer(**options: Any) -> tuple[RequestOutput, dict[str, Any]]:
    """The answer to the prompt with the options of the stored folders, and the statistics afterwards."""
    llm = LLM(
        "stories260k",
        kv_cache_dtype="int8",
        isa="portable",
        block_size=PAGE,
        max_model_len=128,
        threads=1,
        kv_cache_memory_bytes="1MiB",
        **options,
    )
    return llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2))[0], llm.stats()


@pytest.fixture(scope="module")
def cold() -> RequestOutput:
    return answer(enable_prefix_caching=False)[0]


def check_same(found: RequestOutput, cold: RequestOutput) -> None:
    """Tokens and log-probabilities, bit for bit."""
    assert found.outputs[0].token_ids == cold.outputs[0].token_ids
    assert found.outputs[0].logprobs == cold.outputs[0].logprobs


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cache_folder_of_an_earlier_version(version: str, tmp_path: Path, cold: RequestOutput) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(FOLDERS / version, folder)
    (before,) = _core.list_cache_folder(str(folder))
    assert before.pages * PAGE == STORED_TOKENS

    found, stats = answer(kv_cache_dir=str(folder))
    check_same(found, cold)
    entries = {entry.identity for entry in _core.list_cache_folder(str(folder))}
    if entries == {before.identity}:  # the same arithmetic and file format: the pages are used
        assert found.num_cached_tokens == STORED_TOKENS
        assert stats["disk"]["hit_tokens"] == STORED_TOKENS
    else:  # a new identity: the old pages stay, listed with what they are of, until they are evicted
        assert found.num_cached_tokens == 0
        assert before.identity in entries
    assert stats["disk"]["damaged_files"] == 0
    assert "LlamaForCausalLM" in kvanta("cache", "ls", str(folder)).stdout


def change(file: Path, at: int, to: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] = to
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "to", "reason"),
    [(8, 3, "version 3 is not 1 or 2"), (200, 77, "its checksum is wrong")],
    ids=["another version of the file format", "another byte"],
)
def test_pages_that_are_refused(at: int, to: int, reason: str, tmp_path: Path, cold: RequestOutput) -> None:
    """They are counted, removed and computed again; a page that was used all the same would change the answer."""
    folder = tmp_path / "cache"
    answer(kv_cache_dir=str(folder))  # by the present version, whose identity it has
    pages = [path for path in folder.rglob("*-0q") if path.is_file()]
    assert len(pages) * PAGE == STORED_TOKENS
    for page in pages:
        change(page, at, to)
    with pytest.warns(UserWarning, match=reason):
        found, stats = answer(kv_cache_dir=str(folder))
    check_same(found, cold)
    assert found.num_cached_tokens == 0
    assert stats["disk"]["damaged_files"] > 0


def test_another_arithmetic_is_another_identity(tmp_path: Path, cold: RequestOutput) -> None:
    """Pages with numbers that would change the answer lie under another identity, and are never looked at."""
    folder = tmp_path / "cache"
    answer(kv_cache_dir=str(folder))
    (own,) = [path for path in folder.iterdir() if path.is_dir()]
    identity = json.loads((own / "identity.json").read_text())
    assert identity["numerics_version"] >= 3, "it is part of what the folder's name is the digest of"
    other = folder / ("0" * len(own.name))
    own.rename(other)
    (other / "identity.json").write_text(json.dumps({**identity, "numerics_version": 2}))
    found, stats = answer(kv_cache_dir=str(folder))
    check_same(found, cold)
    assert (found.num_cached_tokens, stats["disk"]["damaged_files"]) == (0, 0)
    assert len(_core.list_cache_folder(str(folder))) == 2


def test_scale_files_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    scales = {"0": {"k_scale": 0.1, "v_scale": 0.1}}
    file.write_text(json.dumps({"kvanta_kv_scales": 2, "granularity": "tensor", "layers": scales}))
    with pytest.raises(InputError, match=r"scales.json.*kvanta_kv_scales.*1, the version this reader knows"):
        LLM("stories260k", kv_cache_dtype="fp8", quantization_param_path=str(file), kv_cache_memory_bytes="1MiB")
