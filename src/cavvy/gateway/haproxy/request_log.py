"""Reads the times of the requests that HAProxy passes on by itself, from its log.

HAProxy sends a line for each logged request to a datagram socket: the backend, the server, the
requests of the last second, and the microseconds from the request's head to the last byte of the
response. While fewer than `MANY` requests a second arrive, each is logged; otherwise, one of
`SAMPLED`, chosen at random. If no process reads, HAProxy drops lines and waits for nothing.
"""

import socket
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from contextlib import suppress
from math import exp
from pathlib import Path

from cavvy.domain.values import Struct, field
from cavvy.gateway.haproxy.configuration import HOLD, MANY, SAMPLED, name_backend
from cavvy.gateway.statistics import bucket_of

_LONGEST = 1024  # bytes of a line


class LoggedRequest(Struct, frozen=True):
    """A line of the log. It stands for `weight` requests."""

    backend: str
    replica: str
    weight: int
    taken_us: int


class RequestTimes(Struct, kw_only=True):
    """The logged requests of a service: how many took how long, by the bucket of the latency, and
    the weights and microseconds since the last reading, by replica.
    """

    latency: dict[int, int] = field(default_factory=dict)
    fresh: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, request: LoggedRequest) -> None:
        bucket = bucket_of(request.taken_us)
        self.latency[bucket] = self.latency.get(bucket, 0) + request.weight
        weight, taken_us = self.fresh.get(request.replica, (0, 0))
        self.fresh[request.replica] = (
            weight + request.weight,
            taken_us + request.weight * request.taken_us,
        )

    def take_means(self) -> Mapping[str, float]:
        """Return the mean seconds of each replica's requests since the last call."""
        fresh, self.fresh = self.fresh, {}
        return {name: us / weight / 1e6 for name, (weight, us) in fresh.items()}


def read_line(line: bytes) -> LoggedRequest | None:
    """Return the request of a line, or None if a replica has not answered it or the line is not
    valid. The gateway measures the requests that it gets from HAProxy.
    """
    with suppress(ValueError):
        backend, server, rate, taken_us = line.decode().split()
        replica, _, number = server.rpartition(".")
        if server != HOLD and replica and number.isdigit():
            weight = SAMPLED if int(rate) >= MANY else 1
            return LoggedRequest(backend, replica, weight, max(int(taken_us), 0))
    return None


def estimate_busy_s(passed_s: float, started: int, mean_s: float, before: int, now: int) -> float:
    """Return for how much of a period a replica probably had at least one request.

    With c requests of the mean time t in the period d, on average L = c * t / d are in flight. If
    they come independently of each other, the replica is without any for the share exp(-L). This
    says too little if each request comes when the one before it ends: at most by 37 % of the time,
    and by 5 % up to L = 0.1. Requests that take longer than the period are counted by the numbers
    in flight `before` and `now`.
    """
    if passed_s <= 0:
        return 0.0
    if mean_s >= passed_s or not started:
        return passed_s * (bool(before) + bool(now)) / 2
    return passed_s * (1 - exp(-started * mean_s / passed_s))


class HaproxyLog:
    """Receives the lines of all HAProxy processes of a server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._times: dict[str, RequestTimes] = {}  # by backend

    def open(self, loop: AbstractEventLoop) -> None:
        """Listen, unless this is done already. Raises OSError."""
        if self._socket is not None:
            return
        self._path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.setblocking(False)
            made.bind(str(self._path))
            self._path.chmod(0o600)
        except OSError:
            made.close()
            raise
        self._socket = made
        loop.add_reader(made, self._receive, made)

    def close(self, loop: AbstractEventLoop) -> None:
        if self._socket is not None:
            loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)

    def find(self, service: str) -> RequestTimes:
        return self._times.setdefault(name_backend(service), RequestTimes())

    def _receive(self, line: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                request = read_line(line.recv(_LONGEST))
                if request is not None:
                    self._times.setdefault(request.backend, RequestTimes()).add(request)
