"""Names under which a server may be called: no page of another site may reach a local server through its own DNS."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

ANY = "*"


def host_name(header: str) -> str:
    """The name or address of a Host header, in lower case, without port and brackets."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".") if host.count(":") <= 1 else host


def is_loopback(host: str) -> bool:
    """True for localhost, its subdomains and loopback addresses."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """`names`: further names than loopback ones; a name that begins with "." allows its subdomains as well."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._any = ANY in names
        self._names = frozenset(host_name(name) for name in names)
        self._suffixes = tuple(f".{name.strip('.').lower()}" for name in names if name.startswith("."))

    def allows(self, header: str) -> bool:
        """True if the Host header of a request is allowed; every browser sends one."""
        host = host_name(header)
        if self._any or not host or host in self._names or is_loopback(host):
            return True
        return bool(self._suffixes) and f".{host}".endswith(self._suffixes)
