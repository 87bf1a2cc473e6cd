"""KV events in vLLM's format: whoever reads them knows what the engine's prefix cache holds."""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from kv_consumer import KvIndex, Subscriber, addresses, decode_batch
from live_server import live_server

from kvanta import LLM, InputError, ResourceError, SamplingParams, _core
from kvanta.kv_events.config import KvEventsConfig, read_kv_events_config
from kvanta.kv_events.messages import EventEncoder
from kvanta.kv_events.publisher import KvEventPublisher

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
VLLM_WHEEL = "KVANTA_VLLM_WHEEL"
"""Environment variable: vLLM's wheel, whose own classes then decode the events."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def small_llm(folder: Path, **config: Any) -> LLM:
    """An engine of some 30 pages, which soon evicts."""
    events = {"enable_kv_cache_events": True, **addresses(folder), **config}
    return LLM(
        "stories260k",
        kv_cache_dtype="int8",
        block_size=16,
        max_model_len=256,
        max_num_seqs=2,
        kv_cache_memory_bytes="160KiB",
        threads=1,
        kv_events_config=events,
    )


def run_prompts(llm: LLM, seed: int, count: int = 30) -> None:
    """Prompts with common beginnings."""
    source = random.Random(seed)
    for _ in range(count):
        tokens = [source.randrange(3, 6)] * 32 + [source.randrange(3, 500) for _ in range(source.randrange(60))]
        llm.generate({"prompt_token_ids": tokens}, ONE_TOKEN)


def pages_of(llm: LLM) -> dict[tuple[int, int], Any]:
    """The engine's own index."""
    return {
        (page.group, page.block_hash): (page.parent_block_hash, tuple(page.tokens))
        for page in llm._engine.cached_pages()
    }


@contextmanager
def vllm_decoder() -> Iterator[Callable[[bytes], list[dict[str, Any]]]]:
    """A decoder with the classes of vLLM's wheel; its other modules are not needed, and so not imported."""
    if VLLM_WHEEL not in os.environ:
        pytest.skip(f"${VLLM_WHEEL} names no wheel of vLLM")
    stubs: Mapping[str, Mapping[str, Any]] = {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda _: None},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), None
        ),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    module = types.ModuleType("vllm_kv_events")
    names = [module.__name__, *stubs]
    try:
        for name, contents in stubs.items():
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__dict__.update(contents)
        sys.modules[module.__name__] = module
        with zipfile.ZipFile(os.environ[VLLM_WHEEL]) as wheel:
            source = wheel.read("vllm/distributed/kv_events.py")
        exec(compile(source, "kv_events.py", "exec"), module.__dict__)
        decoder = msgspec.msgpack.Decoder(module.__dict__["KVEventBatch"])

        def decode(payload: bytes) -> list[dict[str, Any]]:
            batch = decoder.decode(payload)
            assert batch.data_parallel_rank == 0
            return [{"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events]

        yield decode
    finally:
        for name in names:
            sys.modules.pop(name, None)


def check_consumer(folder: Path, index: KvIndex) -> None:
    llm = small_llm(folder)
    subscriber = Subscriber(*addresses(folder).values())
    for seed in range(3):
        run_prompts(llm, seed)
        subscriber.wait_for(index, lambda: index.pages == pages_of(llm))
    assert index.removals > 50, "the cache was never full"
    llm.reset_prefix_cache()
    subscriber.wait_for(index, lambda: index.clears == 2)
    assert not index.pages
    subscriber.close()


def test_a_consumer_knows_the_pages_of_the_cache(folder: Path) -> None:
    check_consumer(folder, KvIndex())


def test_vllms_own_classes_decode_the_events(folder: Path) -> None:
    with vllm_decoder() as decode:
        check_consumer(folder, KvIndex(decode))


def test_a_consumer_that_comes_late_or_misses_messages_asks_for_them(folder: Path) -> None:
    llm = small_llm(folder, topic="kv@one")
    run_prompts(llm, 1)
    index = KvIndex()
    subscriber = Subscriber(**addresses(folder), topic="kv@")
    subscriber.wait_for(index, lambda: index.pages == pages_of(llm))
    assert subscriber.replayed > 0
    subscriber.next, before = subscriber.next - 1, subscriber.next  # as if the last one had not come
    index.apply = lambda payload: None  # type: ignore[method-assign]
    subscriber.catch_up(index)
    assert subscriber.next == before
    subscriber.close()


def test_a_replay_has_the_last_batches_alone(folder: Path) -> None:
    llm = small_llm(folder, buffer_steps=1)
    subscriber = Subscriber(*addresses(folder).values())
    index = KvIndex()
    subscriber.wait_for(index, lambda: index.clears == 1)
    first = subscriber.next
    run_prompts(llm, 1)
    subscriber.wait_for(index, lambda: index.pages == pages_of(llm))
    assert subscriber.next > first + 1
    late = Subscriber(*addresses(folder).values())
    late.next = subscriber.next - 1
    late.catch_up(KvIndex(lambda payload: []))
    assert late.replayed == 1
    subscriber.close()
    late.close()


def test_the_engine_never_waits_for_a_publisher() -> None:
    """Nobody takes the events: the queue is full, and the next one who looks gets every page."""
    config = _core.EngineConfig()
    llm = LLM("stories260k", kv_cache_memory_bytes="8MiB", block_size=16, threads=1, max_model_len=256)
    config.model = llm.config.model
    config.kv_cache_memory_bytes, config.page_size, config.threads, config.kv_events_queue_size = 8 << 20, 16, 1, 5
    engine = _core.Engine(config)
    params = _core.SamplingParams()
    params.max_tokens = 1
    engine.add("one", [7] * 200, params)
    while engine.step() is not None:
        pass
    events = engine.take_kv_events()
    assert events[0].kind == _core.KvEventKind.CLEARED
    assert [event.tokens for event in events[1:]] == [[7] * 16] * 12
    assert engine.take_kv_events() == []


def test_messages_are_those_of_vllm() -> None:
    """Recorded: what vLLM 0.33's own classes write for these events (test_vllms_own_classes reads them)."""
    encoder = EventEncoder(
        block_size=2, medium="GPU", groups=[{"visibility": "full"}, {"visibility": "sliding_window=1024"}]
    )
    stored, removed = _core.KvEventKind.STORED, _core.KvEventKind.REMOVED

    def event(kind: Any, group: int, block: int, parent: int | None, tokens: list[int], salt: str = "") -> Any:
        return types.SimpleNamespace(
            kind=kind, group=group, block_hash=block, parent_block_hash=parent, tokens=tokens, cache_salt=salt
        )

    events = [
        event(_core.KvEventKind.CLEARED, 0, 0, None, []),
        event(stored, 0, 11, None, [1, 2], "tenant"),
        event(stored, 0, 12, 11, [3, 4]),
        event(stored, 1, 12, 11, [3, 4]),
        event(removed, 0, 12, None, []),
        event(removed, 0, 11, None, []),
    ]
    payload = encoder.batch(events, 1.5, 0)
    assert msgspec.msgpack.decode(payload) == msgspec.msgpack.decode(bytes.fromhex(GOLDEN))
    first, chain, window, gone = decode_batch(payload)
    assert first == {"type": "AllBlocksCleared"}
    assert (chain["block_hashes"], chain["token_ids"]) == ([11, 12], [1, 2, 3, 4])
    assert chain["extra_keys"] == [["tenant"], None]
    assert (window["parent_block_hash"], window["kv_cache_spec_sliding_window"]) == (11, 1024)
    assert (gone["block_hashes"], gone["medium"]) == ([12, 11], "GPU")


GOLDEN = (
    "93cb3ff80000000000009481a474797065b0416c6c426c6f636b73436c6561726564de000ba474797065ab426c6f636b5374"
    "6f726564ac626c6f636b5f686173686573920b0cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394"
    "01020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578"
    "7472615f6b6579739291a674656e616e74c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66"
    "756c6c5f617474656e74696f6ede000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910cb170"
    "6172656e745f626c6f636b5f686173680ba9746f6b656e5f696473920304aa626c6f636b5f73697a6502a76c6f72615f6964"
    "c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647801b26b765f63616368655f737065635f6b"
    "696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cd0400"
    "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920c0ba66d656469756da3475055a967726f"
    "75705f6964780000"
)


@contextmanager
def publisher_of(folder: Path, batches: int, tokens: int = 1) -> Iterator[KvEventPublisher]:
    """A publisher of `batches` batches of `tokens` tokens, without an engine."""
    config = types.SimpleNamespace(page_size=1, device="cpu")
    engine: Any = types.SimpleNamespace(config=config, stats=lambda: {"groups": [{"visibility": "full"}]})
    published = addresses(folder)
    result = KvEventPublisher(engine, KvEventsConfig(published["endpoint"], published["replay_endpoint"]))
    kind = _core.KvEventKind.STORED
    event: Any = types.SimpleNamespace(
        kind=kind, group=0, block_hash=1, parent_block_hash=None, tokens=list(range(1000, 1000 + tokens)), cache_salt=""
    )
    try:
        for _ in range(batches):
            result.apply([event])
        yield result
    finally:
        result.close()


@contextmanager
def replay_clients(folder: Path, count: int) -> Iterator[list[zmq.Socket[bytes]]]:
    """Sockets that have sent a request for all batches each."""
    clients: list[zmq.Socket[bytes]] = []
    try:
        for _ in range(count):
            clients.append(zmq.Context.instance().socket(zmq.DEALER))
            clients[-1].setsockopt(zmq.RCVHWM, 1)  # of this process's memory, what they take is not the publisher's
            clients[-1].connect(addresses(folder)["replay_endpoint"])
            clients[-1].send_multipart((b"", bytes(8)))
        yield clients
    finally:
        for each in clients:
            each.close(linger=0)


def received(client: zmq.Socket[bytes], timeout: int) -> list[int]:
    """The numbers of the messages that are there."""
    numbers = []
    while client.poll(timeout):
        numbers.append(int.from_bytes(client.recv_multipart()[2], "big", signed=True))
    return numbers


def test_a_client_that_floods_the_replay_socket_delays_no_event(folder: Path) -> None:
    with publisher_of(folder, 100) as publisher, replay_clients(folder, 1) as (client,):
        for _ in range(900):
            client.send_multipart((b"", bytes(8)))
        assert publisher._replay is not None
        assert publisher._replay.poll(10_000)
        publisher.idle()
        assert len(received(client, 500)) <= 101, "one replay, whatever is asked"
        publisher.idle()
        assert len(received(client, 500)) <= 101


def test_clients_that_do_not_read_take_no_memory(folder: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with publisher_of(folder, 500, tokens=10_000) as publisher, replay_clients(folder, 50) as clients:
        before = resident()
        for _ in range(200):
            publisher.idle()
            clients[0].poll(1)
        assert resident() - before < 100 << 20, "500 batches of 30 kB for 50 clients would be 750 MB"
        assert not publisher._replays, "their places are for others"


def test_a_slow_client_gets_a_whole_replay(folder: Path) -> None:
    with publisher_of(folder, 3000) as publisher, replay_clients(folder, 2) as clients:
        numbers: list[list[int]] = [[], []]
        for _ in range(1000):
            publisher.idle()
            for client, found in zip(clients, numbers, strict=True):
                found.extend(received(client, 1))
            if all(found[-1:] == [-1] for found in numbers):
                break
        assert numbers == [[*range(3000), -1]] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpiont": "tcp://*:1"}, "kv_events_config has 'endpiont'; did you mean endpoint?"),
        ({"publisher": "kafka"}, "publisher must be zmq or null, got 'kafka'"),
        ({"publisher": "zmq", "endpoint": "localhost:5557"}, "endpoint must be as tcp://.*, got 'localhost:5557'"),
        ({"publisher": "zmq", "replay_endpoint": 7}, "replay_endpoint must be a text"),
        ({"publisher": "zmq", "max_queue_size": 0}, "max_queue_size must be a whole number in 1.*, got 0"),
        ({"publisher": "zmq", "hwm": -1}, "hwm must be a whole number in 0.*, got -1"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be True or False, got 'yes'"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        read_kv_events_config(given)


def test_settings_are_vllms_and_sglangs() -> None:
    assert read_kv_events_config({}) is None
    assert read_kv_events_config({"enable_kv_cache_events": True}) == KvEventsConfig()
    assert read_kv_events_config({"publisher": "zmq", "topic": "kv"}) == KvEventsConfig(topic="kv")  # SGLang's
    assert read_kv_events_config({"enable_kv_cache_events": False, "publisher": "zmq"}) is None
    assert read_kv_events_config({"enable_kv_cache_events": True, "publisher": "null"}) is None
    shifted = KvEventsConfig(replay_endpoint="ipc:///run/replay").of_rank(2)
    assert (shifted.endpoint, shifted.replay_endpoint) == ("tcp://*:5559", "ipc:///run/replay_dp2")
    given = read_kv_events_config({}, "tcp://127.0.0.1:7000")
    assert given is not None
    assert given.endpoint == "tcp://127.0.0.1:7000"
    with pytest.raises(InputError, match="kv_events_endpoint and kv_events_config are given"):
        read_kv_events_config({"publisher": "zmq"}, "tcp://*:1")
    with pytest.raises(InputError, match="KV events need enable_prefix_caching"):
        LLM("stories260k", enable_prefix_caching=False, kv_events_endpoint="tcp://127.0.0.1:*")


def test_an_address_in_use_is_an_error() -> None:
    options: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "threads": 1}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": address}
        with pytest.raises(ResourceError, match=f"replay_endpoint {address} cannot be used: Address already in use"):
            LLM("stories260k", kv_events_config=config, **options)


def test_the_server_publishes(folder: Path) -> None:
    options = {"kv_events_config": {"publisher": "zmq", **addresses(folder)}, "block_size": 16}
    with live_server(options=options) as server:
        subscriber, index = Subscriber(*addresses(folder).values()), KvIndex()
        server.completion(prompt=[5] * 40, max_tokens=1)
        subscriber.wait_for(index, lambda: len(index.pages) == 2)
        assert [tokens for _, tokens in index.pages.values()] == [(5,) * 16] * 2
        server.post("/reset_prefix_cache")
        subscriber.wait_for(index, lambda: index.clears == 2)
        subscriber.close()
        with pytest.raises(ResourceError, match=r"kv_events_config: endpoint ipc://.* cannot be used"):
            LLM("stories260k", kv_events_endpoint=f"ipc://{folder}/none/events")
