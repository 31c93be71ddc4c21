"""The order in which waiting requests start: by the priorities of keys, and fair between the keys
of one priority by tokens. Requests of services that are no language models count as one token.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):
each key has a counter of the tokens that it was served, divided by the key's weight, and the next
request is the first of the key with the smallest counter. A token of a completion counts twice as
much as one of a prompt, as in the paper. A key that begins to wait is lifted to the smallest
counter of the keys of its priority that wait or, if none waits, to that of the key that was served
last, so that no key saves up service. The completion is not known when a request starts: the mean
of the key's last ones counts until its answer ends.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

_OF_COMPLETION = 2.0
_USUAL = 1  # the priority of keys that state none
_NEWEST = 0.3  # weight of the newest completion in the mean


class KeyedRequest(Protocol):
    key_id: str


T = TypeVar("T", bound=KeyedRequest)


class FairOrder(Generic[T]):
    """The waiting requests of each key, and what each key was served."""

    def __init__(
        self, weights: Mapping[str, float], priorities: Mapping[str, int] | None = None
    ) -> None:
        self._weights, self._priorities = weights, priorities or {}
        self._served: dict[str, float] = {}
        self._completions: dict[str, float] = {}  # the mean by key
        # for each priority, the counter with which the last request started
        self._levels: dict[int, float] = {}
        self._lines: dict[str, OrderedDict[T, None]] = {}

    def enter(self, request: T, *, first: bool = False) -> None:
        """Add a waiting request, in front of the others of its key if `first`."""
        key = request.key_id
        line = self._lines.get(key)
        if line is None:
            self._lift(key)
            line = self._lines[key] = OrderedDict()
        line[request] = None
        if first:
            line.move_to_end(request, last=False)

    def leave(self, request: T) -> None:
        line = self._lines.get(request.key_id)
        if line is not None and request in line:
            del line[request]
            if not line:
                del self._lines[request.key_id]

    def list_next(self) -> Iterator[T]:
        """Yield waiting requests in the order in which they may start now. Requests may start
        meanwhile.
        """
        lines = {key: iter(list(line)) for key, line in self._lines.items()}
        while lines:
            key = min(lines, key=self._rank)
            request = next(lines[key], None)
            if request is None:
                del lines[key]
            else:
                yield request

    def list_first(self) -> Iterator[T]:
        """Yield the waiting requests for one free slot: those of the highest priority first, and
        of these those of the key with the smallest counter.
        """
        for key in sorted(self._lines, key=self._rank):
            yield from self._lines[key]

    def find_lower(self, key: str) -> T | None:
        """Return the waiting request that would start last, if its key has a lower priority."""
        last = max(self._lines, key=self._rank, default=key)
        if self._find_priority(last) >= self._find_priority(key):
            return None
        return next(reversed(self._lines[last]))

    def share_ahead(self, key: str) -> float:
        """Return the share of the waiting requests that start before another one of the key, if
        all keys were served equally so far.
        """
        total, priority = sum(map(len, self._lines.values())), self._find_priority(key)
        own, weight = len(self._lines.get(key, ())), self._weights.get(key, 1.0)
        ahead = 0.0
        for each, line in self._lines.items():
            if self._find_priority(each) > priority:
                ahead += len(line)
            elif each != key and self._find_priority(each) == priority:
                ahead += min(len(line), (own + 1) * self._weights.get(each, 1.0) / weight)
        return min(1.0, (own + ahead) / total) if total else 0.0

    def start(self, key: str, prompt: int) -> float:
        """Count a request that starts; return what was counted."""
        if key not in self._lines:
            self._lift(key)
        priority = self._find_priority(key)
        self._levels[priority] = max(self._levels.get(priority, 0.0), self._find_served(key))
        cost = prompt + _OF_COMPLETION * self._completions.get(key, 0.0)
        self._count(key, cost)
        return cost

    def end(self, key: str, counted: float, prompt: int, completion: int) -> None:
        """Replace what was counted for a request by what it was served."""
        self._count(key, prompt + _OF_COMPLETION * completion - counted)
        mean = self._completions.get(key, float(completion))
        self._completions[key] = mean + _NEWEST * (completion - mean)

    def adopt(self, old: "FairOrder[T] | None", waiting: Iterable[T]) -> None:
        """Take over the counters of the service's older route, and the requests that wait."""
        if old is not None:
            kept = self._weights.keys()
            self._served = {key: n for key, n in old._served.items() if key in kept}
            self._completions = {key: n for key, n in old._completions.items() if key in kept}
            self._levels = dict(old._levels)
        for each in waiting:
            self.enter(each)

    def _lift(self, key: str) -> None:
        priority = self._find_priority(key)
        peers = (each for each in self._lines if self._find_priority(each) == priority)
        least = min(map(self._find_served, peers), default=self._levels.get(priority, 0.0))
        self._served[key] = max(self._find_served(key), least)

    def _count(self, key: str, tokens: float) -> None:
        self._served[key] = self._find_served(key) + tokens / self._weights.get(key, 1.0)

    def _rank(self, key: str) -> tuple[int, float]:
        """Return a value that is the smallest for the key whose request starts first."""
        return -self._find_priority(key), self._find_served(key)

    def _find_priority(self, key: str) -> int:
        return self._priorities.get(key, _USUAL)

    def _find_served(self, key: str) -> float:
        return self._served.get(key, 0.0)
