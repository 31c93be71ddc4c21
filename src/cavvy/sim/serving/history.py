"""The load of a simulated service, second by second, as the scaling rules of other systems read
it."""

from typing import NamedTuple, Protocol

from cavvy.domain.values import Struct


class LoadHistory:
    """Sums of the arrivals and of the requests in the service, so that a mean over any period takes
    two look-ups.
    """

    def __init__(self) -> None:
        self._arrivals = [0]
        self._requests = [0]

    def add(self, arrived: int, requests: int) -> None:
        """Add the counts of one second. `arrived` is the number of arrivals since the beginning,
        and `requests` is the number of requests that wait or are being processed now.
        """
        self._arrivals.append(arrived)
        self._requests.append(self._requests[-1] + requests)

    def rate(self, window_s: float) -> float:
        """Return the mean number of arrivals per second."""
        return self._mean(self._arrivals, window_s)

    def concurrency(self, window_s: float) -> float:
        """Return the mean number of requests that wait or are being processed."""
        return self._mean(self._requests, window_s)

    def _mean(self, sums: list[int], window_s: float) -> float:
        seconds = min(len(sums) - 1, max(1, round(window_s)))
        return (sums[-1] - sums[-1 - seconds]) / seconds if seconds else 0.0


class LoadView(NamedTuple):
    """The inputs of a scaling rule. `slots` is the number of requests that a replica can process at
    the same time. `service_s` is the true mean service time. Rules that count requests per second
    compute their target from this time.
    """

    now_s: float
    ready: int
    starting: int
    history: LoadHistory
    slots: int
    service_s: float

    @property
    def held(self) -> int:
        return self.ready + self.starting


class RuleState(Struct, frozen=True, kw_only=True):
    """The state of the rules between decisions. No rule uses all of the fields.

    `votes` contains (time, replicas) of past decisions. `since_s` is the time at which the rule
    began to want more or fewer replicas. `panic_s` is the last time at which there was a reason to
    panic.
    """

    votes: tuple[tuple[float, int], ...] = ()
    peak: int = 0
    panic_s: float | None = None
    grow_since_s: float | None = None
    shrink_since_s: float | None = None
    scaled_s: float | None = None
    busy_s: float = 0.0


class ScalingRule(Protocol):
    """A rule by which another system sets the number of replicas. `holds` is true if the system's
    gateway queues requests while no replica is ready, and false if the gateway answers 503.
    """

    @property
    def interval_s(self) -> int: ...

    @property
    def holds(self) -> bool: ...

    def decide(self, state: RuleState, seen: LoadView) -> tuple[int, RuleState]:
        """Return the wanted number of replicas and the next state."""
        ...
