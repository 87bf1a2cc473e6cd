"""`kvanta serve` as an operator meets it: a process with signals, a port, a log, and clients that die."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from live_server import events
from prometheus_client.parser import text_string_to_metric_families
from serve_command import COMMAND, LONG, SMALL, serving

from kvanta import InputError, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.cli import main
from kvanta.cli.arguments import engine_arguments, given_options, model_of
from kvanta.cli.serve import parser
from kvanta.engine.generation import Generation
from kvanta.engine.loaded_model import LoadedModel
from kvanta.server.options import OPTIONS, read_options
from kvanta.server.run import _banner, load
from kvanta.text.prompts import read_prompt


def test_a_name_cannot_steer_the_terminal() -> None:
    service: Any = SimpleNamespace(names=["a\x1b]0;title\x07\nb"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        shown = _banner(service, listener, read_options({}), 1.0)
    assert shown.isprintable()
    assert shown.startswith("serving 'a\\x1b]0;title\\x07\\nb' on http://127.0.0.1:")


def metrics(client: httpx2.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def choices_of(data: list[str]) -> list[Any]:
    return [choice for line in data[:-1] for choice in json.loads(line).get("choices", [])]


def test_running_requests_finish_after_a_signal() -> None:
    log: list[str] = []
    with serving("stories260k", *SMALL, "--max-num-seqs", "2", log=log) as (process, client):
        with client.stream("POST", "/v1/completions", json={**LONG, "n": 8}) as response:
            lines = events(response)
            data = [next(lines)]
            process.send_signal(signal.SIGTERM)
            data += lines
        assert data[-1] == "[DONE]"
        finished = [choice["index"] for choice in choices_of(data) if choice["finish_reason"] == "length"]
        assert sorted(finished) == list(range(8))
        assert process.wait(60) == 0
    assert log[-1].endswith("stopped\n")  # and no complaint about what was not freed


def test_a_second_signal_ends_them() -> None:
    with serving("stories260k", *SMALL, "--max-num-seqs", "1") as (process, client):
        with client.stream("POST", "/v1/completions", json={**LONG, "n": 200}) as response:
            lines = events(response)
            next(lines)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            data = list(lines)
        assert data[-1] == "[DONE]"
        assert "shutting down" in json.loads(data[-2])["error"]["message"]
        assert process.wait(60) == 0


KILLED_CLIENT = """
import sys, httpx2
with httpx2.stream("POST", sys.argv[1] + "/v1/completions", content=sys.argv[2], timeout=60,
                   headers={"Content-Type": "application/json"}) as response:
    print(next(response.iter_lines()), flush=True)
    sys.stdin.read()
"""


def test_a_killed_client_frees_its_pages() -> None:
    with serving("stories260k", *SMALL, "--max-num-seqs", "1", "--no-enable-prefix-caching") as (_, client):
        words = [sys.executable, "-c", KILLED_CLIENT, str(client.base_url).rstrip("/"), json.dumps({**LONG, "n": 200})]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline().startswith("data: ")
            other.kill()
        patience = threading.Event()
        for _ in range(600):
            seen = metrics(client)
            if seen["kvanta:num_requests_running"] + seen["kvanta:num_requests_waiting"] == 0:
                break
            patience.wait(0.1)
        assert seen["kvanta:num_requests_running"] == seen["kvanta:num_requests_waiting"] == 0
        assert seen["kvanta:kv_cache_pages_used"] == 0
        assert seen["kvanta:generation_tokens_total"] < 200 * 400


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with socket.socket() as holder:  # a port that is free in a moment
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    words = [*COMMAND, "stories260k", *SMALL, "--port", str(port)]
    with Path("/dev/full").open("w") as full, subprocess.Popen(words, stderr=full) as process:
        try:
            patience = threading.Event()
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                for _ in range(600):
                    try:
                        client.get("/health")
                        break
                    except httpx2.ConnectError:
                        patience.wait(0.1)
                body = {"prompt": "a", "max_tokens": 3}
                assert [client.post("/v1/completions", json=body).status_code for _ in range(3)] == [200] * 3
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert main(["serve", "stories260k", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "MODEL is missing"),
        (("nowhere",), "no model 'nowhere'"),
        (("stories260k", "--host", "999.1.1.1"), "host"),
        (("stories260k", "--root-path", "foo"), "--root-path: 'foo' does not begin with /"),
        (("stories260k", "--disable-access-log-for-endpoints", "/health,metrics"), "'metrics' does not begin with /"),
        (("stories260k", "--kv-cache-dtyp", "fp8"), "did you mean --kv-cache-dtype?"),
        (("stories260k", "--kv-cache-dtype", "fp9"), "fp9"),
        (("stories260k", "--quantization", "awq"), "--kv-cache-dtype"),
        (("stories260k", "--chat-template", "{% if %}"), "chat template cannot be read"),
        (("stories260k", "--chat-template", "/nowhere.jinja"), "/nowhere.jinja"),
        (("stories260k", "--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"), "certificate"),
        (("stories260k", "--quantization-param-path", "/nowhere.json"), "/nowhere.json"),
    ],
)
def test_what_cannot_start_says_why(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words, *SMALL]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvanta: error: ")
    assert said in line


VLLM = "stories260k --kv-cache-dtype fp8 --calculate-kv-scales --max-model-len 256 --gpu-memory-utilization 0.9 -tp 1"
SGLANG = (
    "--model-path stories260k --kv-cache-dtype fp8_e4m3 --quantization-param-path {scales} --host 0.0.0.0 --port 30000 "
    "--context-length 256 --mem-fraction-static 0.8 --log-level info --api-key a --chunked-prefill-size 128"
)
APHRODITE = (
    "stories260k --kv-cache-dtype fp8_e4m3 --quantization-param-path {scales} --max-model-len 256 --api-keys a,b "
    "--launch-kobold-api"
)


@pytest.mark.parametrize(
    ("line", "notes", "keys", "address"),
    [
        (VLLM, ["gpu_memory_utilization"], [], ("127.0.0.1", 8000)),
        (SGLANG, ["mem_fraction_static"], ["a"], ("0.0.0.0", 30000)),
        (APHRODITE, ["launch_kobold_api"], ["a,b"], ("127.0.0.1", 8000)),
    ],
)
def test_the_command_lines_of_other_servers(
    *,
    line: str,
    notes: list[str],
    keys: list[str],
    address: tuple[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As their documentation has them, but for the name of the program and what fits stories260k."""
    scales = tmp_path / "scales.json"
    layers = {str(layer): 0.5 for layer in range(5)}
    scales.write_text(
        json.dumps({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}})
    )
    values = parser().parse_exactly(line.format(scales=scales).split())
    said = capsys.readouterr().err.splitlines()
    assert [text.split()[1] for text in said] == notes
    assert all("does nothing here" in text for text in said)
    options = read_options(given_options(values, OPTIONS))
    assert (options.api_key, (options.host, options.port)) == (keys, address)
    loaded = LoadedModel(model_of(values), {**engine_arguments(values), "kv_cache_memory_bytes": "8MiB", "threads": 1})
    assert loaded.engine.config.max_model_len == 256
    stats = loaded.stats()
    assert stats["kv_cache_dtype"].startswith("fp8")
    if "{scales}" in line:  # read back from where the engine uses them
        assert {scale for layer in stats["layers"] for scale in layer["k_scale"]} == {0.5}


def test_aliases_and_opposites(capsys: pytest.CaptureFixture[str]) -> None:
    values = parser().parse_exactly(["m", "--disable-radix-cache", "--disable-log-requests", "--tokenizer-path", "t"])
    assert engine_arguments(values) == {"enable_prefix_caching": False}
    options = read_options(given_options(values, OPTIONS))
    assert (options.log_requests, options.tokenizer) == (False, "t")
    assert capsys.readouterr().err == ""
    flags = [flag for action in parser()._actions for flag in action.option_strings]
    assert len(flags) == len(set(flags))


def test_another_models_tokenizer_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in (SHIPPED / "stories260k").iterdir():
        shutil.copy(file, tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["added_tokens"].append({**description["added_tokens"][0], "id": 512, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    options = read_options({"tokenizer": str(tmp_path)})
    loaded = load("stories260k", {"kv_cache_memory_bytes": "8MiB", "threads": 1}, options)
    assert "is it another model's tokenizer?" in caplog.text
    generation = Generation(
        "a", read_prompt("<new>", loaded.tokenizer), SamplingParams(), loaded.tokenizer, loaded.grammars
    )
    with pytest.raises(InputError, match=r"token 512 .*the model's ids are 0 to 511$"):
        generation.add_to(loaded.engine, random.Random(1))


def test_nothing_else_needs_the_servers_packages() -> None:
    names = ("fastapi", "uvicorn", "starlette", "prometheus_client")
    check = f"import sys, kvanta.cli.serve; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_unix_domain_socket_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "kvanta.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # by a server that was killed
    process = subprocess.Popen([*COMMAND, "stories260k", *SMALL, "--uds", path], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        banner = next(line for line in process.stderr if "serving " in line)
        assert f"on {path}," in banner
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx2.Client(base_url="http://any", transport=httpx2.HTTPTransport(uds=str(path)), timeout=120) as client:
            answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
        assert answer.status_code == 200
        second = subprocess.run(
            [*COMMAND, "stories260k", *SMALL, "--uds", path], stderr=subprocess.PIPE, text=True, check=False
        )
        assert second.returncode == 1
        assert f"cannot listen on {path}: Address already in use; see --uds" in second.stderr
        process.terminate()
        assert process.wait(60) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
