"""The sections `work` (the amount of work, for plans) and `webhooks` (web addresses that the server
calls).

The sections `limits` and `retry`: the limits of a task, and what Cavvy does after failures.
"""

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from cavvy.domain.targets import is_web_address
from cavvy.domain.tasks import Delivery, JobLimits, RetryPolicy, WebhookTarget, Workload
from cavvy.domain.units import Money, UnitError, format_duration, parse_usd, read_number
from cavvy.domain.values import replace
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    TEXT_OR_NUMBER,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    advise_point,
    choice,
    either,
    number,
    read_text,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.resources import read_device
from cavvy.spec.fields.times import TIME_WORDS, length_kind, read_length, read_time
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode


class WorkPrecision(StrEnum):
    """The number formats for which the catalog has the peak rates of accelerators."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"


_PRECISION_SLIPS = {
    "float64": WorkPrecision.FP64,
    "double": WorkPrecision.FP64,
    "float32": WorkPrecision.FP32,
    "float": WorkPrecision.FP32,
    "float16": WorkPrecision.FP16,
    "half": WorkPrecision.FP16,
    "bfloat16": WorkPrecision.BF16,
    "float8": WorkPrecision.FP8,
}


_MACHINE = re.compile(r"[a-z0-9][a-z0-9-]*/[^\s/]+")


def _check_rate_name(name: str) -> None:
    """Check a key of `rates`. A key is the name or family of an accelerator, or cpu, or a machine
    as PROVIDER/INSTANCE-TYPE. A key may end with :COUNT, the number of accelerators or vCPUs. A
    rate with an invalid key would have no effect. Raises WrongValue.
    """
    from cavvy.catalog.accelerators import find_accelerator, names_matching, suggest

    if _MACHINE.fullmatch(name):
        return
    expected = "an accelerator such as H100 or H100:8, cpu, or a machine such as aws/p5.48xlarge"
    what, colon, count = name.partition(":")
    if colon and not re.fullmatch(r"[1-9][0-9]{0,4}", count):
        raise WrongValue(f"{shown(count)} is not a count", expected=expected)
    if what.lower() != "cpu" and find_accelerator(what) is None and names_matching(what) == {what}:
        close = "cpu" if what.lower() == "cpus" else suggest(what)
        raise WrongValue(
            f"{shown(what)} is not an accelerator",
            expected=expected,
            suggestion=f"did you mean {close}?" if close else "",
        )


_WAYS = "`duration`, `flops`, or `samples` with `rates` or `profile`"


def _build_work(table: SectionReader) -> Workload | None:
    keys = ("duration", "flops", "samples", "rates", "profile")
    given = [key for key in keys if table.has(key)]
    if len(given) > 1 and given[0] in ("duration", "flops"):
        message = f"`{given[0]}` and `{given[1]}` cannot be used together"
        table.wrong(given[0], message, expected=_WAYS)
    elif given in ([], ["samples"], ["rates"], ["profile"], ["rates", "profile"]):
        message = "the amount of work is not fully described"
        table.notes.add(table.node.mark, message, expected=_WAYS)
    if table.has("measured_on") and "duration" not in given:
        table.wrong("measured_on", "`measured_on` has no effect without `duration`")
    work = table.make(Workload)
    return work and replace(work, precision=str(work.precision))


WORK = section(
    "work",
    _build_work,
    flops=number("a number of operations such as 1.2e21", 0, 1e40, above=True),
    precision=choice(WorkPrecision, _PRECISION_SLIPS),
    efficiency=number("a share of the peak from 0 to 1, such as 0.4", 0, 1, above=True),
    samples=number("a number of samples such as 1e6", 0, 1e30, above=True),
    rates=MapKind(
        "a table of rates in samples per second of one node, keyed by accelerator name or cpu",
        _check_rate_name,
        number("a rate in samples per second of one node", 0, 1e18, above=True),
    ),
    margin=number("a factor of at least 1, such as 1.2", 1, 100),
    duration=length_kind(),
    measured_on=text_kind("the accelerators of a node such as A100:8, or cpu", read_device),
    profile=text_kind("the path of a work profile, such as work.json", lambda path: path),
)


# The section `webhooks`


def _read_web_address(text: str) -> str:
    if not is_web_address(text):
        if "@" in text:  # probably a password
            raise WrongValue("the web address has a user name or password, which cannot be sent")
        raise WrongValue(f"{shown(text)} is not a web address")
    return text


_URL = text_kind(
    "a web address such as https://example.org/hook",
    _read_web_address,
)


_ON = choice(
    Delivery, {"success": Delivery.FINISH, "done": Delivery.FINISH, "error": Delivery.FAILURE}
)


def _build_webhook(table: SectionReader) -> WebhookTarget | None:
    return table.make(lambda url, on=(): WebhookTarget(url=url, on=on or tuple(Delivery)))


_WEBHOOK = section(
    "webhooks",
    _build_webhook,
    url=FieldSpec(_URL, required=True),
    on=ListKind(_ON, single=True),
)


WEBHOOKS = ListKind(either(_URL, lambda url: WebhookTarget(url=url), _WEBHOOK), single=True)


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
