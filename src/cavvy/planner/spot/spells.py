"""Learns from observations how long spot stays available and unavailable in one market. A spell is
a period in which spot stays available or stays unavailable. Lengths of spells are in hours.

Observations are mixed with a cautious prior. The prior has a Pareto tail, because all recorded
markets have many short spells and a few very long spells. The exponent of the tail, the lengths of
the shortest and longest spell, and the weight of the prior are round numbers that were not fitted.
Halving or doubling one of the constants hardly changes the results.

`MarketMemory` has what a deadline policy has observed in each market, and `TimeLeft` the job's
remaining work, time and slack, for `auto` and `roam`.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from cavvy.planner.spot.view import UNSEEN, JobTerms, PolicyView, SpotQuote

_EXPONENT = 0.6  # P(longer than x) = (shortest / x) ^ exponent
_SHORTEST_HR, _LONGEST_HR = 0.2, 60.0
_POINTS = 14
_WEIGHT = 9.0  # the weight of the prior, as a number of observed spells
_LIGHT = 1.0  # the weight of the prior in `trusting_seen`
# a spell that is longer than all known spells is expected to reach this many times its current age
_BEYOND = 3.0

_HOUR_S = 3600.0
# the assumed age in hours of the first observed state, because its start is unknown
_AGE_AT_START_HR = 0.5


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


class TimeLeft:
    """The remaining hours of work, the hours until the deadline, and the slack, which is the
    difference between the two.
    """

    __slots__ = ("left", "slack", "work")

    def __init__(self, view: PolicyView, terms: JobTerms) -> None:
        self.work = view.left_s / _HOUR_S
        self.left = (terms.deadline_s - view.now_s) / _HOUR_S
        self.slack = terms.slack_s(view) / _HOUR_S

    @classmethod
    def later(cls, moment: "TimeLeft", hours: float) -> "TimeLeft":
        """Return the state after this many hours without work."""
        after = cls.__new__(cls)
        after.work, after.left, after.slack = moment.work, moment.left - hours, moment.slack - hours
        return after


class MarketMemory:
    """The observations of one market. Spot that costs at least as much as on-demand is treated as
    unavailable.
    """

    __slots__ = ("_now", "_offered", "_since", "_started", "_unit", "away", "ratio", "stays", "up")

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._started = self._offered = False
        self._since = self._now = 0.0
        self.up, self.ratio = False, 1.0
        self.stays = self.away = NOTHING_SEEN

    def see(self, now: float, quote: SpotQuote) -> None:
        """Record an observed quote. If the availability of spot is unknown, only the price is
        recorded.
        """
        self._now, up = now, self._read(quote)
        if quote.since_s == UNSEEN:
            return
        if not self._started:
            self._started, self.up, self._since = True, up, now - _AGE_AT_START_HR
        elif up != self.up:
            since = self._begin(now, quote)
            if self.up:
                self.stays = self.stays.with_one(since - self._since)
            else:
                self.away = self.away.with_one(since - self._since)
            self.up, self._since = up, since
        self._offered = quote.up

    def shown(self, now: float, quote: SpotQuote) -> "MarketMemory":
        """Return a copy of the memory, as if this quote were observed at this time. The quote may
        be an assumption. Therefore the copy adopts the quote's state and the time since when this
        state lasts, but does not record a finished spell.
        """
        self._now, up = now, self._read(quote)
        if self._started and up == self.up and quote.since_s != UNSEEN:
            return self
        # This is faster than `copy`, which matters in the simulator.
        made = MarketMemory.__new__(MarketMemory)
        made._unit, made._started, made._offered = self._unit, self._started, self._offered
        made._now, made.ratio, made.up = now, self.ratio, up
        made.stays, made.away = self.stays, self.away
        if quote.since_s == UNSEEN or not self._started:
            made._since = now - _AGE_AT_START_HR
        else:
            made._since = self._begin(now, quote)
        return made

    def _begin(self, now: float, quote: SpotQuote) -> float:
        """Return the hour at which the new state began, or `now` if only the price has changed."""
        if quote.since_s is None or quote.up is self._offered:
            return now
        return max(quote.since_s / _HOUR_S, self._since)

    def _read(self, quote: SpotQuote) -> bool:
        self.ratio = quote.usd_hr / self._unit
        return quote.up and self.ratio < 1

    @property
    def age(self) -> float:
        return self._now - self._since

    @property
    def saving(self) -> float:
        return 1 - self.ratio if self.ratio < 1 else 0.0
