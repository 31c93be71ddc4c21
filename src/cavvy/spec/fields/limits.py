"""The sections `limits` and `retry`: the limits of a task, and what Cavvy does after failures."""

import re
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.tasks import JobLimits, RetryPolicy
from cavvy.domain.units import Money, UnitError, format_duration, parse_usd, read_number
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    TEXT_OR_NUMBER,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    advise_point,
    either,
    read_text,
    section,
    whole,
)
from cavvy.spec.fields.times import TIME_WORDS, length_kind, read_length, read_time
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode


def _read_deadline(node: ScalarNode) -> tuple[datetime | None, timedelta | None]:
    """Return the deadline as a pair: a time and None, or None and the duration from the submission
    to the deadline.
    """
    text = read_text(node).strip()
    try:
        length = read_length(node)
    except (UnitError, WrongValue):
        if re.search(r"[0-9]{4}-|[0-9]:[0-9]", text):
            return read_time(text), None
        raise
    if length <= timedelta(0):
        raise WrongValue("a deadline of 0 would stop the job immediately")
    return None, length


def _build_limits(table: SectionReader) -> JobLimits:
    limits, now = JobLimits(**table.values()), table.notes.now
    at, after, duration = limits.deadline, limits.deadline_after, limits.duration
    if at is not None and now is not None and at <= now:
        message = f"the deadline was {format_duration(now - at)} ago"
        table.wrong("deadline", message, expected="a time in the future")
    if after is not None and duration is not None and duration > after:
        message = (
            f"the duration ({format_duration(duration)}) exceeds the deadline "
            f"({format_duration(after)})"
        )
        table.wrong("duration", message, suggestion="lower or omit `duration`")
    if limits.budget == Money(0):
        table.wrong(
            "budget",
            "a budget of 0 would stop the job immediately",
            suggestion=("omit `budget` if the cost has no limit"),
        )
    return limits


def _read_percent(node: ScalarNode) -> float:
    text = read_text(node).strip()
    try:
        value = read_number(text.removesuffix("%"))
    except ValueError:
        hint = advise_point(text)
        raise WrongValue(f"{shown(text)} is not a percentage", suggestion=hint) from None
    if not 0 < value < 100:
        raise WrongValue(f"{shown(text)} is not between 0 % and 100 %", suggestion="write 5%")
    return value


_LENGTH = length_kind(timedelta(seconds=10))


def _build_idle(table: SectionReader) -> tuple[timedelta, float]:
    return table.get("for", timedelta(minutes=30)), table.get("gpu", 5.0)


_IDLE = section(
    "limits.idle",
    _build_idle,
    **{
        "gpu": ScalarKind("a percentage such as 5%", _read_percent, TEXT_OR_NUMBER),
        "for": _LENGTH,
    },
)

LIMITS = section(
    "limits",
    _build_limits,
    deadline=FieldSpec(
        ScalarKind(
            f"{TIME_WORDS}; or a length of time after the submission, such as 8h",
            _read_deadline,
            TEXT_OR_NUMBER,
        ),
        to=("deadline", "deadline_after"),
    ),
    duration=length_kind(),
    budget=ScalarKind(
        "an amount of US dollars such as 25 or $2.50",
        lambda node: parse_usd(read_text(node)),
        TEXT_OR_NUMBER,
    ),
    idle=FieldSpec(
        either(_LENGTH, lambda length: (length, 0.0), _IDLE), to=("idle", "idle_gpu_percent")
    ),
    stuck=_LENGTH,
    unattended=_LENGTH,
)

_TRIES_NUMBER = whole(0, 1_000_000)
_UNLIMITED = -1


def _read_tries(node: ScalarNode) -> int:
    if node.text in ("unlimited", "always", "forever"):
        return _UNLIMITED
    tries: int = _TRIES_NUMBER.parse(node)
    return tries


_TRIES = ScalarKind(
    "a number of retries, or `unlimited`",
    _read_tries,
    {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 1_000_000},
            {"const": "unlimited"},
            EXPRESSION,
        ]
    },
)


def _build_retry(table: SectionReader) -> RetryPolicy:
    values: dict[str, Any] = {
        name: None if value == _UNLIMITED else value for name, value in table.values().items()
    }
    retry = RetryPolicy(**values)
    if retry.exit_codes and retry.exit == 0:
        table.wrong(
            "exit_codes",
            "`exit_codes` has no effect while `exit` is 0",
            suggestion="add `exit`, for example `exit: 3`",
        )
    return retry


RETRY = section(
    "retry",
    _build_retry,
    preemption=_TRIES,
    node=_TRIES,
    exit=_TRIES,
    exit_codes=ListKind(whole(1, 255, "an exit code from 1 to 255"), single=True),
    delay=length_kind(timedelta(0), timedelta(hours=1)),
    parallel=whole(1, 8, "a number of placements, from 1 to 8"),
)
