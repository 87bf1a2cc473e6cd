"""--kv-store: two servers on one Redis, which is killed and restarted under load; passwords, TLS, times to live."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from redis_process import RedisProcess, running_redis

from kvanta import LLM, InputError, SamplingParams

_OPTIONS: dict[str, Any] = {
    "kv_cache_dtype": "int8",
    "max_model_len": 512,
    "block_size": 16,
    "threads": 1,
    "kv_cache_memory_bytes": "1MiB",
}
_PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)


def _prompt(stem: int, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [3 + (stem * 7 + i * i) % 400 for i in range(length)]}


def _answer(llm: LLM, prompt: dict[str, Any]) -> tuple[Any, int]:
    """Tokens and log-probabilities, all bits of them, and cached prompt tokens."""
    [output] = llm.generate([prompt], _PARAMS)
    return (output.outputs[0].token_ids, output.outputs[0].logprobs), int(output.num_cached_tokens or 0)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collects the warnings about the store."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield told
    told += [str(each.message) for each in heard if "kv_store" in str(each.message)]


def _refused(url: str, prompt: dict[str, Any], want: Any) -> list[str]:
    """The warnings of an engine that cannot use its store, and answers all the same."""
    with _heard() as told:
        llm = LLM("stories260k", **_OPTIONS, kv_store=url)
        assert _answer(llm, prompt)[0] == want
        llm._engine.flush_prefix_cache()
        _answer(llm, _prompt(3, 20))
    assert told
    return told


def _filled(redis: RedisProcess, at_least: int) -> None:
    """Waits until the pages have been written."""
    for _ in range(6000):
        if len(redis.keys()) >= at_least:
            return
        time.sleep(0.02)
    raise AssertionError(f"{len(redis.keys())} of {at_least} records were written")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as process:
        yield process


@pytest.fixture(scope="module")
def cold() -> LLM:
    return LLM("stories260k", **_OPTIONS, enable_prefix_caching=False)


def test_the_second_server_reads_what_the_first_has_seen(redis: RedisProcess, cold: LLM) -> None:
    url = f"redis://127.0.0.1:{redis.port}/3"
    first = LLM("stories260k", **_OPTIONS, kv_store=url)
    prompt = _prompt(1, 500)
    want, _ = _answer(cold, prompt)
    assert _answer(first, prompt) == (want, 0)
    first._engine.flush_prefix_cache()
    second = LLM("stories260k", **_OPTIONS, kv_store=url)
    got, cached = _answer(second, prompt)
    assert got == want
    assert cached >= 0.95 * 500
    store = second.stats()["store"]
    assert store["hit_tokens"] == cached
    assert store["read_bytes"] > 0
    assert store["read_errors"] == store["damaged_records"] == 0
    other = LLM("stories260k", **{**_OPTIONS, "kv_cache_dtype": "bf16"}, kv_store=url)
    assert _answer(other, prompt)[1] == 0, "another format's pages are not found"


def test_killed_and_restarted_under_load(redis: RedisProcess, cold: LLM) -> None:
    """Answers keep their bits; the operator hears of it once; a restarted server is used again."""
    prompts = [_prompt(stem, 200 + 30 * stem) for stem in range(6)]
    want = [_answer(cold, prompt)[0] for prompt in prompts]
    turns = threading.Semaphore(0)
    ended = threading.Event()

    def harass() -> None:
        """Kills or starts the server once for eight answers, in the middle of one."""
        for change in itertools.cycle((redis.kill, redis.start)):
            for _ in range(8):
                turns.acquire()
            if ended.is_set():
                return
            change()

    with _heard() as told:
        llms = [LLM("stories260k", **_OPTIONS, kv_store=f"redis://127.0.0.1:{redis.port}") for _ in range(2)]
        thread = threading.Thread(target=harass)
        thread.start()
        try:
            for turn in range(160):
                at = turn % len(prompts)
                llms[turn % 2]._engine.reset_prefix_cache()
                turns.release()
                assert _answer(llms[turn % 2], prompts[at])[0] == want[at]
        finally:
            ended.set()
            turns.release(8)
            thread.join()
    assert told
    assert len(told) < 80
    redis.kill()
    redis.start()
    fresh = LLM("stories260k", **_OPTIONS, kv_store=f"redis://127.0.0.1:{redis.port}")
    _answer(fresh, prompts[0])
    fresh._engine.flush_prefix_cache()
    again = LLM("stories260k", **_OPTIONS, kv_store=f"redis://127.0.0.1:{redis.port}")
    assert _answer(again, prompts[0]) == (want[0], 192)


def test_a_password_is_needed_and_never_shown(tmp_path: Path, cold: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = _prompt(2, 200)
    want, _ = _answer(cold, prompt)
    with running_redis(tmp_path, ("--requirepass", "s3cret"), ("-a", "s3cret", "--no-auth-warning")) as redis:
        at = f"127.0.0.1:{redis.port}"
        told = _refused(f"redis://:another@{at}", prompt, want)
        assert all("AUTH was refused: WRONGPASS" in text and "another" not in text for text in told)
        assert redis.keys() == []
        llm = LLM("stories260k", **_OPTIONS, kv_store=f"redis://:s3cret@{at}", kv_store_ttl=300)
        assert _answer(llm, prompt)[0] == want
        _filled(redis, 12)
        assert 290 <= int(redis.ask("TTL", redis.keys()[0])) <= 300
        monkeypatch.setenv("KVANTA_KV_STORE_PASSWORD", "s3cret")
        quiet = LLM("stories260k", **_OPTIONS, kv_store=f"redis://default@{at}")
        assert _answer(quiet, prompt) == (want, 192)
        assert "s3cret" not in repr(quiet._engine.config.kv_store)


def _certificates(folder: Path) -> None:
    """Makes a certificate authority, and a certificate for 127.0.0.1."""
    for words in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.pem -subj /CN=test",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=redis "
        "-addext subjectAltName=IP:127.0.0.1",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy "
        "-out server.pem",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=60)


def test_tls_verifies_the_server(tmp_path: Path, cold: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _certificates(tmp_path)
    prompt = _prompt(4, 200)
    want, _ = _answer(cold, prompt)
    files = ("--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem")
    ca = f"{tmp_path}/ca.pem"
    client = f"ssl_certfile={tmp_path}/server.pem&ssl_keyfile={tmp_path}/server.key"
    mutual = f"ssl_ca_certs={ca}&{client}"
    with running_redis(tmp_path, files) as redis:
        tls_port = redis.port + 1 if redis.port < 65535 else redis.port - 1
        redis.ask("CONFIG", "SET", "tls-port", str(tls_port))
        if redis.ask("--raw", "CONFIG", "GET", "tls-port").split()[-1:] != [str(tls_port)]:
            pytest.skip("redis-server was built without TLS")
        url = f"rediss://127.0.0.1:{tls_port}"
        told = _refused(url, prompt, want)  # the system does not know the authority
        assert all("the server's certificate: " in text for text in told)
        assert redis.keys() == []
        llm = LLM("stories260k", **_OPTIONS, kv_store=f"{url}?{mutual}")
        assert _answer(llm, prompt)[0] == want
        _filled(redis, 12)
        again = LLM("stories260k", **_OPTIONS, kv_store=f"{url}?{mutual}")
        assert _answer(again, prompt) == (want, 192)
        told = _refused(f"rediss://localhost:{tls_port}?{mutual}", prompt, want)  # the certificate has its address only
        assert all("the server's certificate: " in text and ca in text for text in told)
        monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/none.pem")
        told = _refused(f"{url}?{client}", prompt, want)
        assert all(f"SSL_CERT_FILE = '{tmp_path}/none.pem' cannot be read" in text for text in told)
        monkeypatch.setenv("SSL_CERT_FILE", ca)
        last = LLM("stories260k", **_OPTIONS, kv_store=f"{url}?{client}")
        assert _answer(last, prompt) == (want, 192)


def test_metrics_and_pages_of_the_server(redis: RedisProcess) -> None:
    llm = LLM("stories260k", **_OPTIONS, kv_store=f"redis://127.0.0.1:{redis.port}")
    _answer(llm, _prompt(6, 200))
    llm._engine.flush_prefix_cache()
    url = f"redis://nobody@127.0.0.1:{redis.port}"
    options = {name: value for name, value in _OPTIONS.items() if name != "kv_cache_dtype"}
    with live_server(kv_cache_dtype="int8", options={**options, "kv_store": url}) as server:
        server.completion(model="stories260k", prompt=_prompt(6, 200)["prompt_token_ids"], max_tokens=1)
        metrics = server.client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("kvanta:store_cache"))
        values = {name.split("{")[0]: float(value) for name, value in lines.items()}
        assert values["kvanta:store_cache_hits_total"] == 192
        assert values["kvanta:store_cache_queries_total"] == 192
        assert values["kvanta:store_cache_connects_total"] >= 1
        assert "kvanta:disk_cache" not in metrics
        assert "nobody" not in server.client.get("/server_info").text


def test_urls_that_are_none() -> None:
    for url, message in (
        ("http://host", "scheme 'http' is unknown; there are: redis, rediss"),
        ("redis://:pw@host:port", "the port must be a number"),
        ("redis://:pw\udc80@host", "control characters or surrogates"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            LLM("stories260k", kv_store=url)
        assert "pw" not in str(caught.value)
    with pytest.raises(InputError, match=r"kv_store = 'redis://\*\*\*@host': needs enable_prefix_caching"):
        LLM("stories260k", kv_store="redis://:pw@host", enable_prefix_caching=False)
    with pytest.raises(ValueError, match="kv_store_ttl = -1"):
        LLM("stories260k", kv_store="redis://host", kv_store_ttl=-1)
