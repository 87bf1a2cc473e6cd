"""kvanta eval on the shipped model: its figures, its memory on disk, and what the user sees."""

from __future__ import annotations

import hashlib
import json
import math
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_checkpoint

from kvanta import LLM, InputError
from kvanta.cli import eval as eval_command
from kvanta.cli import main
from kvanta.evaluate import Evaluation, Settings, evaluate
from kvanta.evaluate.divergence import kl_divergence, log_softmax
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.passages import Passage, beginning_of, read_text, tokenize
from kvanta.evaluate.predictions import predictions
from kvanta.evaluate.search import Search
from kvanta.formats import RECOMMENDED

MODEL = "stories260k"
SMALL = Settings(formats=["int8", "fp8"], context=128, tokens=512, engine={"threads": 1})
WORDS = ["eval", MODEL, "--context", "128", "--tokens", "512", "--threads", "1"]
KL_KEYS = {"kl_mean", "kl_mean_ci95", "kl_median", "kl_p99", "kl_max", "top1", "ppl", "ppl_ratio"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def engine(scheme: str, **options: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that were not given
        return LLM(MODEL, kv_cache_dtype=scheme, threads=1, max_num_seqs=1, **options)


def refuse(*_: object) -> LLM:
    raise AssertionError("the reference is computed again")


def test_figures_against_double_precision() -> None:
    evaluation = Evaluation(MODEL, SMALL)
    evaluation.prepare()
    rows = dict(evaluation.run())
    reference = engine("bf16")
    exact = [reference.logits(passage.tokens)[passage.first : -1] for passage in evaluation.passages]
    targets = [np.array(passage.targets) for passage in evaluation.passages]
    assert [len(part) for part in exact] == [64] * 4
    reference_ppl = math.exp(-np.mean([log_softmax(p)[np.arange(64), t] for p, t in zip(exact, targets, strict=True)]))
    assert evaluation.report()["reference_ppl"] == pytest.approx(reference_ppl, rel=1e-6)
    for name, row in rows.items():
        llm = engine(name)
        own = [llm.logits(passage.tokens)[passage.first : -1] for passage in evaluation.passages]
        kl = np.concatenate([kl_divergence(*pair) for pair in zip(exact, own, strict=True)])
        for key, value in {
            "kl_mean": kl.mean(),
            "kl_median": np.median(kl),
            "kl_p99": np.quantile(kl, 0.99),
            "kl_max": kl.max(),
        }.items():
            assert row[key] == pytest.approx(value, rel=1e-3, abs=3e-7)
        assert row["kl_mean_ci95"][0] < row["kl_mean"] < row["kl_mean_ci95"][1]
        same = np.mean([a.argmax(-1) == b.argmax(-1) for a, b in zip(exact, own, strict=True)])
        assert row["top1"] == same
        ppl = math.exp(-np.mean([log_softmax(p)[np.arange(64), t] for p, t in zip(own, targets, strict=True)]))
        assert row["ppl"] == pytest.approx(ppl, rel=1e-6)
        assert row["ppl_ratio"] == pytest.approx(ppl / reference_ppl, rel=1e-6)
        assert row["bytes_per_token"] == llm.stats()["bytes_per_token"]
        assert row["bits_per_element"] == row["bytes_per_token"] * 8 / (2 * 5 * 4 * 8)
        assert row["saturated"] == 0
    assert rows["int8"]["kl_mean"] < rows["fp8"]["kl_mean"]


@pytest.mark.parametrize("first", [5, 127, 200])
def test_predictions_come_in_pieces(first: int) -> None:
    tokens = tuple(range(20, 320))
    llm = engine("int8", max_num_batched_tokens=64)
    pieces = list(predictions(llm, Passage(tokens, first)))
    assert max(map(len, pieces)) <= 64
    np.testing.assert_array_equal(np.concatenate(pieces), engine("int8").logits(tokens)[first:-1])
    again = list(predictions(llm, Passage(tokens, 5)))  # another passage of the same beginning
    np.testing.assert_array_equal(np.concatenate(again), engine("int8").logits(tokens)[5:-1])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    words = ["--context", "160", "--formats", "int8", "k=int8,v=fp8", "--recommend", "kl_mean<0.5", "--json", str(file)]
    assert main([*WORDS, *words, "--tasks", "kl", "needle", "generation", "--generation-tokens", "20"]) == 0
    printed = capsys.readouterr()
    report = json.loads(file.read_text())
    assert {"model", "text", "context", "tokens", "reference_ppl", "formats"} <= report.keys()
    assert (report["model"], report["context"], report["tokens"], report["scored_tokens"]) == (MODEL, 160, 480, 240)
    assert report["ci95_over"] == "blocks of 128 tokens"
    assert report["ci95_over"] in printed.out
    assert list(report["formats"]) == ["int8", "k=int8,v=fp8"]
    for name, row in report["formats"].items():
        assert row.keys() >= KL_KEYS | {"bits_per_element", "bytes_per_token", "saturated", "needle", "generation"}
        assert name in printed.out
        assert row["needle_by_depth"].keys() == {"0", "0.25", "0.5", "0.75", "1"}
        generation = row["generation"]
        assert len(generation["equal_tokens"]) == 4
        assert 0 < generation["equal_share"] <= 1
        assert generation["kl_mean"] > 0
    assert report["reference_figures"]["generation"]["tokens"] == 80
    assert report["recommended"]["format"] == "k=int8,v=fp8"
    assert report["recommended"]["command"] in printed.out
    assert "--kv-cache-dtype k=int8,v=fp8" in printed.out
    assert main([*WORDS, "--context", "160", "--json", "-"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert {"fp8_e4m3", "fp8_e5m2", "int8"} <= everything["formats"].keys()
    assert "int4" not in everything["formats"]  # heads of 8, stored as 32 channels: more bits than bf16
    assert everything["formats"]["int8"]["kl_mean"] == report["formats"]["int8"]["kl_mean"]


def test_the_reference_is_at_no_distance_from_itself() -> None:
    settings = Settings(**{**vars(SMALL), "formats": ["bf16"], "tasks": ["kl", "generation"], "generation_tokens": 24})
    row = evaluate(MODEL, settings)["formats"]["bf16"]
    assert row["kl_max"] < 1e-6
    assert row["ppl_ratio"] == pytest.approx(1, abs=1e-7)
    assert (row["top1"], row["generation"]["equal_share"], row["generation"]["top1"]) == (1, 1, 1)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("Once upon a time there was a little girl. " * 20)
    report = evaluate(MODEL, Settings(**{**vars(SMALL), "text": str(tmp_path / "my.txt"), "context": 64}))
    assert report["text"] == str(tmp_path / "my.txt")
    assert report["text_sha256"] == hashlib.sha256((tmp_path / "my.txt").read_bytes()).hexdigest()
    assert report["reference_ppl"] < 6  # it repeats itself


def test_a_text_shorter_than_tokens_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.txt").write_text("Once upon a time there was a little girl. " * 20)
    words = ["eval", MODEL, "--threads", "1", "--formats", "int8", "--text", str(tmp_path / "my.txt")]
    words += ["--context", "64"]
    assert main([*words, "--tokens", "9999"]) == 0
    assert re.search(r"^kvanta: --tokens is 9999; the text has \d{3} tokens$", capsys.readouterr().err, re.MULTILINE)
    assert main(words) == 0  # the default
    assert "--tokens" not in capsys.readouterr().err


class Interrupting:
    """After the first format's figures, Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, formats_done: int) -> None:
        original = EngineFactory.engine
        calls = iter(range(100))

        def made(factory: EngineFactory, scheme: str, layers: str = "") -> Any:
            if next(calls) == formats_done + 1:  # and the reference
                signal.raise_signal(signal.SIGINT)
            return original(factory, scheme, layers)

        monkeypatch.setattr(EngineFactory, "engine", made)


def test_ctrl_c_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Interrupting(monkeypatch, 1)
    assert main([*WORDS, "--formats", "int8", "fp8", "--json", str(tmp_path / "r.json")]) == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "kvanta: interrupted"
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"]
    assert list(report["formats"]) == ["int8"]
    assert "int8" in printed.out


def test_json_is_written_after_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(
        "kvanta.cli.eval.write_json_file",
        lambda target, report: written.append((list(report["formats"]), report["interrupted"])),
    )
    assert main([*WORDS, "--formats", "int8", "fp8", "--json", str(tmp_path / "r.json")]) == 0
    assert written == [(["int8"], True), (["int8", "fp8"], True), (["int8", "fp8"], False)]


def test_ctrl_c_before_the_first_format(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Interrupting(monkeypatch, -1)
    assert main([*WORDS, "--json", str(tmp_path / "r.json")]) == 130
    assert not (tmp_path / "r.json").exists()
    assert not list((home / "eval").glob("*")) if (home / "eval").exists() else True


def test_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--formats", "fp8", "--search", "9.5", "--search-tokens", "256", "--scheme", "s.json", "--json", "r.json"]
    assert main([*WORDS, *words]) == 0
    report = json.loads(Path("r.json").read_text())
    scheme = json.loads(Path("s.json").read_text())
    assert len(scheme["layers"]) == 5
    assert scheme["bits_per_element"] <= 9.5
    found = report["formats"]["s.json"]
    assert found["bits_per_element"] == scheme["bits_per_element"] == report["search"][0]["bits_per_element"]
    assert report["search"][0]["kl_mean"] <= report["search"][0]["uniform_kl_mean"]
    assert report["search"][0]["held_out"]["kl_mean"] == found["kl_mean"]
    assert "s.json: mean KL" in capsys.readouterr().out
    assert found["kl_mean"] < report["formats"]["fp8"]["kl_mean"]
    assert main(["generate", MODEL, "Once", "--threads", "1", "--max-tokens", "3", "--kv-cache-dtype", "s.json"]) == 0
    assert "s.json cache" in capsys.readouterr().err
    assert main(["plan", MODEL, "--formats", "s.json", "--json", "p.json"]) == 0
    assert json.loads(Path("p.json").read_text())["formats"][0]["bits_per_element"] == scheme["bits_per_element"]
    monkeypatch.chdir(tmp_path)
    words = ["--formats", "fp8", "--search", "9.5", "8.5", "--search-tokens", "256", "--scheme", "t.json"]
    assert main([*WORDS, *words]) == 0
    assert json.loads(Path("t-9.5.json").read_text())["layers"] == scheme["layers"]
    assert json.loads(Path("t-8.5.json").read_text())["bits_per_element"] <= 8.5
    assert main([*WORDS, *words, "--search-formats", "int8", "fp8", "--search-modifiers", "+sink=0"]) == 0
    assert all("+sink=0" in layer for layer in json.loads(Path("t-8.5.json").read_text())["layers"])
    monkeypatch.setattr(EngineFactory, "engine", refuse)  # what was measured is kept
    search = Search(
        EngineFactory.find(MODEL, 128, 1, {"threads": 1}), Evaluation(MODEL, SMALL).calibration_passages(256), [9.5]
    )
    assert search.run()[0].layers == scheme["layers"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    layers = [row["scheme"] for row in engine("s.json").stats()["layers"]]
    assert layers == [row["scheme"] for row in engine("bf16", kv_cache_dtype_layers=map_of(scheme)).stats()["layers"]]


def test_the_reference_depends_on_the_scheme_file_and_the_device(tmp_path: Path) -> None:
    factory = EngineFactory.find(MODEL, 64, 1, {})
    file = tmp_path / "s.json"
    file.write_text("{}")
    before = factory.identity(str(file))
    assert factory.identity(str(file)) == before
    file.write_text("{} ")
    assert factory.identity(str(file)) != before
    on_gpu = EngineFactory.find(MODEL, 64, 1, {"device": "cuda"})
    assert on_gpu.identity("bf16") != factory.identity("bf16")


def map_of(scheme: dict[str, Any]) -> str:
    return ";".join(f"{index}={text}" for index, text in enumerate(scheme["layers"]))


def test_scheme_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    good = {"kvanta_scheme_version": 1, "layers": ["int8"] * 5}
    file.write_text(json.dumps(good))
    assert engine(str(file)).stats()["layers"][4]["scheme"] == engine("int8").stats()["layers"][4]["scheme"]
    with pytest.raises(InputError, match="kv_cache_dtype_layers cannot be given"):
        engine(str(file), kv_cache_dtype_layers="0=bf16")
    bad: list[tuple[Any, str]] = [
        ([], "kvanta_scheme_version"),
        ({"layers": []}, "kvanta_scheme_version"),
        ({**good, "layers": "int8"}, "must be a list"),
        ({**good, "layers": ["int8"] * 4}, "4 layers; this one has 5"),
        ({**good, "layers": ["int8"] * 6}, "6 layers; this one has 5"),
        ({**good, "layers": ["int9"] * 5}, "int9"),
        ({**good, "layers": ["int8;1=bf16"] * 5}, "not a scheme"),
        ({**good, "layers": [8] * 5}, "must be a list of schemes"),
    ]
    for content, reason in bad:
        file.write_text(json.dumps(content))
        with pytest.raises(InputError, match=reason):
            engine(str(file))
    file.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        engine(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        engine(str(tmp_path / "none.json"))


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    assert main([*WORDS, "--formats", "int8", "fp8", "bf16", "--plot", str(file)]) == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name, reason in (("p.bmp", "does not end in"), ("no/p.png", "no folder")):
        assert main([*WORDS, "--plot", str(tmp_path / name)]) == 2
        assert reason in capsys.readouterr().err


def test_the_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*WORDS, "--plot", "p.png"]) == 2
    assert "pip install 'kvanta[plot]'" in capsys.readouterr().err


BAD: dict[str, tuple[list[str], str]] = {
    "no such task": (["--tasks", "speed"], "speed.*kl.*needle"),
    "no such format": (["--formats", "int8", "int9"], "int9.*int8"),
    "a format that does not fit": (["--formats", "mla_int4"], "mla_int4 stores the latents"),
    "no such reference": (["--reference", "bf17"], "bf17"),
    "no such text": (["--text", "/no/such/text"], "/no/such/text"),
    "no tokens": (["--tokens", "0"], "tokens must .* got 0"),
    "too few tokens": (["--tokens", "5"], "5 tokens"),
    "too long a context": (["--context", "4096"], "512.*4096"),
    "too short a context": (["--context", "4"], "context is 4"),
    "a depth": (["--tasks", "needle", "--depths", "120"], "depth must .* got 1.2"),
    "no room for a needle": (["--tasks", "needle", "--context", "20"], "no room for a needle"),
    "needles": (["--tasks", "needle", "--needles", "9"], "needles must .* got 9"),
    "no figure": (["--recommend", "speed>3"], "speed"),
    "too few bits": (["--search", "3"], "no scheme has 3 bits"),
    "bits that are no number": (["--search", "nan"], "must be a number, got nan"),
    "a search among schemes": (["--search", "9", "--search-formats", "k=int8,v=fp8"], "k=int8,v=fp8"),
    "a search among unknown formats": (["--search", "9", "--search-formats", "int9"], "int9.*int8"),
    "a search with an unknown modifier": (["--search", "9", "--search-modifiers", "+sunk=1"], "sunk"),
    "a scheme file's name": (["--search", "9", "--scheme", "s.txt"], "s.txt"),
    "formats twice": (["--formats", "int8", "--kv-cache-dtype", "fp8"], "--formats and --kv-cache-dtype"),
    "no text for the search": (["--tokens", "10000000", "--search", "9"], "left for the search"),
    "levels without a floor": (["--formats", "int8", "--levels", "50"], "levels need a floor below int8"),
    "levels beyond all pages": (["--formats", "int8", "--levels", "120"], "levels must be from 0 to 1"),
    "levels of a search": (["--levels", "50", "--search", "9"], "--levels: not together"),
    "levels of needles": (["--tasks", "needle", "--levels", "50"], "levels are of the task kl"),
    "a picture without kl": (["--tasks", "needle", "--plot", "p.png"], "kl"),
}


@pytest.mark.parametrize(("words", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", MODEL, "--threads", "1", "--tokens", "256", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line)


def test_a_long_text_is_not_read_to_its_end() -> None:
    tokenizer = EngineFactory.find(MODEL, 128, 1, {}).tokenizer()
    text = read_text(None)
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert tokenize(text, tokenizer, 1000) == whole[:1000]
    assert tokenize(text, tokenizer, 10**7) == whole
    assert tokenize("a", tokenizer, 5) == tokenizer.encode("a", add_special_tokens=False)
    assert beginning_of(tokenizer) == [1]


@pytest.mark.parametrize(
    ("words", "formats", "recommended"),
    [
        (["--recommend", "kl_mean<9"], None, True),
        (["--recommend", "kl_mean<9", "--formats", "all"], None, False),
        (["--recommend", "kl_mean<9", "--formats", "fp8"], ["fp8"], True),
        ([], None, False),
        (["--formats", "all"], None, False),
    ],
)
def test_formats_that_are_measured(words: list[str], formats: list[str] | None, recommended: bool) -> None:
    settings = eval_command._settings(eval_command.parser().parse_exactly(["MODEL", *words]))
    assert (settings.formats, settings.recommended) == (formats, recommended)


def test_the_time_is_estimated_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--formats", "int8", "fp8", "t4"]) == 0
    assert len(re.findall("^kvanta: 3 formats, about [0-9]+ seconds$", capsys.readouterr().err, re.MULTILINE)) == 1
    assert main([*WORDS, "--formats", "int8"]) == 0
    assert "about" not in capsys.readouterr().err


def test_recommended_formats_of_a_model_that_takes_all(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model"))
    usable = EngineFactory.find(folder, 128, 1, {"device": "cpu"}).usable_formats
    assert usable(None, recommended=True) == [*RECOMMENDED]
    on_a_gpu = EngineFactory.find(folder, 128, 1, {"device": "cuda"}).usable_formats
    assert on_a_gpu(None, recommended=True) == [*RECOMMENDED]


@pytest.mark.parametrize(
    ("formats", "seconds", "expected"),
    [(8, 2.0, "8 formats, about 16 seconds"), (29, 60.0, "29 formats, about 29 minutes")],
)
def test_estimate_of_the_time(formats: int, seconds: float, expected: str) -> None:
    assert eval_command._estimate(formats, seconds) == expected
