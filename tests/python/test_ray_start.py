"""Start of Ray's node for replicas on this machine."""

from __future__ import annotations

import pytest
import ray

from kvanta.ray.local import start_ray

DIED = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


def start(monkeypatch: pytest.MonkeyPatch, failures: list[str]) -> int:
    """Starts with a Ray that fails so often; returns the number of starts."""
    starts = 0

    def init(address: str, **options: object) -> None:
        nonlocal starts
        starts += 1
        assert (address, options) == ("local", {"log_to_driver": True})
        if failures:
            raise Exception(failures.pop(0))

    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", init)
        patch.setattr(ray, "shutdown", lambda: None)
        start_ray("local", log_to_driver=True)
    return starts


def test_a_node_that_died_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, [DIED, DIED]) == 3


def test_other_errors_and_the_third_death_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="timed out during startup"):
        start(monkeypatch, [DIED] * 3)
    with pytest.raises(Exception, match="no such address"):
        start(monkeypatch, ["no such address"])
