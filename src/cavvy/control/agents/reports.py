"""Applies agents' messages to the rows of their nodes, and creates the events that users see. The
module does no I/O."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import assert_never

from cavvy.agent.documents import say_files, say_size
from cavvy.control.decide.failures import STILL
from cavvy.costs.extras import bound_upload
from cavvy.domain.events import Event
from cavvy.domain.figures import (
    MOST_NAMES,
    FigureBlock,
    FigureColumns,
    StepExample,
    StepSeries,
    StepValues,
)
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    FailureKind,
    JobRecord,
    Node,
    NodePhase,
    SentData,
    SentKind,
    StackReport,
    UnsafeFile,
)
from cavvy.domain.messages import AgentMessage, MessageKind
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, field, replace

_ENDS = frozenset(
    {
        AttemptOutcome.SUCCEEDED,
        AttemptOutcome.EXIT,
        AttemptOutcome.SETUP,
        AttemptOutcome.PREEMPTED,
        AttemptOutcome.STOPPED,
        AttemptOutcome.LIMIT,
        AttemptOutcome.NODE,
    }
)  # outcomes that an agent can report
# The failures that an agent can report.
_FAILURES = frozenset({FailureKind.GPU, FailureKind.LINK, FailureKind.NETWORK, FailureKind.PROGRAM})
# Messages of these kinds change a rank's state, so they are applied even if some of their fields
# cannot be read. A message of any other kind is refused if one of its fields cannot be read.
_NEEDED = frozenset(
    {MessageKind.SETUP, MessageKind.RUNNING, MessageKind.CHECKPOINT, MessageKind.EXITED}
)
_REFUSALS_TOLD = 20  # maximum refusal events per rank; more are only counted
_MOST_TOLD_BYTES = (
    16 << 20
)  # maximum bytes of one rank's events; later events are dropped to save disk space
_EVENT_BYTES = 200  # bytes of a stored event without its text
_MOST_FIGURES = 256  # maximum number of names in a rank's progress
_LONGEST_WARNING = 1000  # characters of a warning that an attempt keeps
_LONGEST_PARAM = 500  # characters of a setting that a program reports
_MOST_ROWS = 5000  # of values of steps in a message
_LARGEST = 1e100  # of a value or step, so that sums and squares of them are numbers, too
_MOST_PROCESSES = 1024  # of a node, whose values of steps are told apart
_MOST_EXAMPLE = 1 << 20  # bytes of a picture or the like
_OLDEST_MS = 30 * 86_400_000  # age of a value that waited for its message
_LONGEST_PLACE = 200  # characters of a place in a stack
_LONGEST_NAME, _MOST_GROUPS = 100, 4  # of the collectives that a rank has called last
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_STEP_MS = 86_400_000  # one day in ms; a longer step is not plausible
Figures = dict[str, float | str]
ADVICE = "advice"  # kind of events which report that a node is at risk
UNSAFE = "unsafe"  # kind of events which report that files may be lost


class ReportOutcome(Struct):
    """The rows that result from applying an agent's messages. If `moved` is set, the reconciler
    should run immediately.
    """

    job: JobRecord
    attempt: Attempt
    node: Node
    events: list[Event] = field(default_factory=list)
    figures: list[FigureBlock] = field(default_factory=list)
    steps: list[StepValues] = field(default_factory=list)
    moved: bool = False
    saved: bool = False  # whether a checkpoint has become complete


def apply_messages(
    job: JobRecord,
    attempt: Attempt,
    node: Node,
    messages: Sequence[AgentMessage],
    now: datetime,
    *,
    skips: bool = False,
) -> ReportOutcome:
    """Apply the messages that follow the last applied message, in order and once each. If messages
    are missing, the messages after the gap are applied only if `skips` is set. The caller sets
    `skips` when the missing messages are permanently lost.

    If a message cannot be applied, an event reports the refusal, and the later messages are still
    applied.
    """
    report = ReportOutcome(job=job, attempt=attempt, node=node)
    for message in sorted(messages, key=lambda item: item.seq):
        follows = message.seq - report.node.last_seq
        if follows == 1 or (skips and follows > 1):
            rows, told = (report.attempt, report.node), len(report.events)
            try:
                if not message.fault or message.kind in _NEEDED:
                    _apply(report, message, now)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                report.attempt, report.node = rows
                del report.events[told:]
                message = replace(message, fault=f"{type(error).__name__}: {error}")
            if message.fault:
                _refuse(report, message, now)
            _bound_events(report, told, message, now)
            report.node = replace(report.node, last_seq=message.seq, heard_at=now)
    return report


def note_clock(node: Node, sent_at: datetime | None, now: datetime) -> Node:
    """Return the node with the difference of its clock from the server's. A request that was sent
    at `sent_at` by the node's clock shows the most that the difference can be, because it may have
    taken long. If it was sent before the last one, the clock was set back.
    """
    if sent_at is None:
        return node
    behind, known = (now - sent_at).total_seconds(), node.clock_behind_s
    if known is not None and node.clock_at is not None and sent_at >= node.clock_at:
        behind = min(behind, known)
    return replace(node, clock_behind_s=behind, clock_at=sent_at)


def _bound_events(report: ReportOutcome, told: int, message: AgentMessage, now: datetime) -> None:
    """If the rank has caused too many events, drop the events of this message, which begin at index
    `told`. The event for the rank's exit is always recorded.
    """
    before, new = report.node.told_bytes, report.events[told:]
    after = before + sum(_EVENT_BYTES + len(event.text.encode()) for event in new)
    report.node = replace(report.node, told_bytes=after)
    if after > _MOST_TOLD_BYTES and message.kind != MessageKind.EXITED:
        del report.events[told:]
        if before <= _MOST_TOLD_BYTES:
            tell(
                report,
                now,
                "refused",
                "this rank has sent too many events; further events are dropped",
            )


def _refuse(report: ReportOutcome, message: AgentMessage, now: datetime) -> None:
    count = report.node.refused + 1
    report.node = replace(report.node, refused=count)
    if count <= _REFUSALS_TOLD:
        kind = message.kind[:20] or "unknown"
        text = f"an agent's message ({kind}) was refused or only partly used: {message.fault[:300]}"
        if count == _REFUSALS_TOLD:
            text += "; further refused messages get no event"
        tell(report, now, "refused", text)


def _apply(report: ReportOutcome, message: AgentMessage, now: datetime) -> None:
    at = _plausible(message.at, report.node, now)
    handler = _HANDLERS.get(message.kind)
    if report.node.phase is not NodePhase.EXITED and handler is not None:
        handler(report, message, at, now)


def _preparing(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    report.node = replace(report.node, setup_from=message.log_bytes)


def _setup(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    report.node = replace(report.node, phase=NodePhase.SETUP)
    tell(report, at, "setup", "the setup began")


def _running(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    known = report.node.setup_from is not None  # older agents do not say where the setup ends
    report.node = replace(
        report.node,
        phase=NodePhase.RUNNING,
        running_at=at,
        setup_to=message.log_bytes if known else None,
    )
    report.moved = True
    if message.setup_reused:
        tell(report, at, "setup", "skipped the setup: this node has done the same one")


def _progress(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    before = report.node.progress
    report.node = replace(report.node, progress=_merged(before, message.values))
    if report.node.progress != before:
        _note_progress(report)


def _telemetry(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    numbers = {
        name: value for name, value in message.values.items() if isinstance(value, int | float)
    }
    report.node = replace(report.node, telemetry=numbers)


def _minute(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    # The agent cuts `at` to milliseconds and rounds `seconds`, so their difference may lie just
    # before the minute that was measured.
    began = int(at.timestamp() - (message.seconds or 0.0) + 0.5) // 60
    claimed = report.node.claimed_at or report.attempt.created_at
    began = max(began, int(claimed.timestamp()) // 60)
    known = sorted(message.figures.items())[:MOST_NAMES]
    if known:
        columns = {
            name: FigureColumns(low=[low], mean=[mean], high=[high])
            for name, (low, mean, high) in known
        }
        node = report.node
        report.figures.append(
            FigureBlock(
                attempt_id=node.attempt_id, rank=node.rank, minutes=[began], columns=columns
            )
        )


def _points(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    series, left = [], _MOST_ROWS
    for each in message.series:
        names = [name[:_LONGEST_NAME] for name in each.names[:_MOST_FIGURES]]
        rows = [row for row in each.rows[:left] if names and _is_row(row, len(names))]
        left -= len(rows)
        if rows:
            process = min(max(each.process, 0), _MOST_PROCESSES - 1)
            series.append(StepSeries(names, rows, process, each.odd))
    params = {
        name[:_LONGEST_NAME]: text[:_LONGEST_PARAM]
        for name, text in [*message.params.items()][:_MOST_FIGURES]
        if name
    }
    examples = [each for each in message.examples if _is_example(each)]
    if series or params or examples:
        node = report.node
        report.steps.append(
            StepValues(
                attempt_id=node.attempt_id,
                rank=node.rank,
                at=at,
                number=message.seq,
                series=series,
                params=params,
                examples=examples,
            )
        )


def _is_example(example: StepExample) -> bool:
    """Whether an example has a name, and numbers that can be stored."""
    return (
        0 < len(example.name) <= _LONGEST_NAME
        and 0 <= example.age_ms <= _OLDEST_MS
        and (example.step is None or abs(example.step) <= _LARGEST)
        and 0 <= example.process < _MOST_PROCESSES
        and len(example.data) <= _MOST_EXAMPLE
    )


def _is_row(row: Sequence[float | None], names: int) -> bool:
    """Whether a row has a step or None, an age and so many values, all of them numbers that can be
    stored, encoded and added up."""
    known = [abs(each) for each in row if each is not None]
    age = row[1] if len(row) == names + 2 else None
    return age is not None and 0 <= age <= _OLDEST_MS and all(each <= _LARGEST for each in known)


def _stacks(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    stacks = tuple(
        replace(
            each,
            place=each.place[:_LONGEST_PLACE],
            call=each.call[:_LONGEST_PLACE],
            collectives=tuple(
                replace(last, group=last.group[:_LONGEST_NAME], call=last.call[:_LONGEST_NAME])
                for last in each.collectives[:_MOST_GROUPS]
                if 0 <= last.number < 1 << 60
            ),
        )
        for each in message.stacks
    )
    report.node = replace(
        report.node,
        stacks=StackReport(
            at=now,
            stacks=stacks,
            moved=message.moved,
            deadlocked=message.deadlocked,
            text=message.text[:300],
        ),
    )
    report.moved = True


def _note_progress(report: ReportOutcome) -> None:
    """Let the work count as making progress until the next telemetry."""
    telemetry = report.node.telemetry
    if telemetry.get(STILL, 0):
        report.node = replace(report.node, telemetry={**telemetry, STILL: 0})


def _saved(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    newest = at if message.newest_at is None else _correct(message.newest_at, report.node)
    newest = min(max(newest, _EARLIEST), now).astimezone(UTC)
    report.attempt = _measured(replace(report.attempt, checkpoint_at=newest), message)
    if message.number is not None:  # otherwise, the files were copied to a folder
        _add_sent(report, now, SentKind.CHECKPOINTS, message.sent)
    report.saved = True
    known = report.attempt.unsafe
    if message.text or (known and known.rank == report.node.rank):
        _note_unsafe(report, message.text, at)
    tell(report, at, "checkpoint", _checkpoint(message))


def _uploaded(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    if message.number is None or not 0 <= message.number < len(report.job.task.outputs):
        raise ValueError(f"the task has no output {message.number}")
    _add_sent(report, now, SentKind.OUTPUT, message.sent, message.number)


def _add_sent(
    report: ReportOutcome, now: datetime, kind: SentKind, sent: int, output: int = 0
) -> None:
    """Count bytes that the node has sent. Bytes that cannot be true are not counted: a node cannot
    have sent more in total than its network can carry in the time since the node was claimed.
    """
    node = report.node
    most = bound_upload(now - (node.claimed_at or report.attempt.created_at))
    counted = min(sent, most - sum(each.bytes for each in node.sent))
    if counted <= 0:
        return
    keys = [(each.kind, each.output) for each in node.sent]
    if (kind, output) not in keys:
        new = SentData(kind=kind, output=output, bytes=counted)
        report.node = replace(node, sent=(*node.sent, new))
        return
    index = keys.index((kind, output))
    known = replace(node.sent[index], bytes=node.sent[index].bytes + counted)
    report.node = replace(node, sent=(*node.sent[:index], known, *node.sent[index + 1 :]))


def _notice(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    seconds = message.seconds or 0.0
    report.node = replace(report.node, notice_until=now + timedelta(seconds=seconds))
    report.moved = True
    source = f" ({message.source})" if message.source else ""
    tell(report, at, "notice", f"the provider will reclaim this node in {seconds:.0f} s{source}")


def _event(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    if message.name == ADVICE:
        report.node = replace(report.node, risk_at=report.node.risk_at or at)
        report.moved = True
    if message.name == UNSAFE:
        _note_unsafe(report, message.text, at)
    tell(report, at, message.name or "note", message.text)


def _note_unsafe(report: ReportOutcome, text: str, at: datetime) -> None:
    """Keep the newest warning about files that may be lost, if any, with when it first came."""
    known, reason = report.attempt.unsafe, text[:_LONGEST_WARNING]
    if known is None or known.reason != reason:
        new = UnsafeFile(at=at, rank=report.node.rank, reason=reason) if reason else None
        report.attempt = replace(report.attempt, unsafe=new)


def _merged(old: Figures, new: Figures) -> Figures:
    if len(figures := {**old, **new}) > _MOST_FIGURES:
        raise ValueError(f"more than {_MOST_FIGURES} names of progress values")
    return figures


def _measured(attempt: Attempt, message: AgentMessage) -> Attempt:
    """Return the attempt with the checkpoint sizes and times that this message reports. Values that
    the message does not report stay unchanged."""
    cost, rate = message.cost_s, _rate(message)
    return replace(
        attempt,
        checkpoint_bytes=message.bytes,
        checkpoint_cost=timedelta(seconds=cost)
        if cost is not None and cost >= 0
        else attempt.checkpoint_cost,
        checkpoint_rate=rate or attempt.checkpoint_rate,
    )


def _rate(message: AgentMessage) -> float | None:
    """Return the bytes sent per second, or None if nothing was sent or the time is unknown."""
    if not message.seconds or not message.sent:
        return None
    rate = message.sent / message.seconds
    return rate if isfinite(rate) else None


def _checkpoint(message: AgentMessage) -> str:
    size, seconds, speed = (
        say_files(message.files, message.bytes),
        message.seconds or 0.0,
        _rate(message),
    )
    rate = f", {say_size(speed)}/s" if speed else ""
    if message.number is None:
        took = f"; {say_size(message.sent)} written in {seconds:.1f} s{rate}" if speed else ""
        return f"a checkpoint is complete: {size}{took}"
    return (
        f"checkpoint {message.number} is safe: the checkpoint is complete with {size}; "
        f"{say_size(message.sent)} sent in {seconds:.1f} s{rate}"
    )


def find_target(task: TaskSpec, sent: SentData) -> str | None:
    """Return the URL of the storage to which these data were sent, or None if they were sent to the
    server."""
    match sent.kind:
        case SentKind.CHECKPOINTS:
            return task.checkpoint.storage if task.checkpoint is not None else None
        case SentKind.OUTPUT:
            return task.outputs[sent.output].target
        case SentKind.LOG:
            return None
    assert_never(sent.kind)


def step_of(job: JobRecord, node: Node) -> timedelta:
    """Return the duration of one step of the work: the reported duration, otherwise the duration
    that the task declares, otherwise zero.
    """
    said = node.progress.get("step_ms")
    if isinstance(said, (int, float)) and 0 < said < _LONGEST_STEP_MS:
        return timedelta(milliseconds=said)
    return (job.task.checkpoint.step if job.task.checkpoint is not None else None) or timedelta(0)


def _exited(report: ReportOutcome, message: AgentMessage, at: datetime, now: datetime) -> None:
    outcome = next((end for end in _ENDS if end == message.outcome), AttemptOutcome.NODE)
    failure = next((kind for kind in _FAILURES if kind == message.failure), None)
    reason = message.reason or f"exit code {message.exit_code}"
    _add_sent(report, now, SentKind.LOG, message.log_bytes)
    report.node = replace(
        report.node,
        phase=NodePhase.EXITED,
        exit_code=message.exit_code,
        exit_outcome=outcome,
        exit_reason=reason,
        exit_failure=failure,
        exited_at=at,
    )
    report.moved = True
    fact = outcome if failure is FailureKind.PROGRAM else failure or outcome
    tell(report, at, "exited", reason, fact)


# The handler of each kind of message. Unknown kinds come from newer agents and are ignored.
_HANDLERS: Mapping[str, Callable[[ReportOutcome, AgentMessage, datetime, datetime], None]] = {
    MessageKind.PREPARING: _preparing,
    MessageKind.SETUP: _setup,
    MessageKind.RUNNING: _running,
    MessageKind.PROGRESS: _progress,
    MessageKind.TELEMETRY: _telemetry,
    MessageKind.MINUTE: _minute,
    MessageKind.POINTS: _points,
    MessageKind.STACKS: _stacks,
    MessageKind.CHECKPOINT: _saved,
    MessageKind.UPLOAD: _uploaded,
    MessageKind.NOTICE: _notice,
    MessageKind.EVENT: _event,
    MessageKind.EXITED: _exited,
}


def _plausible(at: datetime, node: Node, now: datetime) -> datetime:
    """Return the time `at` of the node's clock as a time of the server's clock, limited to the
    range from the node's claim, or the start of its work, to now. The start may have been corrected
    by the difference that a slow request showed, and work never ends before it starts.
    """
    began = node.running_at or node.claimed_at or _EARLIEST
    return min(now, max(_correct(at, node), began)).astimezone(UTC)


def _correct(at: datetime, node: Node) -> datetime:
    """Return the time `at` of the node's clock as a time of the server's clock."""
    try:
        return max(at, _EARLIEST) + timedelta(seconds=node.clock_behind_s or 0.0)
    except OverflowError:  # the clock is thousands of years off
        return at


def tell(
    report: ReportOutcome, at: datetime, kind: str, text: str, fact: str | None = None
) -> None:
    """Add an event about the rank that sent the message."""
    report.events.append(
        Event(
            project=report.attempt.project,
            job_id=report.attempt.job_id,
            attempt=report.attempt.number,
            rank=report.node.rank,
            at=at,
            kind=kind,
            fact=fact,
            text=text,
        )
    )
