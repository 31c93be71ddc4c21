"""Computes when a scheduled job starts next, and when a job with a start window should start. The
module does no I/O; the caller passes the time zone.

Times are local times, as a wall clock shows them. If a clock change skips a time, the first moment
after the change is used. If a time occurs twice, its first occurrence is used. Hourly cron lines
run in every real hour, including an hour that a clock change repeats.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo

from cavvy.domain.tasks import StartWindow
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct

_DAY = timedelta(days=1)
_HOUR = timedelta(hours=1)
_NEAR = timedelta(hours=4)  # more than any change of clocks but those of the date line
# Prices of later hours are not compared: a window opens again within a week.
_FARTHEST = timedelta(days=14)
_HORIZON = 366 * 8  # number of days to search; 29 February occurs at least once in eight years
HISTORY = timedelta(days=14)  # prices older than this are ignored
_ENOUGH = timedelta(days=3)  # a job does not wait if the price history is shorter than this
_WORTH = 0.03  # the smallest saving worth waiting for, as a share of the current price


class CronLine(Struct, frozen=True):
    """The five fields of a cron line as sets. As in cron, if both day and weekday are restricted, a
    date needs to match only the day or the weekday.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    any_day: bool
    any_weekday: bool
    any_hour: bool

    def falls_on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return by_day and by_weekday
        return by_day or by_weekday


def parse_cron(text: str) -> CronLine:
    """Parse a cron line that the task file's validation has already accepted."""
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    fields = text.split()
    sets = [_expand(field, low, high) for field, (low, high) in zip(fields, bounds, strict=True)]
    return CronLine(
        minutes=sets[0],
        hours=sets[1],
        days=sets[2],
        months=sets[3],
        weekdays=frozenset(day % 7 for day in sets[4]),
        any_day=fields[2].startswith("*"),
        any_weekday=fields[4].startswith("*"),
        any_hour=fields[1].startswith("*"),
    )


def _expand(field: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for piece in field.split(","):
        spread, _, step = piece.partition("/")
        first, _, last = spread.partition("-")
        if spread == "*":
            start, end = low, high
        else:
            start = int(first)
            end = int(last) if last else high if step else start
        found.update(range(start, end + 1, int(step or 1)))
    return frozenset(found)


def next_time(line: CronLine, zone: tzinfo, after: datetime) -> datetime | None:
    """Return the first time after `after` that the cron line names, in UTC. Returns None if the
    line names only days that never occur, such as 30 February.
    """
    if not _is_near_change(zone, after):  # the local times are in the order of UTC
        local = _next_local(line, after.astimezone(zone).replace(tzinfo=None))
        return None if local is None else to_utc(local, zone)
    # Start one day early: a clock change can move the last times of a day past midnight.
    day = after.astimezone(zone).date() - _DAY
    for _ in range(_HORIZON):
        if line.falls_on(day):
            times = [at for at in _times(line, day, zone) if at > after]
            if times:
                return min(times)
        day += _DAY
    return None


def _is_near_change(zone: tzinfo, at: datetime) -> bool:
    """Return whether a clock change near `at` may change the order of times: any change within
    `_NEAR`, or a change by at least `_NEAR` within a day.
    """
    now = _offset(zone, at)
    if any(_offset(zone, at + each) != now for each in (-_NEAR, _NEAR)):
        return True
    return any(abs(_offset(zone, at + each) - now) >= _NEAR for each in (-_DAY, _DAY))


def _offset(zone: tzinfo, at: datetime) -> timedelta:
    found = at.astimezone(zone).utcoffset()
    assert found is not None
    return found


def _next_local(line: CronLine, after: datetime) -> datetime | None:
    """Return the first local time after `after` that the cron line names. Clock changes are
    ignored.
    """
    hours, minutes = sorted(line.hours), sorted(line.minutes)
    for number in range(_HORIZON):
        day = after.date() + number * _DAY
        if not line.falls_on(day):
            continue
        for hour in hours:
            if number == 0 and hour < after.hour:
                continue
            for minute in minutes:
                if (local := datetime.combine(day, time(hour, minute))) > after:
                    return local
    return None


def _times(line: CronLine, day: date, zone: tzinfo) -> Iterator[datetime]:
    for hour in line.hours:
        for minute in line.minutes:
            local = datetime.combine(day, time(hour, minute))
            yield to_utc(local, zone)
            if line.any_hour and (again := _second(local, zone)) is not None:
                yield again


def to_utc(local: datetime, zone: tzinfo) -> datetime:
    """Convert a local time to UTC. If a clock change repeats the time, its first occurrence is
    returned. If a clock change skips the time, the moment of the change is returned.
    """
    first = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if first.astimezone(zone).replace(tzinfo=None) == local:
        return first
    low, high = (
        local.replace(tzinfo=zone, fold=1).astimezone(UTC),
        first,
    )  # a moment before the clock change and a moment after it
    before = low.astimezone(zone).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


def _second(local: datetime, zone: tzinfo) -> datetime | None:
    """Return the second moment, in UTC, at which clocks show this local time. Return None if clocks
    show it only once; they show it twice when daylight saving time ends.
    """
    first = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    second = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    shown = second.astimezone(zone).replace(tzinfo=None)
    return second if second > first and shown == local else None


class TimeInterval(Struct, frozen=True):
    """The interval from `start` (included) to `end` (excluded), in UTC."""

    start: datetime
    end: datetime


def find_interval(window: StartWindow, zone: tzinfo, now: datetime) -> TimeInterval:
    """Return the window's interval that contains `now` or, if no interval does, the window's next
    interval. Adjacent intervals are merged.
    """
    today = now.astimezone(zone).date()
    found = []
    for offset in range(-2, 10):
        day = today + offset * _DAY
        for span in window.spans:
            if day.weekday() in span.days:
                ends = day if span.end_minute > span.start_minute else day + _DAY
                start, end = _at(day, span.start_minute, zone), _at(ends, span.end_minute, zone)
                if start < end:
                    found.append(TimeInterval(start, end))
    merged: list[TimeInterval] = []
    for each in sorted(found, key=lambda each: each.start):
        if merged and each.start <= merged[-1].end:
            merged[-1] = TimeInterval(merged[-1].start, max(merged[-1].end, each.end))
        else:
            merged.append(each)
    return next(each for each in merged if each.end > now)


def _at(day: date, minute: int, zone: tzinfo) -> datetime:
    return to_utc(datetime.combine(day, time()) + timedelta(minutes=minute), zone)


class StartDecision(Struct, frozen=True, kw_only=True):
    """A decision. If `at` is None, the job starts now; otherwise the caller must call
    `choose_start` again at the time `at`.
    """

    at: datetime | None
    reason: str


Prices = Sequence[tuple[datetime, HourlyRate]]  # (time of the change, new price), oldest first


def choose_start(window: TimeInterval, now: datetime, prices: Prices) -> StartDecision:
    """Decide whether the job starts now or waits for a cheaper hour in its window.

    `prices` is the price history of the cheapest location; its last entry is the current price. The
    expected price of an hour is the mean price at that time of day within `HISTORY`. If the price
    history is too short, the job starts immediately.
    """
    if now < window.start:
        return StartDecision(
            at=window.start, reason=f"the job's window opens at {window.start:%Y-%m-%d %H:%M} UTC"
        )
    if not prices or now - prices[0][0] < _ENOUGH:
        return StartDecision(at=None, reason="the job's window is open")
    current = prices[-1][1].micros_per_hour
    hour = now.replace(minute=0, second=0, microsecond=0) + _HOUR
    best, best_at = float(current), now
    end = min(window.end, hour + _FARTHEST)
    while hour < end:
        expected = _expected(prices, hour, now)
        if expected is not None and expected < best:
            best, best_at = expected, hour
        hour += _HOUR
    if best_at == now or best > current * (1 - _WORTH):
        return StartDecision(
            at=None,
            reason="the job's window is open, and its later hours are not likely to be cheaper",
        )
    look = min(best_at, now.replace(minute=0, second=0, microsecond=0) + _HOUR)
    cheaper = f"{100 * (1 - best / current):.0f} % lower"
    return StartDecision(
        at=look,
        reason="the job waits for a cheaper hour: around "
        f"{best_at:%H:%M} UTC, prices have been {cheaper} than now",
    )


def _expected(prices: Prices, hour: datetime, now: datetime) -> float | None:
    """Return the mean price at this time of day over the recorded days, or None if no price was
    recorded at this time.
    """
    seen = []
    at = hour - _DAY
    while at >= prices[0][0] and at >= now - HISTORY:
        seen.append(next(rate.micros_per_hour for since, rate in reversed(prices) if since <= at))
        at -= _DAY
    return sum(seen) / len(seen) if seen else None
