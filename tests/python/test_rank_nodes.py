"""Ranks on two nodes, here two fronts on one machine: the bits of one process, and what happens when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from server_process import free_port

from kvanta import LLM, InputError, RankLostError, ResourceError, SamplingParams
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.engine.rank_nodes import NodeConnection, NodeListener, Nodes

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_dtype": "fp8+hadamard", "kv_cache_memory_bytes": 1 << 22}
FLAGS = ["--threads", "1", "--kv-cache-dtype", "fp8+hadamard", "--kv-cache-memory-bytes", str(1 << 22)]
SAMPLED = SamplingParams(max_tokens=12, seed=3, logprobs=2, ignore_eos=True)


@contextmanager
def node_1(port: int, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The front of the second of two nodes."""
    command = [sys.executable, "-m", "kvanta", "serve", "stories260k", *FLAGS, *flags]
    command[5:5] = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        f"127.0.0.1:{port}",
    ]  # flags may override them
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def node_0(port: int, **options: Any) -> LLM:
    """The front of the first of two nodes."""
    return LLM("stories260k", **{**OPTIONS, "nnodes": 2, "master_port": port, **options})


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and log."""
    log = process.communicate(timeout=300)[1]
    return process.returncode, log


@pytest.mark.parametrize(
    "division", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}]
)
def test_nodes_give_the_bits_of_one_process(division: dict[str, int]) -> None:
    prompts = ["Once upon a time", "The dog"]
    expected = LLM("stories260k", **OPTIONS).generate(prompts, SAMPLED)
    port = free_port()
    name, size = next(iter(division.items()))
    with node_1(port, "--" + name.replace("_", "-"), str(size)) as process:
        llm = node_0(port, **division)
        found = llm.generate(prompts, SAMPLED)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
        assert [each.outputs[0].logprobs for each in found] == [each.outputs[0].logprobs for each in expected]
        ranks = llm._loaded._ranks
        assert ranks is not None
        assert len(ranks.processes) == size // 2 - 1  # the others are the other node's
        del llm, ranks
        assert end_of(process)[0] == 0


def test_a_rank_of_another_node_is_killed() -> None:
    port = free_port()
    with node_1(port, "-tp", "2") as process:
        llm = node_0(port, tensor_parallel_size=2)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        with pytest.raises(
            RankLostError, match="rank 1 of 2 is lost, and the engine ends: its process was ended by SIGKILL"
        ):
            llm.generate("Once upon a time", SAMPLED)
        assert "SIGKILL" in llm._loaded.lost_rank
        status, log = end_of(process)
        assert status == 1
        assert "ERROR rank 1 of 2 is lost: its process was ended by SIGKILL" in log


def wait_for_end(pid: int) -> None:
    """Waits for a process whose parent has ended: it is gone then, or a zombie that nobody reaps."""
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)


def test_another_node_is_killed() -> None:
    port = free_port()
    with node_1(port, "-pp", "2") as process:
        llm = node_0(port, pipeline_parallel_size=2)
        (rank,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        wait_for_end(int(rank))
        reason = (
            "rank 1 of 2 is lost, and the engine ends: its node, 1 of 2, closed its connection, or the network failed"
        )
        with pytest.raises(RankLostError, match=reason):
            llm.generate("Once upon a time", SAMPLED)


def test_another_node_is_asked_to_end() -> None:
    port = free_port()
    with node_1(port, "-tp", "2") as process:
        llm = node_0(port, tensor_parallel_size=2)
        process.terminate()
        assert end_of(process)[0] == 128 + signal.SIGTERM
        with pytest.raises(
            RankLostError, match="rank 1 of 2 is lost, and the engine ends: its node, 1 of 2, ended its ranks"
        ):
            llm.generate("Once upon a time", SAMPLED)


def test_node_0_is_killed() -> None:
    port = free_port()
    script = (
        f"import kvanta, time; llm = kvanta.LLM('stories260k', **{OPTIONS!r}, tensor_parallel_size=2, nnodes=2, "
        f"master_port={port}); print('ready', flush=True); time.sleep(60)"
    )
    with node_1(port, "-tp", "2") as process:
        front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert front.stdout is not None
        assert front.stdout.readline() == "ready\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        front.kill()
        front.communicate()
        status, log = end_of(process)
        assert status == 1
        assert re.search("ERROR (node 0 closed its connection|rank 0 of 2 is lost)", log)
        assert not Path(f"/proc/{child}").exists()


def test_nodes_with_other_options_do_not_begin() -> None:
    port = free_port()
    with node_1(port, "-tp", "2", "--max-num-seqs", "3") as process:
        with pytest.raises((InputError, ResourceError), match=r"rank . has max_num_seqs = (3|64); all must"):
            node_0(port, tensor_parallel_size=2)
        status, log = end_of(process)
        assert status == 1
        assert "all must have the same" in log


def test_nodes_with_other_scales_are_refused(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    with running_listener() as (listener, nodes):
        config = config_of(nodes, listener.port, quantization_param_path=str(scales))
        with pytest.raises(InputError, match="node 1 has quantization_param_path = '44136fa"):
            NodeConnection(config, Nodes.of(config))


def config_of(nodes: Nodes, port: int, **options: Any) -> Any:
    """The configuration of node 1."""
    arguments = {
        "tensor_parallel_size": nodes.ranks,
        "nnodes": nodes.count,
        "node_rank": 1,
        "master_port": port,
        **options,
    }
    return engine_config(str(resolve_model("stories260k").path), arguments)


@contextmanager
def running_listener(folder: str = "/nonexistent", port: int = 0) -> Iterator[tuple[NodeListener, Nodes]]:
    """Node 0's end without ranks, at any free port unless one is given."""
    nodes = Nodes(count=2, rank=0, ranks=2, address="127.0.0.1", port=port)
    with closing(NodeListener(config_of(nodes, port), nodes, folder)) as listener:
        yield listener, nodes


def test_a_node_needs_the_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVANTA_CLUSTER_KEY", "ours")
    port = free_port()
    with node_1(port, "-tp", "2", KVANTA_CLUSTER_KEY="theirs") as process, running_listener(port=port):
        status, log = end_of(process)
        assert status == 2
        assert "do both have the same KVANTA_CLUSTER_KEY?" in log
    assert "digest received was wrong" in caplog.text


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.1", b"[]", b'{"node": true}', b'{"node": 2}', b'{"node": 1, "version": "0"}']
)
def test_strangers_are_refused(greeting: bytes) -> None:
    with running_listener() as (listener, _):
        stranger = Client(("127.0.0.1", listener.port))
        stranger.send_bytes(greeting)
        try:
            answer = json.loads(stranger.recv_bytes())
        except EOFError:
            answer = {"error": "closed"}
        assert answer["error"]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", ".evil", "", "a" * 300, "rank-1.new", "sub/evil"])
def test_files_of_other_nodes_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    with running_listener(str(folder)) as (listener, nodes):
        config = config_of(nodes, listener.port)
        node = NodeConnection(config, Nodes.of(config))
        node._connection.send_bytes(name.encode() + b"\0evil")
        deadline = time.monotonic() + 120
        while not (folder / "rank-1.error").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [path.name for path in tmp_path.rglob("*")] == ["ranks", "rank-1.error"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            node_0(port, tensor_parallel_size=2)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(InputError, match=r"master_addr, master_port: cannot listen at 192\.0\.2\.1"):
        node_0(free_port(), tensor_parallel_size=2, master_addr="192.0.2.1")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nnodes": 3}, "nnodes = 3: does not divide the 2 ranks"),
        ({"node_rank": 1}, "node_rank = 1: `kvanta serve` runs the ranks of such a node"),
        ({"master_addr": "127.0.0.1:x"}, "master_addr = '127.0.0.1:x': must be an address, or ADDRESS:PORT"),
        ({"master_addr": "0.0.0.0"}, "master_addr = '0.0.0.0': must be an address at which other nodes reach node 0"),
        ({"master_port": 65536}, "master_port = 65536: must be between 0 and 65535"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        node_0(free_port(), **{"tensor_parallel_size": 2, **options})


def test_a_node_that_does_not_exist_is_refused() -> None:
    with node_1(free_port(), "-tp", "2", "--node-rank", "2") as process:
        status, log = end_of(process)
        assert status == 2
        assert "node_rank = 2: there are nodes 0 to 1 (nnodes)" in log


def test_a_silent_stranger_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvanta.engine.rank_nodes._GREETING_S", 3600)
    with running_listener() as (listener, nodes), socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        config = config_of(nodes, listener.port)
        NodeConnection(config, Nodes.of(config)).close()
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):  # it was accepted earlier, and is still waited for
            stranger.recv(1)


def test_refused_connections_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    begin = time.monotonic()
    with running_listener() as (listener, _):
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", listener.port)) as stranger, suppress(OSError):
                stranger.sendall(b"GET / HTTP/1.1")
                stranger.recv(1)  # until it is refused
    lines = [line for line in caplog.messages if "is refused" in line]
    assert 1 <= len(lines) <= 2 + time.monotonic() - begin


def test_nobody_can_connect_once_all_nodes_have_come() -> None:
    with running_listener() as (listener, nodes):
        config = config_of(nodes, listener.port)
        node = NodeConnection(config, Nodes.of(config))
        listener._accepting.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port))
        node.close()


def test_a_folder_of_ranks_goes_with_a_signal(tmp_path: Path) -> None:
    """SIGTERM while node 0 waits for the others; and SIGKILL, after which the next start removes it."""
    folders = tmp_path / "temporary"
    folders.mkdir()

    def start() -> subprocess.Popen[str]:
        earlier = set(folders.iterdir())
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "kvanta", "serve", "stories260k", *FLAGS, "-tp", "2", "--port", "0"]
        command += ["--nnodes", "2", "--master-addr", address]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folders)}
        )
        while not any((folder / "rank-0.ready").exists() for folder in set(folders.iterdir()) - earlier):
            assert process.poll() is None
            time.sleep(0.01)
        return process

    process = start()
    process.terminate()
    assert end_of(process)[0] == 128 + signal.SIGTERM
    assert not list(folders.iterdir())
    process = start()
    process.kill()
    end_of(process)
    [left] = folders.iterdir()
    (folders / "kvanta-ranks-other").mkdir()  # of an older version
    process = start()
    assert not left.exists()
    process.terminate()
    end_of(process)
    assert [each.name for each in folders.iterdir()] == ["kvanta-ranks-other"]


def test_a_port_is_given_back() -> None:
    nodes = Nodes(count=2, rank=0, ranks=2, address="127.0.0.1", port=free_port())
    for _ in range(2):
        NodeListener(config_of(nodes, nodes.port), nodes, "/nonexistent").close()


def test_a_node_that_comes_again_waits_for_the_next_engine(tmp_path: Path) -> None:
    """Its supervisor may be faster than node 0's."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        with running_listener(str(tmp_path), port) as (_, nodes):
            config = config_of(nodes, port)
            earlier = NodeConnection(config, Nodes.of(config))
            again = pool.submit(NodeConnection, config, Nodes.of(config))
            time.sleep(0.5)
            assert not again.done()
            earlier.close()
        with running_listener(str(tmp_path), port):
            again.result(120).close()


def test_files_go_from_node_to_node(tmp_path: Path) -> None:
    folders = [tmp_path / str(node) for node in range(3)]
    for folder in folders:
        folder.mkdir()
    nodes = Nodes(count=3, rank=0, ranks=3, address="127.0.0.1", port=free_port())
    with closing(NodeListener(config_of(nodes, nodes.port), nodes, str(folders[0]))):
        configs = [config_of(nodes, nodes.port, node_rank=node) for node in (1, 2)]
        with contextlib.ExitStack() as stack:
            for config, folder in zip(configs, folders[1:], strict=True):
                node = stack.enter_context(closing(NodeConnection(config, Nodes.of(config))))
                node.start(str(folder))
            (folders[1] / "rank-1.ready").write_text("from node 1")
            deadline = time.monotonic() + 120
            while not (folders[2] / "rank-1.ready").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (folders[2] / "rank-1.ready").read_text() == "from node 1"
            assert (folders[0] / "rank-1.ready").read_text() == "from node 1"


def test_scales_that_do_not_exist() -> None:
    nodes = Nodes(count=2, rank=1, ranks=2, address="127.0.0.1", port=1)
    with pytest.raises(InputError, match="quantization_param_path = '/no/such': No such file"):
        NodeConnection(config_of(nodes, 1, quantization_param_path="/no/such"), nodes)
