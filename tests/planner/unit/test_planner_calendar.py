"""Cron lines and windows across changes of clocks, and whether a later hour of a window is
cheaper.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest

from cavvy.domain.tasks import StartWindow, WindowSpan
from cavvy.domain.units import HourlyRate
from cavvy.planner.calendar import (
    TimeInterval,
    choose_start,
    find_interval,
    next_time,
    parse_cron,
    to_utc,
)

BERLIN = ZoneInfo(
    "Europe/Berlin"
)  # clocks go forward on 2027-03-28 at 02:00 and back on 2027-10-31 at 03:00
NEW_YORK = ZoneInfo("America/New_York")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")  # by half an hour
HOUR = timedelta(hours=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(line: str, zone: ZoneInfo, after: str, count: int) -> list[str]:
    found, now = [], utc(after)
    for _ in range(count):
        upcoming = next_time(parse_cron(line), zone, now)
        assert upcoming is not None
        assert upcoming > now
        now = upcoming
        found.append(f"{now:%m-%d %H:%M}")
    return found


@pytest.mark.parametrize(
    ("line", "after", "expected"),
    [
        ("0 3 * * *", "2027-01-01T00:00", ["01-01 03:00", "01-02 03:00"]),
        ("0 3 * * *", "2027-01-01T03:00", ["01-02 03:00"]),
        ("*/20 * * * *", "2027-01-01T00:05", ["01-01 00:20", "01-01 00:40", "01-01 01:00"]),
        ("5-10/5 0 * * *", "2027-01-01T00:05", ["01-01 00:10", "01-02 00:05"]),
        ("0 0 13 * 5", "2027-08-12T00:00", ["08-13 00:00", "08-20 00:00"]),  # the 13th or a Friday
        ("0 0 * * 0", "2027-01-01T00:00", ["01-03 00:00"]),
        ("0 0 * * 7", "2027-01-01T00:00", ["01-03 00:00"]),
        ("0 0 29 2 *", "2027-01-01T00:00", ["02-29 00:00"]),
        ("0 12 1,15 * *", "2027-01-01T12:00", ["01-15 12:00", "02-01 12:00"]),
    ],
)
def test_cron_lines(line: str, after: str, expected: list[str]) -> None:
    assert times(line, ZoneInfo("UTC"), after, len(expected)) == expected


def test_a_day_that_never_comes() -> None:
    assert next_time(parse_cron("0 0 31 2 *"), BERLIN, utc("2027-01-01T00:00")) is None


@pytest.mark.parametrize(
    ("line", "zone", "after", "expected"),
    [
        # 02:30 does not exist on the 28th: the first moment after the change, 03:00 CEST, and again
        # at 02:30 after it
        ("30 2 * * *", BERLIN, "2027-03-27T00:00", ["03-27 01:30", "03-28 01:00", "03-29 00:30"]),
        # 02:30 comes twice on the 31st: the first of the two, in summer time
        ("30 2 * * *", BERLIN, "2027-10-30T00:00", ["10-30 00:30", "10-31 00:30", "11-01 01:30"]),
        # 03:00 in local time moves by an hour in UTC
        ("0 3 * * *", BERLIN, "2027-03-27T00:00", ["03-27 02:00", "03-28 01:00", "03-29 01:00"]),
        # every hour is every hour of real time: none is left out or comes together with another
        ("0 * * * *", BERLIN, "2027-03-28T00:00", ["03-28 01:00", "03-28 02:00", "03-28 03:00"]),
        ("0 * * * *", BERLIN, "2027-10-30T23:00", ["10-31 00:00", "10-31 01:00", "10-31 02:00"]),
        ("30 1 * * *", NEW_YORK, "2027-11-06T12:00", ["11-07 05:30", "11-08 06:30"]),
        ("30 2 * * *", NEW_YORK, "2027-03-13T12:00", ["03-14 07:00", "03-15 06:30"]),
        (
            "15 2 * * *",
            LORD_HOWE,
            "2027-10-01T16:00",
            ["10-02 15:30", "10-03 15:15"],
        ),  # 02:00 became 02:30
    ],
)
def test_changes_of_clocks(line: str, zone: ZoneInfo, after: str, expected: list[str]) -> None:
    assert times(line, zone, after, len(expected)) == expected


class CountedZone(tzinfo):
    """A time zone that counts its conversions."""

    def __init__(self, name: str) -> None:
        self._zone, self.count = ZoneInfo(name), 0

    def utcoffset(self, local: datetime | None) -> timedelta | None:
        self.count += 1
        return self._zone.utcoffset(local)

    def dst(self, local: datetime | None) -> timedelta | None:
        return self._zone.dst(local)

    def tzname(self, local: datetime | None) -> str | None:
        return self._zone.tzname(local)

    def fromutc(self, at: datetime) -> datetime:
        self.count += 1
        return self._zone.fromutc(at.replace(tzinfo=self._zone)).replace(tzinfo=self)


def test_a_line_for_each_minute_needs_few_conversions() -> None:
    zone = CountedZone("America/New_York")
    found = next_time(parse_cron("* * * * *"), zone, datetime(2026, 6, 1, 12, tzinfo=UTC))
    assert found == datetime(2026, 6, 1, 12, 1, tzinfo=UTC)
    assert zone.count < 20


@pytest.mark.parametrize("line", ["* * * * *", "10 * * * *", "30 1,2 * * *", "0 0 * * 0"])
@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
        ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
        ("Pacific/Apia", datetime(2011, 12, 30, 10, tzinfo=UTC)),
    ],
)
def test_times_around_a_change_follow_each_other(line: str, zone: str, change: datetime) -> None:
    """The next time is the same from every moment before it, near the change and far from it."""
    parsed, at = parse_cron(line), change - timedelta(hours=6, minutes=7)
    while at < change + timedelta(hours=6):
        found = next_time(parsed, ZoneInfo(zone), at)
        assert found is not None
        assert found > at
        later = at + (found - at) / 2
        assert next_time(parsed, ZoneInfo(zone), later) == found
        at = max(found, at + timedelta(hours=1, minutes=7))


def test_a_year_of_a_daily_line_has_one_run_each_day() -> None:
    for zone in (BERLIN, NEW_YORK, LORD_HOWE):
        found, now = [], utc("2027-01-01T12:00")
        while len(found) < 365:
            upcoming = next_time(parse_cron("30 2 * * *"), zone, now)
            assert upcoming is not None
            now = upcoming
            found.append(now.astimezone(zone).date())
        assert len(set(found)) == 365
        assert (found[-1] - found[0]).days == 364


def test_local_times() -> None:
    assert to_utc(datetime(2027, 3, 28, 2, 59), BERLIN) == utc("2027-03-28T01:00")
    assert to_utc(datetime(2027, 3, 28, 3, 0), BERLIN) == utc("2027-03-28T01:00")
    assert to_utc(datetime(2027, 10, 31, 2, 0), BERLIN) == utc("2027-10-31T00:00")


NIGHTS = StartWindow(
    spans=(WindowSpan(days=tuple(range(7)), start_minute=22 * 60, end_minute=6 * 60),)
)
OFF_PEAK = StartWindow(
    spans=(*NIGHTS.spans, WindowSpan(days=(5, 6), start_minute=0, end_minute=1440))
)


@pytest.mark.parametrize(
    ("window", "now", "start", "end"),
    [
        (NIGHTS, "2027-01-04T12:00", "2027-01-04T21:00", "2027-01-05T05:00"),
        (NIGHTS, "2027-01-05T03:00", "2027-01-04T21:00", "2027-01-05T05:00"),
        (NIGHTS, "2027-01-05T05:00", "2027-01-05T21:00", "2027-01-06T05:00"),
        (NIGHTS, "2027-03-27T23:00", "2027-03-27T21:00", "2027-03-28T04:00"),  # seven hours
        (NIGHTS, "2027-10-30T23:00", "2027-10-30T20:00", "2027-10-31T05:00"),  # nine
        (
            OFF_PEAK,
            "2027-01-09T12:00",
            "2027-01-08T21:00",
            "2027-01-11T05:00",
        ),  # from Friday night to Monday morning
    ],
)
def test_windows(window: StartWindow, now: str, start: str, end: str) -> None:
    assert find_interval(window, BERLIN, utc(now)) == TimeInterval(utc(start), utc(end))


NOW = utc("2027-01-15T20:00")
OPEN = TimeInterval(NOW - HOUR, NOW + 10 * HOUR)


def daily(cheap_hour: int, *, days: int = 10) -> list[tuple[datetime, HourlyRate]]:
    """A price of 1 dollar, and of half of it for one hour of every day."""
    found, day = [], NOW.replace(hour=0) - timedelta(days=days)
    while day <= NOW:
        at = day + cheap_hour * HOUR
        found += [(at, HourlyRate(500_000)), (at + HOUR, HourlyRate(1_000_000))]
        day += timedelta(days=1)
    return [(at, rate) for at, rate in found if at <= NOW]


def test_before_its_window_a_job_waits_and_in_it_without_a_history_it_starts() -> None:
    later = TimeInterval(NOW + HOUR, NOW + 2 * HOUR)
    assert choose_start(later, NOW, ()).at == later.start
    assert choose_start(OPEN, NOW, ()).at is None
    assert choose_start(OPEN, NOW, daily(3, days=2)).at is None  # two days show nothing


def test_in_its_window_it_waits_for_the_hour_that_has_been_cheapest() -> None:
    start = choose_start(OPEN, NOW, daily(3))
    assert start.at == NOW + HOUR  # looked at every hour, for prices change
    assert "50 % lower" in start.reason
    at_three = NOW + 7 * HOUR
    prices = [*daily(3), (at_three, HourlyRate(500_000))]
    assert choose_start(OPEN, at_three, prices).at is None


def test_it_does_not_wait_for_an_hour_beyond_its_window_or_for_next_to_nothing() -> None:
    assert choose_start(TimeInterval(NOW - HOUR, NOW + 2 * HOUR), NOW, daily(3)).at is None
    flat = [(NOW - timedelta(days=8), HourlyRate(990_000)), (NOW - HOUR, HourlyRate(1_000_000))]
    assert choose_start(OPEN, NOW, flat).at is None
