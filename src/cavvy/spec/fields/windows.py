"""The field `window`: the hours and weekdays at which a job may start."""

import re

from cavvy.domain.tasks import StartWindow, WindowSpan
from cavvy.spec.fields.kinds import WrongValue, filled, text_kind
from cavvy.spec.fields.times import find_zone
from cavvy.spec.problems import shown

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
