"""The errors that Kvanta raises; the C++ library's errors arrive as these same classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KvantaError(Exception):
    """Base class of every error that Kvanta raises on purpose; the message is one line."""


class InputError(KvantaError, ValueError):
    """The caller's input is wrong: a name, a file, a prompt, a shape. The message names value and alternatives.

    `field`: the parameter, or the field of a request, that is wrong; None where it is none, or not one alone.
    """

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def about(field: str) -> Iterator[None]:
    """An InputError that is raised within is about this field."""
    try:
        yield
    except InputError as error:
        error.field = field
        raise


def reason_of(error: Exception) -> str:
    """The reason alone, on one line: of an OSError without its number and file, which messages name themselves."""
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:200]


class ResourceError(KvantaError, ValueError):
    """The input is fine, but memory, disk, network or threads do not suffice. The message gives the figures."""


class RankLostError(ResourceError):
    """A rank of the engine is lost (tensor_parallel_size, pipeline_parallel_size): no later request succeeds either."""


class QueueFullError(ResourceError):
    """The engine's queue is full (max_queued_requests): nothing was taken, and the same request may succeed later."""
