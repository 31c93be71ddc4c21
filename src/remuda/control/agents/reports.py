"""What an agent's messages mean for the rows of its node, and what its user is told. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from remuda.control.agents.checkpoints import describe, say_size
from remuda.domain.events import Event
from remuda.domain.jobs import Attempt, Job, Node, NodePhase, Outcome
from remuda.domain.messages import Message, MessageKind

_ENDS = frozenset(
    {Outcome.SUCCEEDED, Outcome.EXIT, Outcome.SETUP, Outcome.PREEMPTED, Outcome.STOPPED, Outcome.LIMIT, Outcome.NODE}
)  # what an agent can know


@dataclass(slots=True)
class Report:
    """The rows after some messages. `moved`: the reconciler should look at once."""

    job: Job
    attempt: Attempt
    node: Node
    events: list[Event] = field(default_factory=list)
    moved: bool = False


def apply_messages(job: Job, attempt: Attempt, node: Node, messages: Sequence[Message], now: datetime) -> Report:
    """Apply the messages that follow on the last one applied, in order, each once."""
    report = Report(job=job, attempt=attempt, node=node)
    for message in sorted(messages, key=lambda item: item.seq):
        if message.seq == report.node.last_seq + 1:
            _apply(report, message, now)
            report.node = replace(report.node, last_seq=message.seq, heard_at=now)
    return report


def _apply(report: Report, message: Message, now: datetime) -> None:
    node = report.node
    at = _plausible(message.at, node, now)
    if node.phase is NodePhase.EXITED:
        return
    match message.kind:
        case MessageKind.SETUP:
            report.node = replace(node, phase=NodePhase.SETUP)
            _tell(report, at, "setup", "the setup began")
        case MessageKind.RUNNING:
            report.node = replace(node, phase=NodePhase.RUNNING, running_at=at)
            report.moved = True
            if message.setup_reused:
                _tell(report, at, "setup", "a finished setup was used again")
        case MessageKind.PROGRESS:
            report.node = replace(node, progress={**node.progress, **message.values})
        case MessageKind.TELEMETRY:
            values = {name: value for name, value in message.values.items() if isinstance(value, (int, float))}
            report.node = replace(node, telemetry=values)
        case MessageKind.CHECKPOINT:
            newest = message.newest_at or at
            report.attempt = replace(report.attempt, checkpoint_at=min(newest, now))
            _tell(report, at, "checkpoint", _checkpoint(message))
        case MessageKind.NOTICE:
            seconds = message.seconds or 0.0
            report.node = replace(node, notice_until=now + timedelta(seconds=seconds))
            report.moved = True
            source = f" ({message.source})" if message.source else ""
            _tell(report, at, "notice", f"the place takes this node away in {seconds:.0f} s{source}")
        case MessageKind.EVENT:
            _tell(report, at, message.name or "note", message.text)
        case MessageKind.EXITED:
            _exited(report, message, at)


def _checkpoint(message: Message) -> str:
    size = describe(message.files, message.bytes)
    if message.number is None:
        return f"a checkpoint is complete: {size}"
    seconds = message.seconds or 0.0
    rate = f", {say_size(message.sent / seconds)}/s" if seconds > 0 and message.sent else ""
    return f"checkpoint {message.number} is safe: {size}; {say_size(message.sent)} sent in {seconds:.1f} s{rate}"


def _exited(report: Report, message: Message, at: datetime) -> None:
    outcome = message.outcome if message.outcome in _ENDS else Outcome.NODE
    reason = message.reason or f"exit code {message.exit_code}"
    report.node = replace(
        report.node,
        phase=NodePhase.EXITED,
        exit_code=message.exit_code,
        exit_outcome=outcome,
        exit_reason=reason,
        exited_at=at,
    )
    report.moved = True
    _tell(report, at, "exited", reason)


def _plausible(at: datetime, node: Node, now: datetime) -> datetime:
    """The node's own time, kept between its claim and now, since its clock may be wrong."""
    return min(now, max(at, node.claimed_at or at))


def _tell(report: Report, at: datetime, kind: str, text: str) -> None:
    report.events.append(
        Event(
            project=report.attempt.project,
            job_id=report.attempt.job_id,
            attempt=report.attempt.number,
            rank=report.node.rank,
            at=at,
            kind=kind,
            text=text,
        )
    )
