"""Learn from observations how long spot stays available and unavailable in one market. Such a
period is called a spell; its length is in hours.

Observations are mixed with a cautious prior. The prior has a Pareto tail, because all recorded
markets have many short spells and a few very long ones. The tail's exponent, the shortest and the
longest spell and the prior's weight are round numbers, not fitted: halving or doubling any of them
hardly changes the results.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

_EXPONENT = 0.6  # P(longer than x) = (shortest / x) ^ exponent
_SHORTEST_HR, _LONGEST_HR = 0.2, 60.0
_POINTS = 14
_WEIGHT = 9.0  # the weight of the prior: it counts as this many observed spells
_BEYOND = 3.0  # a spell longer than all known spells is expected to end at this many times its age


def _prior() -> list[tuple[float, float]]:
    step = (_LONGEST_HR / _SHORTEST_HR) ** (1 / (_POINTS - 1))
    lengths = [_SHORTEST_HR * step**index for index in range(_POINTS)]
    longer = [(_SHORTEST_HR / length) ** _EXPONENT for length in lengths] + [0.0]
    return [
        (length, _WEIGHT * (longer[index] - longer[index + 1]))
        for index, length in enumerate(lengths)
    ]


_PRIOR = _prior()


class SpellLengths:
    """A weighted and sorted set of spell lengths, with the sums that the policy needs.

    The thresholds are 0 and every length. For each threshold, `waited[i]` is the mean of
    min(length, threshold), `longer[i]` the chance that a spell is longer than the threshold, and
    `rest[i]` the mean of max(0, length - threshold). The sums are computed on first use.
    """

    __slots__ = ("_lengths", "longer", "mean", "rest", "thresholds", "waited")

    mean: float
    thresholds: list[float]
    waited: list[float]
    longer: list[float]
    rest: list[float]

    def __init__(self, lengths: Sequence[tuple[float, float]] = _PRIOR) -> None:
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:  # called only for a slot that is not set yet
        if name not in self.__slots__:
            raise AttributeError(name)
        self._sum()
        return getattr(self, name)

    def with_one(self, length: float) -> "SpellLengths":
        """Return a copy with one more spell, which lasted this many hours."""
        lengths = list(self._lengths)
        insort(lengths, (length, 1.0))
        return SpellLengths(lengths)

    def beyond(self, age: float) -> "SpellLengths":
        """The remaining lengths of the spells that last longer than `age` hours."""
        first = bisect_right(self._lengths, (age, float("inf")))
        return SpellLengths(
            [(length - age, weight) for length, weight in self._lengths[first:]]
            or [(max(age, _SHORTEST_HR) * (_BEYOND - 1), 1.0)]
        )

    def _sum(self) -> None:
        lengths = self._lengths
        total = sum([weight for _, weight in lengths])
        inverse = 1 / total
        shorter, seen = 0.0, 0.0
        mean = sum([length * weight for length, weight in lengths]) * inverse
        waited, longer, rest = [0.0], [1.0], [mean]
        for length, weight in lengths:
            shorter += weight * inverse
            seen += length * weight * inverse
            more = 1 - shorter if shorter < 1 - 1e-9 else 0.0
            longer.append(more)
            waited.append(seen + length * more)
            rest.append(mean - seen - length * more if more else 0.0)
        self.mean = mean
        self.thresholds = [0.0, *[length for length, _ in lengths]]
        self.waited, self.longer, self.rest = waited, longer, rest
