"""Learns from observations how long spot stays available and unavailable in one market. A spell is
a period in which spot stays available or stays unavailable. Lengths of spells are in hours.

Observations are mixed with a cautious prior. The prior has a Pareto tail, because all recorded
markets have many short spells and a few very long spells. The exponent of the tail, the lengths of
the shortest and longest spell, and the weight of the prior are round numbers that were not fitted.
Halving or doubling one of the constants hardly changes the results.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

_EXPONENT = 0.6  # P(longer than x) = (shortest / x) ^ exponent
_SHORTEST_HR, _LONGEST_HR = 0.2, 60.0
_POINTS = 14
_WEIGHT = 9.0  # the weight of the prior, as a number of observed spells
_LIGHT = 1.0  # the weight of the prior in `trusting_seen`
# a spell that is longer than all known spells is expected to reach this many times its current age
_BEYOND = 3.0


def _prior() -> list[tuple[float, float]]:
    step = (_LONGEST_HR / _SHORTEST_HR) ** (1 / (_POINTS - 1))
    lengths = [_SHORTEST_HR * step**index for index in range(_POINTS)]
    longer = [(_SHORTEST_HR / length) ** _EXPONENT for length in lengths] + [0.0]
    return [
        (length, _WEIGHT * (longer[index] - longer[index + 1]))
        for index, length in enumerate(lengths)
    ]


_PRIOR = _prior()
_IN_PRIOR = frozenset(_PRIOR)


class _Sums:
    """Precomputed sums over a sorted set of spell lengths. For each length, `waited` is the mean of
    min(spell, length), and `longer` is the probability that a spell is longer than this length.
    """

    __slots__ = ("_corners", "lengths", "longer", "mean", "waited")

    def __init__(self, weighted: Sequence[tuple[float, float]]) -> None:
        inverse = 1 / sum([weight for _, weight in weighted])
        shorter = seen = 0.0
        self.lengths = [length for length, _ in weighted]
        self.waited, self.longer = list[float](), list[float]()
        for length, weight in weighted:
            shorter += weight * inverse
            seen += length * weight * inverse
            more = 1 - shorter if shorter < 1 - 1e-9 else 0.0
            self.longer.append(more)
            self.waited.append(seen + length * more)
        self.mean = seen
        self._corners: dict[int, tuple[list[int], list[float]]] = {}

    def best(self, first: int, ratio: float) -> int:
        """Return the index from `first` on for which `waited + ratio * longer` is lowest."""
        found = self._corners.get(first)
        if found is None:
            found = self._corners[first] = self._find_corners(first)
        corners, slopes = found
        return corners[bisect_left(slopes, ratio)]

    def _find_corners(self, first: int) -> tuple[list[int], list[float]]:
        """Return the corners of the lower convex hull of the points (`longer`, `waited`), and the
        slopes between adjacent corners.
        """
        waited, longer = self.waited, self.longer
        corners, slopes = [first], list[float]()
        for index in range(first + 1, len(longer)):
            while True:
                last = corners[-1]
                rise, run = waited[index] - waited[last], longer[last] - longer[index]
                if not slopes or rise > slopes[-1] * run:
                    break
                corners.pop()
                slopes.pop()
            if run > 0:
                corners.append(index)
                slopes.append(rise / run)
        return corners, slopes


class SpellLengths:
    """A weighted, sorted set of spell lengths. If the spells have already lasted some hours, an
    object describes how much longer they will last. `mean` is the mean of the remaining lengths of
    the spells. `sums` contains sums over the whole lengths of the spells, from their beginning.
    """

    __slots__ = ("_age", "_longer", "_passed", "_seen", "_start", "_weighted", "mean", "sums")

    def __init__(self, weighted: Sequence[tuple[float, float]] = _PRIOR) -> None:
        self._weighted, self.sums = weighted, _Sums(weighted)
        self.mean = self.sums.mean
        # the age in hours, the index of the next length, and the sums at this age
        self._age, self._start, self._passed, self._longer = 0.0, 0, 0.0, 1.0
        self._seen: SpellLengths | None = None

    def with_one(self, length: float) -> "SpellLengths":
        """Return a copy with one more spell of this many hours."""
        weighted = list(self._weighted)
        insort(weighted, (length, 1.0))
        return SpellLengths(weighted)

    def trusting_seen(self) -> "SpellLengths":
        """Return spell lengths in which the prior weighs only as much as one observed spell, so
        that a few observed spells outweigh the prior.
        """
        if self._seen is None:
            seen = [each for each in self._weighted if each not in _IN_PRIOR]
            light = [(length, weight * _LIGHT / _WEIGHT) for length, weight in _PRIOR]
            self._seen = SpellLengths(sorted([*light, *seen])) if seen else self
        return self._seen

    def mean_beyond(self, age: float) -> float:
        """Return the mean remaining length of a spell that has lasted `age` hours. The result
        equals `beyond(age).mean`.
        """
        sums = self.sums
        start = bisect_right(sums.lengths, age)
        if start == len(sums.lengths):
            return max(age, _SHORTEST_HR) * (_BEYOND - 1)
        if not start:
            return sums.mean - age
        longer = sums.longer[start - 1]
        passed = sums.waited[start - 1] + (age - sums.lengths[start - 1]) * longer
        return (sums.mean - passed) / longer

    def within(self, age: float, hours: float) -> tuple[float, float]:
        """Return two numbers about a spell that has lasted `age` hours. The first is the mean of
        the spell's remaining length, cut off at `hours`. The second is the probability that the
        remaining length exceeds `hours`.
        """
        waited, longer = self._reached(age)
        if longer <= 0:
            rest = self.mean_beyond(age)
            return min(rest, hours), float(rest > hours)
        later, last = self._reached(age + hours)
        return (later - waited) / longer, last / longer

    def variation(self, hours: float) -> tuple[float, float]:
        """Return two numbers about the whole lengths of the spells. The first is the variance of
        the lengths, cut off at `hours`, divided by the square of their mean. The second is the
        number of spells from which they are known, including the weight of the prior.
        """
        known = total = squares = 0.0
        for length, weight in self._weighted:
            part = min(length, hours)
            known += weight
            total += weight * part
            squares += weight * part * part
        return max(0.0, squares * known / total**2 - 1) if total else 0.0, known

    def _reached(self, age: float) -> tuple[float, float]:
        """Return the mean of min(spell, age), and the probability that a spell is longer than this
        age.
        """
        sums = self.sums
        start = bisect_right(sums.lengths, age)
        if not start:
            return age, 1.0
        longer = sums.longer[start - 1]
        return sums.waited[start - 1] + (age - sums.lengths[start - 1]) * longer, longer

    def beyond(self, age: float) -> "SpellLengths":
        """Return the remaining lengths of the spells that last longer than `age` hours."""
        sums = self.sums
        start = bisect_right(sums.lengths, age)
        if start == len(sums.lengths):
            return SpellLengths([(max(age, _SHORTEST_HR) * (_BEYOND - 1), 1.0)])
        rest = SpellLengths.__new__(SpellLengths)
        rest._weighted, rest.sums = self._weighted, sums
        rest._age, rest._start, rest._passed, rest._longer = age, start, age, 1.0
        if start:
            rest._longer = sums.longer[start - 1]
            rest._passed = sums.waited[start - 1] + (age - sums.lengths[start - 1]) * rest._longer
        rest.mean = (sums.mean - rest._passed) / rest._longer
        return rest

    def best(self, ratio: float) -> tuple[float, float, float]:
        """Find the threshold with the lowest value of `waited + ratio * longer`. Returns three
        values: the threshold; `waited`, the mean of min(length, threshold); and `longer`, the
        probability that a spell is longer than the threshold.
        """
        sums = self.sums
        at = sums.best(self._start, ratio)
        waited = (sums.waited[at] - self._passed) / self._longer
        longer = sums.longer[at] / self._longer
        if (longer and waited + ratio * longer >= ratio) or waited >= ratio:
            return 0.0, 0.0, 1.0
        return sums.lengths[at] - self._age, waited, longer


NOTHING_SEEN = SpellLengths()  # the prior
