"""Finds the service of a request by its host name and by the longest prefix of its path."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from cavvy.capabilities.serving.gateway.config import ServiceRoute

T = TypeVar("T")


class Routes(Generic[T]):
    """Finds the service of each request. A service without host names gets the requests
    for host names that no other service has."""

    def __init__(self, services: Iterable[tuple[ServiceRoute, T]]) -> None:
        table: dict[bytes, list[tuple[bytes, T]]] = {}
        for route, service in services:
            for host in route.hosts or ("",):
                rows = table.setdefault(host.lower().encode(), [])
                rows.append((route.prefix.encode(), service))
        for rows in table.values():
            rows.sort(key=lambda row: -len(row[0]))
        self._table = table
        self._any = table.get(b"", [])

    def has_host(self, name: str) -> bool:
        """Return whether a service has this host name."""
        return bool(name) and name.encode() in self._table

    def find(self, host: bytes, target: bytes) -> T | None:
        """Return the service of a request with this Host field and target."""
        rows = self._table.get(host)
        if rows is None:
            rows = self._table.get(_without_port(host).lower(), self._any)
        for prefix, service in rows:
            if not prefix or is_below(target, prefix):
                return service
        if rows is not self._any:
            for prefix, service in self._any:
                if not prefix or is_below(target, prefix):
                    return service
        return None


def _without_port(host: bytes) -> bytes:
    if host.startswith(b"["):
        return host[: host.find(b"]") + 1]
    return host.partition(b":")[0]


def is_below(target: bytes, prefix: bytes) -> bool:
    """Return whether the path of a target equals the prefix or is below it."""
    return target.startswith(prefix) and target[len(prefix) : len(prefix) + 1] in (b"", b"/", b"?")


def strip_prefix(target: bytes, prefix: bytes) -> bytes:
    """Return the target that is sent to the replica."""
    rest = target[len(prefix) :]
    return rest if rest.startswith(b"/") else b"/" + rest
