"""Counts the connections that have shown no token and wait for their handshake, their first request
or their next request. Both the total number of waiting connections and the number for each address
are limited.
"""

import ipaddress
import time
from collections.abc import Callable
from typing import Any

WAITING = 512  # maximum number of connections without a request, per listener
WAITING_EACH = 64  # maximum number of connections without a request, per address
# A connection keeps its place for this many seconds, even if other connections need a place.
# Therefore, many nodes that connect at the same time are served one after the other. If the oldest
# connections were cut at once, none of these nodes would be served.
SERVED_S = 5.0


class Waiting:
    """The connections that have not sent a request yet, oldest first."""

    def __init__(self) -> None:
        self._all: dict[object, tuple[str, Callable[[], None], float]] = {}
        self._each: dict[str, dict[object, None]] = {}

    def add(self, connection: object, address: str, cut: Callable[[], None]) -> None:
        """Count a connection. If the connection is already counted, its waiting time starts again,
        and the new `cut` replaces the earlier `cut`.
        """
        self.remove(connection)
        self._all[connection] = (address, cut, time.monotonic())
        self._each.setdefault(address, {})[connection] = None

    def remove(self, connection: object) -> None:
        found = self._all.pop(connection, None)
        if found is not None:
            own = self._each[found[0]]
            del own[connection]
            if not own:
                del self._each[found[0]]

    def make_room(self, address: str, *, patient: bool = True) -> bool:
        """Return whether one more connection of this address may wait. If too many connections
        wait, the oldest connection is closed, because a client normally sends its request
        immediately. If the new connection is `patient`, the oldest connection is closed only after
        its time limit.
        """
        own = self._each.get(address, {})
        if address and len(own) >= WAITING_EACH:
            crowd: dict[object, Any] = own
        elif len(self._all) >= WAITING:
            crowd = self._all
        else:
            return True
        oldest = next(iter(crowd))
        _, cut, since = self._all[oldest]
        if patient and time.monotonic() - since < SERVED_S:
            return False
        self.remove(oldest)
        cut()
        return True


def find_origin(peer: object) -> str:
    """Return the address for which a connection is counted: the peer's address or, for IPv6, the
    peer's /64 network. One machine can have all addresses of a /64 network. Returns "" for a Unix
    socket.
    """
    if not isinstance(peer, tuple) or not peer:
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"
