"""MODEL as an id of the hub: downloaded, kept, refused; against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import SMALL, kvanta_process
from fake_hub import TOKEN, FakeHub

from kvanta.checkpoint.resolve import SHIPPED

pytest.importorskip("huggingface_hub")
WORDS = ("Once upon a time", "--max-tokens", "12", *SMALL)


def test_a_model_is_downloaded_once(hub: FakeHub) -> None:
    first = kvanta_process("generate", "org/stories", *WORDS, **hub.environment())
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(", there was a little girl")
    files = hub.downloads()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert "LICENSE" not in files
    assert len(files) == len(set(files))
    hub.requests.clear()
    again = kvanta_process("generate", "org/stories", *WORDS, **hub.environment())
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert hub.downloads() == []


def test_a_downloaded_model_needs_no_network(hub: FakeHub) -> None:
    assert kvanta_process("generate", "org/stories", *WORDS, **hub.environment()).returncode == 0
    hub.requests.clear()
    offline = hub.environment() | {"HF_HUB_OFFLINE": "1"}
    done = kvanta_process("generate", "org/stories", *WORDS, **offline)
    assert done.stdout.startswith(", there was a little girl"), done.stderr
    assert hub.requests == []


def test_a_cache_that_another_program_filled(hub: FakeHub) -> None:
    """transformers and vLLM leave out files that Kvanta would ask for."""
    weights = SHIPPED / "stories260k" / "model.safetensors"
    files = {path.name: path for path in (SHIPPED / "stories260k").iterdir() if path.is_file()}
    hub.add("org/copies", {**files, "vocab.json": files["config.json"], "consolidated.safetensors": weights})
    script = "import huggingface_hub as hub; hub.snapshot_download('org/copies', ignore_patterns=['v*', 'c*.safet*'])"
    subprocess.run([sys.executable, "-c", script], env=os.environ | hub.environment(), check=True, timeout=60)
    offline = hub.environment() | {"HF_HUB_OFFLINE": "1"}
    done = kvanta_process("generate", "org/copies", *WORDS, **offline)
    assert done.stdout.startswith(", there was a little girl"), done.stderr
    hub.requests.clear()
    again = kvanta_process("generate", "org/copies", *WORDS, **hub.environment())
    assert again.stdout == done.stdout
    assert not any("consolidated" in path for _, path in hub.requests if "/resolve/" in path)


def test_plan_downloads_no_weights(hub: FakeHub) -> None:
    done = kvanta_process("plan", "org/stories", "--memory", "1GiB", **hub.environment())
    assert done.returncode == 0, done.stderr
    assert "config.json" in hub.downloads()
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize("as_option", [True, False])
def test_a_gated_model_needs_the_token(hub: FakeHub, as_option: bool) -> None:
    refused = kvanta_process("generate", "org/gated", *WORDS, **hub.environment())
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("kvanta: error: there is no folder 'org/gated', and the hub does not give it: ")
    words = ["--hf-token", TOKEN] if as_option else []
    environment = hub.environment() | ({} if as_option else {"HF_TOKEN": TOKEN})
    done = kvanta_process("generate", "org/gated", *WORDS, *words, **environment)
    assert done.stdout.startswith(", there was a little girl"), done.stderr
    assert TOKEN not in refused.stderr + done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["org/nosuch"], "org/nosuch"), (["org/stories", "--revision", "v9"], "v9")],
)
def test_what_the_hub_does_not_have(hub: FakeHub, words: list[str], reason: str) -> None:
    done = kvanta_process("generate", words[0], *WORDS, *words[1:], **hub.environment())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvanta: error: there is no folder")
    assert reason in line


def test_a_commit_is_a_revision(hub: FakeHub) -> None:
    words = ("--revision", hub.commit_of("org/stories"))
    done = kvanta_process("generate", "org/stories", *WORDS, *words, **hub.environment())
    assert done.stdout.startswith(", there was a little girl"), done.stderr


def test_a_hub_that_does_not_answer(hub: FakeHub) -> None:
    environment = hub.environment() | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = kvanta_process("generate", "org/stories", *WORDS, **environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvanta: error: there is no folder 'org/stories'")


def test_a_gguf_file_of_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own command downloads it, then it is MODEL."""
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    command = [
        str(Path(sys.executable).with_name("hf")),
        "download",
        "org/tiny-GGUF",
        "tiny.gguf",
        "--local-dir",
        str(hub.home / "models"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    done = kvanta_process("generate", str(hub.home / "models" / "tiny.gguf"), "A", "--max-tokens", "5", *SMALL)
    assert done.returncode == 0, done.stderr


def test_a_repository_of_gguf_files_alone(hub: FakeHub) -> None:
    done = kvanta_process("generate", "org/tiny-GGUF", *WORDS, **hub.environment())
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("kvanta: error: 'org/tiny-GGUF' has no config.json on the hub; ")
    assert "org/tiny-GGUF:Q4_K_M" in line


@pytest.mark.parametrize("name", ["org/sizes-GGUF:Q8_0", "hf.co/org/sizes-GGUF:q8_0", "org/sizes-GGUF:latest"])
def test_a_quantization_of_the_hub(hub: FakeHub, name: str) -> None:
    done = kvanta_process("generate", name, "A", "--max-tokens", "5", *SMALL, **hub.environment())
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == ["tiny-Q4_K_M.gguf" if "latest" in name else "tiny-Q8_0.gguf"]


def test_the_first_file_where_there_is_none_of_the_usual_quantization(hub: FakeHub) -> None:
    for _ in range(2):
        done = kvanta_process("generate", "org/tiny-GGUF:latest", "A", "--max-tokens", "5", *SMALL, **hub.environment())
        assert done.returncode == 0, done.stderr
    assert hub.downloads() == ["tiny.gguf"]
    done = kvanta_process("generate", "org/stories:latest", *WORDS, **hub.environment())
    assert done.stdout.startswith(", there was a little girl"), done.stderr


def test_a_quantization_that_the_hub_does_not_have(hub: FakeHub) -> None:
    done = kvanta_process("generate", "org/sizes-GGUF:Q2_K", "A", *SMALL, **hub.environment())
    assert done.returncode == 2
    assert "no GGUF file of the quantization 'Q2_K' on the hub" in done.stderr
