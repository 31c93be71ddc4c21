"""Divides a replica's time among its requests.

At each moment, the requests in flight share the replica equally. So the shares of all requests add
up to the time in which the replica had at least one request. `_virtual` is the share of an
imaginary request that is always in flight: it grows by dt / n, where n is the number of requests in
flight. The share of a request is the difference between the values of `_virtual` at its end and at
its start, so it is computed in constant time. A request of a batch counts like as many requests as
it has instances.
"""

from collections.abc import Mapping

from cavvy.domain.request_bills import KeyWork


class ReplicaWork:
    """The work of one replica by key, since the gateway's start. Times are monotonic seconds."""

    __slots__ = ("_at", "_by_key", "_in_flight", "_virtual")

    def __init__(self) -> None:
        self._at = self._virtual = 0.0
        self._in_flight = 0  # the sum of the weights
        # by key: requests, the weights of those in flight, and the shares of those that ended, less
        # the values of `_virtual` at the starts of those in flight
        self._by_key: dict[str, list[float]] = {}

    def begin(self, key: str, now: float, weight: int = 1) -> float:
        """Record the start of a request. Returns its mark, which `share_s` needs."""
        virtual = self._pass(now)
        self._in_flight += weight
        known = self._by_key.get(key)
        if known is None:
            self._by_key[key] = [1, weight, -weight * virtual]
        else:
            known[0] += 1
            known[1] += weight
            known[2] -= weight * virtual
        return virtual

    def __bool__(self) -> bool:
        """Return whether any request has started."""
        return bool(self._by_key)

    def end(self, key: str, now: float, weight: int = 1) -> None:
        """Record the end of one of the key's requests in flight."""
        virtual = self._pass(now)
        self._in_flight -= weight
        known = self._by_key[key]
        known[1] -= weight
        known[2] += weight * virtual

    def share_s(self, mark: float, now: float, weight: int = 1) -> float:
        """Return the share so far of the request in flight with this mark."""
        return weight * (self._pass(now) - mark)

    def describe(self, now: float) -> Mapping[str, KeyWork]:
        virtual = self._pass(now)
        return {
            key: KeyWork(requests=int(begun), work_us=round((done + flying * virtual) * 1e6))
            for key, (begun, flying, done) in self._by_key.items()
        }

    def _pass(self, now: float) -> float:
        if now > self._at:  # the clock readings of two callers may arrive in another order
            if self._in_flight:
                self._virtual += (now - self._at) / self._in_flight
            self._at = now
        return self._virtual
