"""The errors that Kvanta raises; the C++ library's errors arrive as these same classes."""


class InputError(ValueError):
    """The caller's input is wrong: a name, a file, a prompt, a shape. The message names value and alternatives."""


class ResourceError(ValueError):
    """The input is fine, but memory, disk, network or threads do not suffice. The message gives the figures."""


class QueueFullError(ResourceError):
    """The engine's queue is full (max_queued_requests): nothing was taken, and the same request may succeed later."""
