"""What bounds a task and what is done about its failures: `limits` and `retry`."""

import re
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.tasks import Limits, Retry
from cavvy.domain.units import Money, UnitError, format_duration, parse_usd
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    TEXT_OR_NUMBER,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    hints_for,
    read_text,
    whole,
)
from cavvy.spec.fields.times import TIME_WORDS, length_kind, read_length, read_time
from cavvy.spec.tree import ScalarNode


def _read_deadline(node: ScalarNode) -> tuple[datetime | None, timedelta | None]:
    """A moment, or a length from the submission."""
    text = read_text(node).strip()
    try:
        length = read_length(node)
    except (UnitError, WrongValue):
        if re.search(r"\d{4}-|\d:\d", text):
            return read_time(text), None
        raise
    if length <= timedelta(0):
        raise WrongValue("a deadline of no length would end the job at once")
    return None, length


def _build_limits(table: SectionReader) -> Limits:
    limits, now = Limits(**table.values()), table.notes.now
    at, after, duration = limits.deadline, limits.deadline_after, limits.duration
    if at is not None and now is not None and at <= now:
        message = f"the deadline was {format_duration(now - at)} ago"
        table.wrong("deadline", message, expected="a time to come")
    if after is not None and duration is not None and duration > after:
        message = (
            f"the duration ({format_duration(duration)}) reaches beyond the deadline "
            f"({format_duration(after)})"
        )
        table.wrong("duration", message, suggestion="lower it, or leave it out")
    if limits.budget == Money(0):
        table.wrong(
            "budget", "a budget of nothing stops every job", suggestion="leave it out for no limit"
        )
    return limits


LIMITS = SectionSpec(
    "limits",
    "Where Cavvy must stop.",
    (
        FieldSpec(
            "deadline",
            ScalarKind(
                f"{TIME_WORDS}; or a length of time from the submission such as 8h",
                _read_deadline,
                TEXT_OR_NUMBER,
            ),
            "When the job is stopped, finished or not: a time with its zone, or a length counted "
            "from the submission.",
            "8h",
            "none",
            to=("deadline", "deadline_after"),
        ),
        FieldSpec(
            "duration",
            length_kind(),
            "How long the job may run, over all its attempts.",
            "6h",
            "no limit",
        ),
        FieldSpec(
            "budget",
            ScalarKind(
                "an amount of US dollars such as 25 or $2.50",
                lambda node: parse_usd(read_text(node)),
                TEXT_OR_NUMBER,
            ),
            "The most that the job may cost, in US dollars. It is stopped, with its grace, before "
            "it costs more. A budget also stands for the consent that a paid offer needs where "
            "there is no terminal.",
            "25",
            "no limit",
        ),
        FieldSpec(
            "idle",
            length_kind(timedelta(seconds=10)),
            "How long the job may neither print nor use a CPU before it is stopped.",
            "30m",
            "no limit",
        ),
        FieldSpec(
            "unattended",
            length_kind(timedelta(seconds=10)),
            "How long a node works on without hearing from the control plane before it checkpoints "
            "and ends itself.",
            "12h",
            "6h",
        ),
    ),
    _build_limits,
    hints_for(
        {
            "write `duration`": "max_duration timeout walltime",
            "write `budget`": "max_cost cost",
            "write `max_price` under `resources` (per hour), or `budget` here (in all)": (
                "max_price"
            ),
            "write `idle`": "idle_duration idle_timeout",
            "write `idle`, as in `idle: 30m`": "idle_minutes idle_minutes_to_autostop",
        }
    ),
)

_TRIES_NUMBER = whole(0, 1_000_000)
_UNLIMITED = -1


def _read_tries(node: ScalarNode) -> int:
    if node.text in ("unlimited", "always", "forever"):
        return _UNLIMITED
    tries: int = _TRIES_NUMBER.parse(node)
    return tries


_TRIES = ScalarKind(
    "a number of tries, or `unlimited`",
    _read_tries,
    {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 1_000_000},
            {"const": "unlimited"},
            EXPRESSION,
        ]
    },
)


def _build_retry(table: SectionReader) -> Retry:
    values: dict[str, Any] = {
        name: None if value == _UNLIMITED else value for name, value in table.values().items()
    }
    retry = Retry(**values)
    if retry.exit_codes and retry.exit == 0:
        table.wrong(
            "exit_codes",
            "exit codes are named but `exit` allows no new try",
            suggestion="write `exit: 3` or so as well",
        )
    return retry


RETRY = SectionSpec(
    "retry",
    "How often each kind of failure is tried again: a number, or `unlimited`.",
    (
        FieldSpec(
            "preemption",
            _TRIES,
            "Times to start again after capacity was taken back.",
            "10",
            "unlimited",
        ),
        FieldSpec("node", _TRIES, "Times to start again after a node broke or was lost.", "3", "3"),
        FieldSpec("exit", _TRIES, "Times to start again after the program failed.", "2", "0"),
        FieldSpec(
            "exit_codes",
            ListKind(whole(1, 255, "an exit code from 1 to 255"), single=True),
            "The exit codes after which `exit` starts again.",
            "[1, 137]",
            "any but 0",
        ),
        FieldSpec(
            "delay",
            length_kind(timedelta(0), timedelta(hours=1)),
            "How long to wait before the first new try of a kind; doubled with each, up to an "
            "hour.",
            "30s",
            "0",
        ),
        FieldSpec(
            "parallel",
            whole(1, 8, "a number of places, from 1 to 8"),
            "Places that are tried at the same time; the first to be ready gets the work, the "
            "others are given back.",
            "3",
            "1",
        ),
    ),
    _build_retry,
    hints_for(
        {
            "write `exit`": "max_restarts_on_errors max_attempts",
            "write `exit_codes`": "recover_on_exit_codes",
            "write `preemption`, `node` and `exit`, each with a number": "on_events attempts",
            "write `delay`": "backoff",
        }
    ),
)
