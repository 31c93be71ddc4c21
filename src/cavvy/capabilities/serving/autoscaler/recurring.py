"""Bursts of a service that come again: records when they began and how high they were, and expects
the next one if they came at equal distances, such as every 40 minutes or at the same time each day.

    base     = the usual arrivals per second: an average over about `BASE_S`, without bursts
    burst    = begins when the arrivals of the last 30 s exceed those of the base by half and by
               five standard deviations, and ends when they fall to a third between base and
               height
    expected = o + m * P, the first one that is not over, for a burst at o and a distance P between
               bursts, if at least `_LEAST_HITS` of the last `_SLOTS` times o + (m - k) * P had a
               burst, these are at least the share `_LEAST_SHARE` of those in which the service was
               used, their heights or ratios are alike, and bursts at random times would hardly hit
               so many
    height   = the median of the heights of these bursts, or of their ratios to the base before
               them times the base now: of the two, the one that varies less
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import comb, exp, inf, sqrt
from statistics import fmean, median, pstdev

from cavvy.domain.values import Struct, replace

BASE_S = 300.0
_FAST_S = 30.0
_ABOVE, _SIGMAS = 1.5, 5.0
_LONGEST_S = 1800.0  # what lasts longer is no burst, but another base
_QUIET_S = 600.0  # without a request for so long, the service is not used
_IDLE = 0.1  # requests per second: a service that gets fewer begins its use with a burst
_KEPT, _QUIETS = 128, 32
_KEEP_FAST, _KEEP_BASE = exp(-1 / _FAST_S), exp(-1 / BASE_S)
_SLOTS, _LEAST_HITS, _LEAST_SHARE = 6, 2, 0.6
# how far ahead bursts are expected, how often this is done, and after how many distances no more
_AHEAD_S, _AGAIN_S, _MOST_AHEAD = 3600.0, 900.0, 500
_CHANCE = 0.3  # regular bursts are taken for random ones, or random for regular, at most so often
_ALIKE = 0.35  # the heights of the bursts of a sequence vary by at most this part of their mean
_LATEST = 4  # distances are measured from so many last bursts
_SHORTEST_S = 240.0
_SPREAD, _MOST_SPREAD_S, _LEAST_SPREAD_S = 0.05, 180.0, 15.0
_INEXACT_S = 15.0
_SEEN_LATE_S = 10.0  # a burst is seen about so long after it began
# An expected burst counts for so long after its last moment: until then, the averages show it.
_SHOWS_S = 45.0


class SeenBurst(Struct, frozen=True, kw_only=True):
    """A burst that has ended: when it began, how long it lasted, its arrivals per second, and those
    of the base before it."""

    at_s: float
    length_s: float
    height: float
    base: float


class ExpectedBurst(Struct, frozen=True, kw_only=True):
    """A burst that is expected at `at_s`, plus or minus `spread_s`, every `period_s` seconds, and
    how high it will be: `ratio` times the base, or, if this is 0, `height` arrivals per second."""

    at_s: float
    spread_s: float
    period_s: float
    height: float
    ratio: float = 0.0

    @property
    def until_s(self) -> float:
        return self.at_s + self.spread_s + _SHOWS_S


class BurstRecord(Struct, frozen=True, kw_only=True):
    """The bursts of a service, oldest first, and what is known of the present one.

    `base` and `base_span_s` are the weighted arrivals and seconds of the base, `fast` those of the
    last seconds. `began_s` is the beginning of the present burst, or None; `peak` its highest rate,
    `count` its arrivals. `quiet` contains the times in which the service was not used, and
    `idle_s` for how long no request has arrived. `known_s` is how long the service is known.
    """

    base: float = 0.0
    base_span_s: float = 0.0
    fast: float = 0.0
    fast_span_s: float = 0.0
    began_s: float | None = None
    peak: float = 0.0
    count: int = 0
    bursts: tuple[SeenBurst, ...] = ()
    quiet: tuple[tuple[float, float], ...] = ()
    idle_s: float = 0.0
    known_s: float = 0.0
    judged_s: float | None = None  # when `expected` was found
    expected: tuple[ExpectedBurst, ...] = ()

    @property
    def usual(self) -> float:
        """The arrivals per second of the base."""
        return self.base / self.base_span_s if self.base_span_s else 0.0


def record_bursts(record: BurstRecord, arrivals: Sequence[int], now_s: float) -> BurstRecord:
    """Return the record, extended by the arrivals of each second before `now_s`."""
    counting = _Counting(record)
    for at, arrived in enumerate(arrivals, 1):
        counting.add(arrived, now_s - len(arrivals) + at)
    after = counting.describe(record)
    over = any(each.until_s < now_s for each in record.expected)
    due = over or now_s - (record.judged_s or 0.0) >= _AGAIN_S
    # A burst that was expected counts as such until it ends.
    if after.bursts is not record.bursts or (due and after.began_s is None):
        after = replace(after, expected=tuple(_expect(after, now_s)), judged_s=now_s)
    return after


class _Counting:
    """The counts of a record while seconds are added."""

    def __init__(self, record: BurstRecord) -> None:
        self.base, self.base_span_s = record.base, record.base_span_s
        self.fast, self.fast_span_s = record.fast, record.fast_span_s
        self.began_s, self.peak, self.count = record.began_s, record.peak, record.count
        self.idle_s, self.known_s = record.idle_s, record.known_s
        self.bursts, self.quiet = record.bursts, record.quiet

    def describe(self, record: BurstRecord) -> BurstRecord:
        return replace(
            record,
            base=self.base,
            base_span_s=self.base_span_s,
            fast=self.fast,
            fast_span_s=self.fast_span_s,
            began_s=self.began_s,
            peak=self.peak,
            count=self.count,
            bursts=self.bursts,
            quiet=self.quiet,
            idle_s=self.idle_s,
            known_s=self.known_s,
        )

    def add(self, arrived: int, now_s: float) -> None:
        """Add the arrivals of one second."""
        self._add_quiet(arrived, now_s)
        self.known_s += 1
        self.fast = _KEEP_FAST * self.fast + arrived
        self.fast_span_s = _KEEP_FAST * self.fast_span_s + 1
        if self.began_s is not None:
            self._follow(self.began_s, arrived, now_s)
            return
        usual = self.base / self.base_span_s * self.fast_span_s if self.base_span_s else 0.0
        chance = _SIGMAS * sqrt(max(1.0, usual))
        if self.fast > max(_ABOVE * usual, usual + chance) and self.base_span_s > 2 * _FAST_S:
            self.began_s, self.peak, self.count = now_s - _SEEN_LATE_S, 0.0, 0
        else:
            self.base = _KEEP_BASE * self.base + arrived
            self.base_span_s = _KEEP_BASE * self.base_span_s + 1

    def _add_quiet(self, arrived: int, now_s: float) -> None:
        if not arrived:
            self.idle_s += 1
            return
        if self.idle_s >= _QUIET_S:
            self.quiet = (*self.quiet, (now_s - self.idle_s, now_s))[-_QUIETS:]
        self.idle_s = 0.0

    def _follow(self, began_s: float, arrived: int, now_s: float) -> None:
        """Add a second to a burst, which may end."""
        rate, usual = self.fast / self.fast_span_s, self.base / self.base_span_s
        self.peak, self.count = max(self.peak, rate), self.count + arrived
        length_s, idle = now_s - began_s, usual < _IDLE
        if length_s > (_QUIET_S if idle else _LONGEST_S):
            self.base, self.began_s = rate * self.base_span_s, None
        elif rate <= usual + (self.peak - usual) / (10 if idle else 3):
            height = (self.count / max(1.0, length_s - _SEEN_LATE_S) + self.peak) / 2
            burst = SeenBurst(at_s=began_s, length_s=length_s, height=height, base=usual)
            self.bursts, self.began_s = (*self.bursts, burst)[-_KEPT:], None
            self.fast = usual * self.fast_span_s  # otherwise, its end would be another burst


def _expect(record: BurstRecord, now_s: float) -> Iterator[ExpectedBurst]:
    """Yield the next burst of each regular sequence, if it is within `_AHEAD_S`; of those at about
    the same time, the one with the most bursts behind it."""
    found: list[tuple[int, ExpectedBurst]] = []
    starts = [each.at_s for each in record.bursts]
    for period_s in _list_periods(starts):
        for at in range(len(starts) - 1, -1, -1):
            if starts[at] < starts[-1] - period_s:
                break
            each = _continue(record, starts, at, period_s, now_s)
            if each is not None:
                found.append(each)
    found.sort(key=lambda each: (-each[0], each[1].period_s))
    kept: list[ExpectedBurst] = []
    for _, one in found:
        if all(abs(one.at_s - other.at_s) > one.spread_s + other.spread_s for other in kept):
            kept.append(one)
    yield from sorted(kept, key=lambda each: each.at_s)


def _list_periods(starts: Sequence[float]) -> list[float]:
    """Return the distances that a sequence may have, without those that are nearly equal."""
    found: list[float] = []
    for at in range(len(starts) - 1, max(0, len(starts) - 1 - _LATEST), -1):
        for before in range(at - 1, -1, -1):
            period_s = starts[at] - starts[before]
            if period_s >= _SHORTEST_S:
                found.append(period_s)
    found.sort()
    kept: list[float] = []
    for each in found:
        if not kept or each - kept[-1] > _LEAST_SPREAD_S:
            kept.append(each)
    return kept


def _continue(
    record: BurstRecord, starts: Sequence[float], at: int, period_s: float, now_s: float
) -> tuple[int, ExpectedBurst] | None:
    """Return the next burst of the sequence with this distance to which the burst `at` belongs, and
    the number of bursts behind it."""
    spread_s = min(_MOST_SPREAD_S, max(_LEAST_SPREAD_S, _SPREAD * period_s))
    ahead = max(1, -int((starts[at] + spread_s + _SHOWS_S - now_s) // period_s))
    if ahead > _MOST_AHEAD or starts[at] + ahead * period_s > now_s + _AHEAD_S:
        return None
    skipped = (starts[at] + number * period_s for number in range(1, ahead))
    missed = sum(not _is_quiet(record, each_s) for each_s in skipped)
    hits, tried = _look_back(record, starts, at, period_s, spread_s, now_s, missed + 1)
    # The distance of the first two bursts is the only guess for the third.
    if len(hits) < 2 or (len(starts) > 2 and _is_weak(starts, spread_s, len(hits), tried)):
        return None
    gaps = [starts[a] - starts[b] for a, b in pairwise(hits)]
    counts = [max(1, round(gap / period_s)) for gap in gaps]
    exact_s = fmean(gap / count for gap, count in zip(gaps, counts, strict=True))
    errors = [gap - count * exact_s for gap, count in zip(gaps, counts, strict=True)]
    learnt_s = min(spread_s, _LEAST_SPREAD_S + 2 * pstdev(errors))
    next_s = starts[at] + ahead * exact_s
    if next_s + learnt_s + _SHOWS_S < now_s:
        next_s += exact_s
    bursts = [record.bursts[each] for each in hits]
    ratios = [each.height / each.base if each.base > 0 else 0.0 for each in bursts]
    varied = _vary(ratios), _vary([each.height for each in bursts])
    if min(varied) > _ALIKE:
        return None
    expected = ExpectedBurst(
        at_s=next_s,
        spread_s=learnt_s,
        period_s=exact_s,
        height=median(each.height for each in bursts),
        ratio=median(ratios) if varied[0] <= varied[1] else 0.0,
    )
    return len(hits), expected


def _look_back(
    record: BurstRecord,
    starts: Sequence[float],
    at: int,
    period_s: float,
    spread_s: float,
    now_s: float,
    tried: int,
) -> tuple[list[int], int]:
    """Return the bursts of the sequence, the newest first, and the number of times looked at, of
    which there were `tried` after the burst `at`."""
    hits, slot_s, skipped = [at], starts[at], 0
    first_s = max(now_s - record.known_s, starts[0] - spread_s)
    while tried < _SLOTS and (slot_s := slot_s - period_s) >= first_s:
        near = _find_nearest(starts, slot_s)
        # The distance is not exact, which adds up over the times in which nothing could be seen.
        if abs(starts[near] - slot_s) <= min(period_s / 4, spread_s + _INEXACT_S * skipped):
            hits.append(near)
            slot_s = starts[near]
        elif _is_quiet(record, slot_s):
            skipped += 1
            continue
        tried, skipped = tried + 1, 0
    return hits, tried


def _is_weak(starts: Sequence[float], spread_s: float, found: int, tried: int) -> bool:
    """Return whether a sequence has too few bursts: so many are likely for one of the possible
    distances if bursts come at random, as often as the present ones do (the sum of a binomial
    distribution)."""
    if found <= _LEAST_HITS or found < _LEAST_SHARE * tried:
        return True
    hits, tried = found - 1, tried - 1
    often = len(starts) / max(1.0, starts[-1] - starts[0])
    hit = min(1.0, 2 * spread_s * often)
    tail = sum(comb(tried, k) * hit**k * (1 - hit) ** (tried - k) for k in range(hits, tried + 1))
    return tail * 2 * len(starts) > _CHANCE


def _find_nearest(starts: Sequence[float], at_s: float) -> int:
    after = bisect_left(starts, at_s)
    near = [each for each in (after - 1, after) if 0 <= each < len(starts)]
    return min(near, key=lambda each: abs(starts[each] - at_s))


def _is_quiet(record: BurstRecord, at_s: float) -> bool:
    return any(begin <= at_s <= end for begin, end in record.quiet)


def _vary(values: Sequence[float]) -> float:
    mean = fmean(values)
    return pstdev(values) / mean if mean > 0 else inf


def expect_rate(record: BurstRecord, now_s: float, ahead_s: float) -> float:
    """Return the highest rate of the expected bursts that may begin within `ahead_s` or have begun,
    or 0 without one."""
    began_s = record.began_s
    rates = [
        each.ratio * record.usual or each.height
        for each in record.expected
        if each.at_s - each.spread_s - ahead_s <= now_s <= each.until_s
        or (began_s is not None and abs(began_s - each.at_s) <= each.spread_s + _SHOWS_S)
    ]
    return max(rates, default=0.0)
