"""The address on which the server listens, and the names under which clients may call it there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.server.http.hosts import AllowedHosts, is_loopback
from kvanta.server.options import ServerOptions

_log = logging.getLogger("kvanta.server")


@contextlib.contextmanager
def bound(options: ServerOptions) -> Iterator[socket.socket]:
    """A socket, bound before the model is loaded, so that a port in use is an immediate error."""
    if not options.uds:
        with contextlib.closing(_bind(options)) as listener:
            yield listener
        return
    with contextlib.closing(_bind_path(options.uds)) as listener:
        try:
            yield listener
        finally:
            Path(options.uds).unlink(missing_ok=True)


def _bind(options: ServerOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"host is {options.host!r}, which is no address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(options, error) from None
    return listener


def _bind_path(path: str) -> socket.socket:
    """A Unix domain socket that this user's processes alone may connect to; one that nothing listens on is replaced."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if Path(path).is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except (OSError, ValueError) as error:
        listener.close()
        raise ResourceError(f"cannot listen on {path}: {reason_of(error)}; see --uds") from None
    finally:
        os.umask(before)
    return listener


def listen(listener: socket.socket, options: ServerOptions) -> None:
    """Accepts connections from now on."""
    try:
        listener.listen(2048)
    except OSError as error:  # another process has taken the port
        raise _cannot_listen(options, error) from None


def _cannot_listen(options: ServerOptions, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot listen on {options.host} port {options.port}: {reason_of(error)}; see --host and --port"
    )


def allowed_hosts(options: ServerOptions, address: str) -> AllowedHosts | None:
    """`address`: the one that the server listens on; empty for a Unix domain socket, which no web page reaches."""
    if options.allowed_hosts:
        return AllowedHosts([options.host, *options.allowed_hosts])
    return AllowedHosts([options.host]) if is_loopback(address) and not options.api_key else None


def warn_if_public(options: ServerOptions, address: str) -> None:
    """Logs that the server has no keys and other machines reach it."""
    if address and not is_loopback(address) and not options.api_key:
        _log.warning("no --api-key: everyone who can reach %s may use this server", options.host)


def check_certificate(options: ServerOptions) -> None:
    """Before the model is loaded."""
    if not options.ssl_certfile:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise InputError(f"the certificate or its key cannot be read: {error}") from None


def address_of(listener: socket.socket) -> str:
    """The address that the server listens on; empty for a Unix domain socket, which no web page reaches."""
    return "" if listener.family == socket.AF_UNIX else str(listener.getsockname()[0])


def url_of(listener: socket.socket, options: ServerOptions) -> str:
    """The server's URL, or the path of its socket."""
    if options.uds:
        return options.uds
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
