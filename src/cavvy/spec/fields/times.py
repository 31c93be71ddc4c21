"""Parses times and durations, the section `schedule`, and the field `window`: the hours and
weekdays at which a job may start.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cavvy.domain.tasks import JobSchedule, StartWindow, WindowSpan
from cavvy.domain.units import format_duration, is_whole, parse_duration
from cavvy.planner.calendar import next_time, parse_cron
from cavvy.spec.fields.kinds import (
    TEXT_OR_NUMBER,
    ScalarKind,
    SectionReader,
    WrongValue,
    either,
    filled,
    read_text,
    section,
    text_kind,
)
from cavvy.spec.problems import nearest, shown
from cavvy.spec.tree import ScalarNode

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

TIME_WORDS = (
    "a time with its zone, such as 2030-05-31T18:00Z, 2030-05-31T18:00+02:00 or 2030-05-31 "
    "18:00 Europe/Berlin"
)
_LONGEST = timedelta(days=3660)


def read_length(node: ScalarNode) -> timedelta:
    value = node.value
    if isinstance(value, str) and is_whole(value.strip()):
        number = value.strip()
        raise WrongValue(
            f"{shown(value)} has no unit", suggestion=f"write {number}s, {number}m or {number}h"
        )
    length = parse_duration(value if isinstance(value, (int, float)) else read_text(node))
    if length > _LONGEST:
        raise WrongValue(f"{format_duration(length)} is longer than ten years")
    return length


def length_kind(
    low: timedelta = timedelta(milliseconds=1), high: timedelta = _LONGEST
) -> ScalarKind:
    """Return a kind for durations from `low` to `high`."""

    def parse(node: ScalarNode) -> timedelta:
        length = read_length(node)
        if length < low:
            raise WrongValue(f"{shown(node.text)} is too short", expected=f"at least {_exact(low)}")
        if length > high:
            raise WrongValue(
                f"{shown(node.text)} is too long", expected=f"at most {format_duration(high)}"
            )
        return length

    words = "a length of time, such as 90s, 10m, 1h30m or 2d (a bare number is seconds)"
    return ScalarKind(words, parse, TEXT_OR_NUMBER)


def _exact(length: timedelta) -> str:
    """Format a limit in the syntax of task files. A millisecond is a special case, because
    `format_duration` would round it to 0.
    """
    return (
        "1ms; omit the key for no limit"
        if timedelta(0) < length < timedelta(milliseconds=100)
        else format_duration(length)
    )


def read_time(text: str) -> datetime:
    """Parse a time with its zone and convert it to UTC. Raises WrongValue."""
    stripped = text.strip()
    time, _, zone = stripped.rpartition(" ")
    named = re.fullmatch(r"[A-Za-z][A-Za-z0-9_+/-]*", zone) is not None and zone.upper() != "Z"
    try:
        moment = datetime.fromisoformat(time if named else stripped.replace(" Z", "Z"))
    except ValueError:
        raise WrongValue(f"{shown(text)} is not a time", suggestion=_time_hint(stripped)) from None
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}|\d{8}", time if named else stripped):
        raise WrongValue(
            f"{shown(text)} is a day, not a time", suggestion=f"write {stripped[:10]}T00:00Z"
        )
    if named:
        moment = moment.replace(tzinfo=find_zone(zone))
    if moment.tzinfo is None:
        raise WrongValue(
            f"{shown(text)} has no time zone",
            suggestion=f"write {stripped}Z for UTC, or add an offset such as +02:00",
        )
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise WrongValue(f"{shown(text)} is outside of the supported dates") from None


def find_zone(name: str) -> "ZoneInfo":
    """Return the time zone with this IANA name. Raises WrongValue if the name is unknown."""
    from zoneinfo import ZoneInfo, available_timezones

    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError, RecursionError):
        # A very long name raises RecursionError.
        close = nearest(name, available_timezones())
        hint = f"did you mean {close}?" if close else "write an offset such as +02:00 instead"
        raise WrongValue(f"no time zone is called {shown(name)}", suggestion=hint) from None


def _time_hint(text: str) -> str:
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
        return "write the date too, as in 2030-05-31T18:00Z, or write a length of time, such as 8h"
    return ""


# The section `schedule`

_CRON_RANGES = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day", 1, 31),
    ("month", 1, 12),
    ("weekday", 0, 7),
)
_ANY_DAY = datetime(2001, 1, 1, tzinfo=UTC)  # cron lines match the same dates in all years
_CRON_PART = re.compile(r"(?:\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([0-9]{1,2}))?")


def check_cron(text: str) -> str:
    """Check that a string is a cron line with five numeric fields, and return it with single
    spaces. Raises WrongValue.
    """
    parts = text.split()
    if len(parts) != 5:
        raise WrongValue(
            f"a cron line has five fields (minute hour day month weekday), not {len(parts)}"
        )
    for part, (name, low, high) in zip(parts, _CRON_RANGES, strict=True):
        for piece in part.split(","):
            match = _CRON_PART.fullmatch(piece)
            bounds = [int(bound) for bound in match.group(1, 2) if bound] if match else []
            if (
                match is None
                or bounds != sorted(bounds)
                or any(not low <= each <= high for each in bounds)
                or match[3] in ("0", "00")
            ):
                raise WrongValue(
                    f"{shown(piece)} is not a valid {name} of a cron line",
                    expected=f"{low} to {high}, *, ranges, steps",
                )
    line = " ".join(parts)
    if next_time(parse_cron(line), UTC, _ANY_DAY) is None:
        raise WrongValue(
            f"no date matches {shown(line)}",
            suggestion="change the day or the month; * stands for all",
        )
    return line


def _read_schedule(text: str) -> JobSchedule:
    text = filled(text).strip()
    if len(text.split()) >= 4:
        return JobSchedule(cron=check_cron(text))
    return JobSchedule(at=read_time(text))


def _build_schedule(table: SectionReader) -> JobSchedule | None:
    if table.has("at") == table.has("cron"):
        both = table.has("at")
        message = "`at` and `cron` cannot be used together" if both else "`at` or `cron` is missing"
        table.notes.add(table.node.mark, message, expected="one of them")
    values = table.values()
    if "time_zone" in values and not table.has("cron"):
        table.wrong(
            "time_zone",
            "`time_zone` belongs to `cron`",
            suggestion="delete `time_zone` and write the zone at the end of the time in `at`",
        )
    return JobSchedule(**values) if "at" in values or "cron" in values else None


CRON = text_kind("a cron line such as 0 3 * * 1-5", check_cron)
ZONE = text_kind(
    "a time zone's name such as Europe/Berlin", lambda text: find_zone(filled(text)).key
)
_TABLE = section(
    "schedule",
    _build_schedule,
    at=text_kind(TIME_WORDS, read_time),
    cron=CRON,
    time_zone=ZONE,
)
SCHEDULE = either(
    text_kind(f"{TIME_WORDS}, or a cron line", _read_schedule), lambda schedule: schedule, _TABLE
)

_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ALL = tuple(range(7))
_DAY_MINUTES = 24 * 60
# "off-peak" means nights and whole weekends. Cavvy defines the hours, because no provider publishes
# any.
_OFF_PEAK_SPANS: tuple[WindowSpan, ...] = (
    WindowSpan(days=_ALL, start_minute=22 * 60, end_minute=6 * 60),
    WindowSpan(days=(5, 6), start_minute=0, end_minute=_DAY_MINUTES),
)
_TIMES = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")


def _read_window(text: str) -> StartWindow:
    words = filled(text).split()
    written = " ".join(words)
    spans, days = _OFF_PEAK_SPANS, _ALL
    if words[0].lower() != "off-peak":
        if not _TIMES.fullmatch(words[0]):
            days = _days(words.pop(0))
        if not words:
            raise WrongValue(
                "a time range is missing after the days",
                suggestion="write 00:00-24:00 for the whole day",
            )
        start, end = _minutes(words[0])
        spans = (WindowSpan(days=days, start_minute=start, end_minute=end),)
    return StartWindow(spans=spans, time_zone=_zone(words[1:]), text=written)


def _zone(words: list[str]) -> str:
    if len(words) > 1:
        raise WrongValue(f"{shown(' '.join(words))} is not a time zone")
    return find_zone(words[0]).key if words else "UTC"


def _minutes(text: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(text)
    if match is None:
        raise WrongValue(f"{shown(text)} is not a time range such as 22:00-06:00")
    hour, minute, last_hour, last_minute = (int(group) for group in match.groups())
    start, end = hour * 60 + minute, last_hour * 60 + last_minute
    if minute > 59 or last_minute > 59 or start >= _DAY_MINUTES or end > _DAY_MINUTES:
        raise WrongValue(f"{shown(text)} is outside of 00:00-24:00")
    if start == end:
        raise WrongValue(
            f"{shown(text)} is an empty range", suggestion="write 00:00-24:00 for the whole day"
        )
    return start, end


def _days(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for piece in text.lower().split(","):
        first, _, last = piece.partition("-")
        if first[:3] not in _NAMES or (last and last[:3] not in _NAMES):
            raise WrongValue(f"{shown(text)} is not a day or range of days of the week")
        at = _NAMES.index(first[:3])
        until = _NAMES.index(last[:3]) if last else at
        found.add(at)
        while at != until:
            at = (at + 1) % 7
            found.add(at)
    return tuple(sorted(found))


WINDOW = text_kind(
    "off-peak, or times such as 22:00-06:00 or Mon-Fri 20:00-08:00; a time zone such as "
    "Europe/Berlin may follow",
    _read_window,
)
