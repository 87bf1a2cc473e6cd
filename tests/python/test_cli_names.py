"""Names of commands and options: help, other names of `kvanta serve`, misspelt ones."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest
from command_line import kvanta, kvanta_process

from kvanta import InputError, __version__, _core
from kvanta.cli import generate, serve
from kvanta.options import llama_cpp as llama_cpp_options
from kvanta.options.foreign import known_arguments


def test_version_and_help() -> None:
    assert kvanta_process("--version").stdout == f"kvanta {__version__}\n"
    for words in ([], ["--help"]):
        done = kvanta(*words)
        assert done.returncode == 0
        for command in ("generate", "chat", "serve", "eval", "plan", "calibrate", "formats", "convert", "bench"):
            assert command in done.stdout


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "eval", "plan", "calibrate", "formats", "convert", "bench"]
)
def test_every_command_has_help(command: str) -> None:
    done = kvanta(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"kvanta {command}" in done.stdout


@pytest.mark.parametrize(
    "words", [["kvanta", "run"], ["kvanta.launch_server"], ["kvanta.entrypoints.openai.api_server"]]
)
def test_other_names_of_serve(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == kvanta("serve", "--help").stdout


@pytest.mark.parametrize(
    ("command", "words", "instead"),
    [
        ("generate", "--cache-type-k q8_0 -ctv q5_1", "--cache-type-k .* --kv-cache-dtype k=int8_g32,v=int5_g32"),
        ("generate", "-c 4096", "-c .* --max-model-len 4096"),
        ("generate", "--ctx_size 0", "--ctx_size .* leave it out: the default is the model's limit"),
        ("generate", "-ngl 99", "-ngl .* --device cuda"),
        ("generate", "--n-gpu-layers 0", "--n-gpu-layers .* --device cpu"),
        ("generate", "-ctv q4_0 -ctk q4_0", "-ctv .* --kv-cache-dtype int4 "),
        ("generate", "-np 4", "-np .* --max-num-seqs 4"),
        ("generate", "--flash-attn on", "--flash-attn .* always on here"),
        ("generate", "-hf org/model", "-hf .* as MODEL: kvanta generate org/model"),
        ("generate", "-m model.gguf", "-m .* as MODEL: kvanta generate model.gguf"),
        ("generate", "--temp 0.5", "--temp .* --temperature 0.5"),
        ("eval", "--temp 0.5", "--temp .* --override-generation-config"),
        ("serve", "-md d.gguf", '-md .* --speculative-config .*"d.gguf"'),
    ],
)
def test_options_of_llama_cpp_name_ours(command: str, words: str, instead: str) -> None:
    parser = importlib.import_module(f"kvanta.cli.{command}").parser()
    with pytest.raises(InputError, match=f"^{instead}"):
        parser.parse_exactly(["MODEL", *words.split()])


@pytest.mark.parametrize(
    ("words", "ours", "left_out"),
    [
        ("-m a.gguf -c 8192 -np 2", "--model a.gguf --max-model-len 4096 --max-num-seqs 2", ""),
        ("-m a.gguf -c 8192 -np 2 -kvu", "--model a.gguf --max-model-len 8192 --max-num-seqs 2", "-kvu"),
        ("MODEL --ctx_size=4096 -t 4", "MODEL --max-model-len 4096 --threads 4", ""),
        ("MODEL -c 0 -ngl 99 --jinja -fa on", "MODEL", "-c, -ngl, --jinja, -fa"),
        ("MODEL -fa -ngl 0", "MODEL --device cpu", "-fa"),
        ("MODEL -ctk q8_0 -ctv q4_0", "MODEL --kv-cache-dtype k=int8_g32,v=int4", ""),
        ("-hf org/tiny-GGUF:Q8_0 -a name", "--model org/tiny-GGUF:Q8_0 --served-model-name name", ""),
        ("-hf org/tiny-GGUF", "--model org/tiny-GGUF:latest", ""),
        ("MODEL --temp 0.5 --top-k=40", 'MODEL --override-generation-config {"temperature":0.5,"top_k":40}', ""),
        ("MODEL --n-predict -1 --min-p 0", 'MODEL --override-generation-config {"min_p":0}', ""),
        ("MODEL --n-predict -1", "MODEL", ""),
        (
            'MODEL --override_generation_config {"top_p":0.5} --top-p 0.9 --repeat-penalty 1.1 --n-predict 99',
            'MODEL --override-generation-config {"top_p":0.5,"repetition_penalty":1.1,"max_new_tokens":99}',
            "",
        ),
        (
            "MODEL --temp 0.5 --override-generation-config.temperature 0.7 --min-p 0.1",
            'MODEL --override-generation-config {"temperature":0.7,"min_p":0.1}',
            "",
        ),
        ("MODEL -b 512 -ub 256 --host 0.0.0.0", "MODEL --max-num-batched-tokens 512 --host 0.0.0.0", "-ub"),
    ],
)
def test_servers_take_options_of_llama_server(
    words: str, ours: str, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, plain = (vars(serve.parser().parse_exactly(each.split())) for each in (words, ours))
    for values in (theirs, plain):
        values["override_generation_config"] = json.loads(values["override_generation_config"] or "null")
    assert theirs == plain
    said = capsys.readouterr().err
    assert said == (f"kvanta: {left_out}: there is nothing to choose here, and no effect\n" if left_out else "")


@pytest.mark.parametrize("words", [["--temp", "hot"], ["--top-k"], ["--min-p=nan"], ["--n-predict", "--jinja"]])
def test_options_of_sampling_are_numbers(words: list[str]) -> None:
    with pytest.raises(InputError, match=f"^{words[0].partition('=')[0]} must be a number, got '"):
        serve.parser().parse_exactly(["MODEL", *words])


def test_formats_of_cache_types_are_formats() -> None:
    for name in llama_cpp_options._FORMATS.values():
        _core.KvScheme.parse(name)


def test_advice_names_options_that_there_are() -> None:
    known = {*serve.parser()._option_string_actions, *generate.parser()._option_string_actions}
    for each in llama_cpp_options._ADVICE:
        assert not each.ours or each.ours in known
        assert set(re.findall(r"--[a-z-]+", each.text)) <= known
        assert not set(each.flags.split()) <= known, "no command would show it"


@pytest.mark.parametrize("flag", ["-t", "-a", "-c", "-s", "-d", "-tp2", "-np"])
def test_short_flags_are_not_abbreviated(flag: str) -> None:
    """argparse would take -t for -tp, and -np for -n p, whatever allow_abbrev says."""
    with pytest.raises(InputError, match=f"^(unknown option )?{flag}[ ;]"):
        generate.parser().parse_exactly(["MODEL", flag, "4"])


@pytest.mark.parametrize("words", [["-n", "2"], ["-n2"], ["-tp", "2"], ["--tp=2"]])
def test_short_flags_of_vllm(words: list[str]) -> None:
    values = serve.parser().parse_exactly(["MODEL", *words])
    assert "2" in (values.nnodes, values.tensor_parallel_size)


@pytest.mark.parametrize(
    ("command", "flag", "expected"),
    [
        ("generate", "--bogus", None),
        ("generate", "--config", None),
        ("generate", "--kv-cache-dtyp", "--kv-cache-dtype"),
        ("generate", "--max-token", "--max-tokens"),
        ("generate", "--context-lenght", "--context-length"),
        ("serve", "--model-impl2", None),  # --model-impl is vLLM's
        ("serve", "--prot", "--port"),
        ("serve", "-thread", "--threads"),
    ],
)
def test_misspelt_options_get_own_ones(command: str, flag: str, expected: str | None) -> None:
    parser = importlib.import_module(f"kvanta.cli.{command}").parser()
    with pytest.raises(InputError, match=f"^unknown option {flag}") as raised:
        parser.parse_exactly(["MODEL", flag, "1"])
    found = re.search(r"did you mean (\S+)\?", str(raised.value))
    assert (found[1] if found else None) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("kv_cache_dtyp", "kv_cache_dtype"), ("eplb_confg", None), ("uds2", None)]
)
def test_misspelt_arguments_get_own_ones(name: str, expected: str | None) -> None:
    with pytest.raises(InputError, match=f"unknown engine option '{name}'") as raised:
        known_arguments({name: 1})
    found = re.search(r"did you mean (\S+)\?", str(raised.value))
    assert (found[1] if found else None) == expected
