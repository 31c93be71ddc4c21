"""What bounds a task and what is done about its failures: `limits`, `retry` and `checkpoint`."""

import re
from datetime import datetime, timedelta

from cavvy.domain.tasks import CheckpointPolicy, Limits, Retry
from cavvy.domain.units import Money, UnitError, format_duration, parse_memory_mib, parse_usd
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    EitherKind,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    filled,
    read_text,
    text_kind,
    whole,
)
from cavvy.spec.fields.times import TIME_WORDS, length_kind, read_length, read_time
from cavvy.spec.fields.urls import read_target
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode


def _read_deadline(node: ScalarNode) -> datetime | timedelta:
    text = read_text(node).strip()
    try:
        length = read_length(node)
    except (UnitError, WrongValue):
        if re.search(r"\d{4}-|\d:\d", text):
            return read_time(text)
        raise
    if length <= timedelta(0):
        raise WrongValue("a deadline of no length would end the job at once")
    return length


_LENGTH = length_kind()
_TEXT_OR_NUMBER = {"type": ["string", "number"]}
_MONEY: ScalarKind[Money] = ScalarKind(
    words="an amount of US dollars such as 25 or $2.50",
    parse=lambda node: parse_usd(read_text(node)),
    schema=_TEXT_OR_NUMBER,
)

# limits

DEADLINE = FieldSpec(
    name="deadline",
    kind=ScalarKind(
        words=f"{TIME_WORDS}; or a length of time from the submission such as 8h",
        parse=_read_deadline,
        schema=_TEXT_OR_NUMBER,
    ),
    help="When the job is stopped, finished or not: a time with its zone, or a length counted from "
    "the submission.",
    example="deadline: 8h",
    default="none",
)
DURATION = FieldSpec(
    name="duration",
    kind=_LENGTH,
    help="How long the job may run, over all its attempts.",
    example="duration: 6h",
    default="no limit",
)
BUDGET = FieldSpec(
    name="budget",
    kind=_MONEY,
    help="The most that the job may cost, in US dollars. It is stopped, with its grace, before it "
    "costs more. "
    "A budget also stands for the consent that a paid offer needs where there is no terminal.",
    example="budget: 25",
    default="no limit",
)
IDLE = FieldSpec(
    name="idle",
    kind=length_kind(timedelta(seconds=10)),
    help="How long the job may neither print nor use a CPU before it is stopped.",
    example="idle: 30m",
    default="no limit",
)
UNATTENDED = FieldSpec(
    name="unattended",
    kind=length_kind(timedelta(seconds=10)),
    help="How long a node works on without hearing from the control plane before it checkpoints "
    "and ends itself.",
    example="unattended: 12h",
    default="6h",
)


def _build_limits(table: SectionReader) -> Limits:
    deadline = table.get(DEADLINE)
    at = deadline if isinstance(deadline, datetime) else None
    after = deadline if isinstance(deadline, timedelta) else None
    duration, budget = table.get(DURATION), table.get(BUDGET)
    now = table.notes.now
    if at is not None and now is not None and at <= now:
        table.wrong(
            DEADLINE, f"the deadline was {format_duration(now - at)} ago", expected="a time to come"
        )
    if after is not None and duration is not None and duration > after:
        message = (
            f"the duration ({format_duration(duration)}) reaches beyond the deadline "
            f"({format_duration(after)})"
        )
        table.wrong(DURATION, message, suggestion="lower it, or leave it out")
    if budget == Money(0):
        table.wrong(
            BUDGET, "a budget of nothing stops every job", suggestion="leave it out for no limit"
        )
    return Limits(
        deadline=at,
        deadline_after=after,
        duration=duration,
        budget=budget,
        idle=table.get(IDLE),
        unattended=table.get(UNATTENDED, Limits().unattended),
    )


LIMITS = SectionSpec(
    path="limits",
    help="Where Cavvy must stop.",
    fields=(DEADLINE, DURATION, BUDGET, IDLE, UNATTENDED),
    build=_build_limits,
    hints={
        "max_duration": "write `duration`",
        "timeout": "write `duration`",
        "walltime": "write `duration`",
        "max_cost": "write `budget`",
        "cost": "write `budget`",
        "max_price": "write `max_price` under `resources` (per hour), or `budget` here (in all)",
        "idle_duration": "write `idle`",
        "idle_timeout": "write `idle`",
        "idle_minutes": "write `idle`, as in `idle: 30m`",
        "idle_minutes_to_autostop": "write `idle`, as in `idle: 30m`",
    },
)

# retry


def _read_tries(node: ScalarNode) -> int:
    if node.text in ("unlimited", "always", "forever"):
        return -1
    return _TRIES_NUMBER.parse(node)


_TRIES_NUMBER = whole(0, 1_000_000)
_TRIES: ScalarKind[int] = ScalarKind(
    words="a number of tries, or `unlimited`",
    parse=_read_tries,
    schema={
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 1_000_000},
            {"const": "unlimited"},
            EXPRESSION,
        ]
    },
)
PREEMPTION = FieldSpec(
    name="preemption",
    kind=_TRIES,
    help="Times to start again after capacity was taken back.",
    example="preemption: 10",
    default="unlimited",
)
NODE = FieldSpec(
    name="node",
    kind=_TRIES,
    help="Times to start again after a node broke or was lost.",
    example="node: 3",
    default="3",
)
EXIT = FieldSpec(
    name="exit",
    kind=_TRIES,
    help="Times to start again after the program failed.",
    example="exit: 2",
    default="0",
)
EXIT_CODES = FieldSpec(
    name="exit_codes",
    kind=ListKind(item=whole(1, 255, "an exit code from 1 to 255"), single=True),
    help="The exit codes after which `exit` starts again.",
    example="exit_codes: [1, 137]",
    default="any but 0",
)
DELAY = FieldSpec(
    name="delay",
    kind=length_kind(timedelta(0), timedelta(hours=1)),
    help="How long to wait before the first new try of a kind; doubled with each, up to an hour.",
    example="delay: 30s",
    default="0",
)
PARALLEL = FieldSpec(
    name="parallel",
    kind=whole(1, 8, "a number of places, from 1 to 8"),
    help="Places that are tried at the same time; the first to be ready gets the work, the others "
    "are given back.",
    example="parallel: 3",
    default="1",
)


def _build_retry(table: SectionReader) -> Retry:
    plain = Retry()

    def tries(field: FieldSpec[int], default: int | None) -> int | None:
        value = table.get(field)
        return default if value is None else None if value < 0 else value

    codes = table.get(EXIT_CODES, ())
    exits = tries(EXIT, plain.exit)
    if codes and exits == 0:
        hint = "write `exit: 3` or so as well"
        table.wrong(
            EXIT_CODES, "exit codes are named but `exit` allows no new try", suggestion=hint
        )
    return Retry(
        preemption=tries(PREEMPTION, plain.preemption),
        node=tries(NODE, plain.node),
        exit=exits,
        exit_codes=codes,
        delay=table.get(DELAY, plain.delay),
        parallel=table.get(PARALLEL, plain.parallel),
    )


RETRY = SectionSpec(
    path="retry",
    help="How often each kind of failure is tried again: a number, or `unlimited`.",
    fields=(PREEMPTION, NODE, EXIT, EXIT_CODES, DELAY, PARALLEL),
    build=_build_retry,
    hints={
        "max_restarts_on_errors": "write `exit`",
        "recover_on_exit_codes": "write `exit_codes`",
        "on_events": "write `preemption`, `node` and `exit`, each with a number",
        "attempts": "write `preemption`, `node` and `exit`, each with a number",
        "max_attempts": "write `exit`",
        "backoff": "write `delay`",
    },
)

# checkpoint


def inner_path(text: str) -> str:
    """A path within the working folder. Raises WrongValue."""
    path = filled(text).strip().rstrip("/") or "/"
    if path.startswith(("/", "~")):
        raise WrongValue(
            f"{shown(text)} is not within the working folder", suggestion="write a relative path"
        )
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise WrongValue(
            f"{shown(text)} leads out of the working folder", suggestion="write a path without .."
        )
    if not parts:
        raise WrongValue(
            f"{shown(text)} is the working folder itself", suggestion="name a folder in it"
        )
    if _SCHEME_LIKE.match(path):
        raise WrongValue(
            f"{shown(text)} is a URL",
            suggestion="name a folder; Cavvy keeps it where it outlives the node",
        )
    return "/".join(parts)


_SCHEME_LIKE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_INNER = text_kind("a folder within the working folder such as checkpoints", inner_path)
PATH = FieldSpec(
    name="path",
    kind=_INNER,
    help="The folder, within the working folder.",
    example="path: checkpoints",
    required=True,
)
_LENGTH = length_kind(timedelta(seconds=1))
_AUTO = "auto"
EVERY: FieldSpec[timedelta | str] = FieldSpec(
    name="every",
    kind=ScalarKind(
        words=f"{_LENGTH.words}, or auto",
        parse=lambda node: _AUTO if node.text.strip() == _AUTO else _LENGTH.parse(node),
        schema=_LENGTH.schema,
    ),
    help="How often the program means to write one; it is told so as CAVVY_CHECKPOINT_EVERY_S, "
    "and plans count with it. `auto`: Cavvy chooses, from what a checkpoint is measured to cost "
    "and how often nodes "
    "of that market are lost, and tells the program when it changes.",
    example="every: 10m",
)


def _read_size(node: ScalarNode) -> int:
    size = parse_memory_mib(read_text(node))
    if size <= 0:
        raise WrongValue(f"{shown(node.text)} is no size")
    return size


SIZE = FieldSpec(
    name="size",
    kind=ScalarKind(
        words="a size such as 12GB", parse=_read_size, schema={"type": ["string", "number"]}
    ),
    help="How large one checkpoint is expected to be: plans then say whether it can be saved "
    "within the notice that a "
    "place gives before it takes a node back.",
    example="size: 12GB",
)
STEP = FieldSpec(
    name="step",
    kind=length_kind(timedelta(milliseconds=1)),
    help="How long the work takes from one place where it can save to the next, such as a step of "
    "training: plans add "
    "it to the time that the checkpoint takes when they say whether it fits into a notice.",
    example="step: 2s",
)


def _bucket(text: str) -> str:
    """Raises WrongValue."""
    url = read_target(text)
    if not url.startswith(("s3://", "gs://", "az://")):
        raise WrongValue(
            f"{shown(text)} is no bucket",
            suggestion="leave `storage` out to keep them at the server",
        )
    return url


STORAGE = FieldSpec(
    name="storage",
    kind=text_kind("a bucket's URL such as s3://bucket/checkpoints", _bucket),
    help="Where checkpoints are kept: a folder of a bucket, which nodes write to by signed "
    "requests. Its keys are the "
    "server's or the project's secrets, as for inputs.",
    example="storage: s3://bucket/checkpoints",
    default="the server's own folder",
)


def _build_checkpoint(table: SectionReader) -> CheckpointPolicy | None:
    path, every, size = table.get(PATH), table.get(EVERY), table.get(SIZE)
    if path is None:
        return None
    length = None if every is None or isinstance(every, str) else every
    auto = every is not None and length is None
    step, storage = table.get(STEP), table.get(STORAGE)
    return CheckpointPolicy(
        path=path, every=length, storage=storage, size_mib=size, step=step, auto=auto
    )


CHECKPOINT_TABLE = SectionSpec(
    path="checkpoint",
    help="A folder that outlives an attempt, and how often it is written.",
    fields=(PATH, EVERY, SIZE, STEP, STORAGE),
    build=_build_checkpoint,
    hints={"dir": "write `path`", "folder": "write `path`", "interval": "write `every`"},
)
_CHECKPOINT_TEXT: ScalarKind[CheckpointPolicy | None] = ScalarKind(
    words=_INNER.words,
    parse=lambda node: CheckpointPolicy(path=_INNER.parse(node)),
    schema=_INNER.schema,
)
CHECKPOINT: EitherKind[CheckpointPolicy | None] = EitherKind(
    kinds=(_CHECKPOINT_TEXT, CHECKPOINT_TABLE)
)
