"""Settings of KV events, with the keys of vLLM's and SGLang's --kv-events-config."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import nearest, one_line, text, truth, whole_number

_PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec"}
_PUBLISHERS = ("zmq", "null")
_ADDRESS = re.compile(r"(tcp://[^\s]+:([0-9]{1,5}|\*)|(ipc|inproc)://[^\s]+)")
_MOST = 2**31 - 1


@dataclass(frozen=True)
class KvEventsConfig:
    """See docs/fleet.md. Defaults as vLLM's."""

    endpoint: str = "tcp://*:5557"
    """Address of the PUB socket; bound where it has a wildcard or is ipc or inproc, else connected."""
    replay_endpoint: str | None = None
    """Address of the ROUTER socket that sends batches again."""
    buffer_steps: int = 10_000
    """Batches that are kept for replay."""
    hwm: int = 100_000
    """High-water mark of the PUB socket: batches that wait for one subscriber; more are dropped."""
    max_queue_size: int = 100_000
    """Events that wait to be published; beyond them the consumer's index begins again with all pages."""
    topic: str = ""

    def of_rank(self, rank: int) -> KvEventsConfig:
        """The settings of one of several engines: ports are `rank` higher, as in vLLM."""
        return dataclasses.replace(
            self,
            endpoint=_shifted(self.endpoint, rank),
            replay_endpoint=self.replay_endpoint and _shifted(self.replay_endpoint, rank),
        )


_KEYS = ("enable_kv_cache_events", "publisher", *(each.name for each in dataclasses.fields(KvEventsConfig)))


def read_kv_events_config(given: Mapping[str, Any], endpoint: str = "") -> KvEventsConfig | None:
    """Checked settings; None publishes nothing. `endpoint`: the option kv_events_endpoint.

    Events are on where enable_kv_cache_events is true; without that key, where there is a publisher, as in SGLang.
    """
    name = "kv_events_config"
    if endpoint:
        if given:
            raise InputError(f"kv_events_endpoint and {name} are given: give the endpoint of {name} alone")
        given = {"enable_kv_cache_events": True, "endpoint": endpoint}
    for key in given:
        if key not in _KEYS:
            hint = nearest(str(key), _KEYS)
            raise InputError(f"{name} has {one_line(key)}{hint or '; known: ' + ', '.join(_KEYS)}")
    values = {key: value for key, value in given.items() if value is not None}
    publisher = values.pop("publisher", "zmq" if values.get("enable_kv_cache_events") else "null")
    if publisher not in _PUBLISHERS:
        raise InputError(f"{name}: publisher must be {' or '.join(_PUBLISHERS)}, got {one_line(publisher)}")
    enabled = truth(f"{name}: enable_kv_cache_events", values.pop("enable_kv_cache_events", publisher == "zmq"))
    for key in ("endpoint", "replay_endpoint", "topic"):
        if key in values:
            values[key] = text(f"{name}: {key}", values[key])
            if key != "topic" and not _ADDRESS.fullmatch(values[key]):
                raise InputError(f"{name}: {key} must be as tcp://*:5557 or ipc:///path, got {one_line(values[key])}")
    for key, low in {"buffer_steps": 0, "hwm": 0, "max_queue_size": 1}.items():
        if key in values:
            values[key] = whole_number(f"{name}: {key}", values[key], low, _MOST)
    config = KvEventsConfig(**values)
    if not enabled or publisher == "null":
        return None
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"KV events need {' and '.join(missing)}; install with: pip install 'kvanta[events]'")
    return config


def _shifted(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return endpoint if port in ("0", "*") else f"{address}:{int(port) + rank}"
