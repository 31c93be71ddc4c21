"""Counts the calls of a broker for the page of its app. It imports only the standard library."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

_LEAST_S, _GROWTH = 1e-4, 1.15  # of the buckets of times: each is known to 7.5 %
_MOST_BUCKET = 200  # about 4 years
_RECENT = 10  # calls of a function and minute that are told one by one, ended well and badly
_MOST_TEXT, _MOST_TRACE = 500, 4000  # letters
_SAME_S = 60.0  # after which what has not changed is told again


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket of a time."""
    if seconds <= _LEAST_S:
        return 0
    return min(_MOST_BUCKET, round(math.log(seconds / _LEAST_S) / math.log(_GROWTH)))


def time_of(bucket: int) -> float:
    """Return the time in seconds for which a bucket stands, with three digits."""
    return float(f"{_LEAST_S * _GROWTH**bucket:.3g}")


class MinuteCounts:
    """The calls of a function that have ended in a minute. `ran` and `took` are how many calls ran
    for a time, and had their result after a time, by the bucket.
    """

    __slots__ = ("done", "failed", "ran", "recent", "took")

    def __init__(self) -> None:
        self.done = self.failed = 0
        self.ran: dict[int, int] = {}
        self.took: dict[int, int] = {}
        self.recent = {each: deque[dict[str, Any]](maxlen=_RECENT) for each in ("done", "failed")}


class CallCounts:
    """Counts calls. Those with a key, which the control plane keeps, count only for the times."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # calls without a key that have no result
        self._minutes: dict[tuple[str, int], MinuteCounts] = {}
        self._changed: set[tuple[str, int]] = set()
        self._told: tuple[float, object] = (0.0, None)

    def begin(self, function: str) -> None:
        """Count a call without a key that has arrived."""
        self._open[function] = self._open.get(function, 0) + 1

    def drop(self, function: str) -> None:
        """Forget a call without a key whose caller is gone or has cancelled it."""
        self._open[function] -= 1

    def end(
        self, function: str, head: Mapping[str, Any], ran_s: float, took_s: float, now: float
    ) -> None:
        """Count a call that has ended with the answer `head`."""
        key = function, int(now // 60) * 60
        self._changed.add(key)
        minute = self._minutes.get(key)
        if minute is None:
            minute = self._minutes[key] = MinuteCounts()
        for table, seconds in ((minute.ran, ran_s), (minute.took, took_s)):
            bucket = bucket_of(seconds)
            table[bucket] = table.get(bucket, 0) + 1
        if head.get("key"):
            return
        self._open[function] -= 1
        state = "failed" if head["op"] == "failed" else "done"
        if state == "failed":
            minute.failed += 1
        else:
            minute.done += 1
        minute.recent[state].append(
            {
                "state": state,
                "ended_s": round(now, 3),
                "ran_s": round(ran_s, 5),
                "took_s": round(took_s, 5),
                "type": str(head.get("type") or head.get("kind") or "")[:200],
                "text": str(head.get("text") or "")[:_MOST_TEXT],
                "trace": str(head.get("trace") or "")[-_MOST_TRACE:],
            }
        )

    def take(
        self, workers: int, running: Mapping[str, int], kept: Mapping[str, int], now: float
    ) -> dict[str, Any] | None:
        """Return what to tell, or None if nothing has changed. `running` are the calls of each
        function that run, and `kept` how many of these have a key.
        """
        gauges = {
            name: [max(0, self._open.get(name, 0) - running.get(name, 0) + kept.get(name, 0)),
                   running.get(name, 0), kept.get(name, 0)]
            for name in sorted({*self._open, *running})
        }  # fmt: skip
        same = self._told[1] == (workers, gauges)
        if same and not self._changed and (not workers or now - self._told[0] < _SAME_S):
            return None
        self._told = now, (workers, gauges)
        minutes = [
            {
                "function": function,
                "minute": minute,
                "done": found.done,
                "failed": found.failed,
                "ran": {str(each): count for each, count in found.ran.items()},
                "took": {str(each): count for each, count in found.took.items()},
                "recent": [*found.recent["failed"], *found.recent["done"]],
            }
            for function, minute in sorted(self._changed)
            for found in (self._minutes[function, minute],)
        ]
        self._changed.clear()
        for key in [each for each in self._minutes if each[1] < now - 120]:
            del self._minutes[key]
        return {"workers": workers, "gauges": gauges, "minutes": minutes}
