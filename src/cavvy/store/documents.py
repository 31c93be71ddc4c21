"""Documents as JSON, times as microseconds, and text that every database accepts; used by all
stores.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import isfinite

import msgspec

from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, Job, Node, PlanState, RunOrigin, StopCause
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money
from cavvy.store.base import HashMismatch

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRest:
    """The fields of a job that no query asks for."""

    stop_cause: StopCause | None = None
    consented: bool = False
    ceiling: Money | None = None
    retries: dict[str, int] = field(default_factory=dict)
    avoid: dict[str, datetime] = field(default_factory=dict)
    standbys: tuple[int, ...] = ()
    numbered: int = 0
    plan_state: PlanState | None = None
    held_until: datetime | None = None
    last_run: str | None = None


_encoder = msgspec.json.Encoder()
decode_task = msgspec.json.Decoder(Task).decode
decode_origin = msgspec.json.Decoder(RunOrigin).decode
decode_rest = msgspec.json.Decoder(JobRest).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_node = msgspec.json.Decoder(Node).decode
decode_devices = msgspec.json.Decoder(tuple[str, ...]).decode


def encode(document: object) -> str:
    """JSON text of a domain object."""
    return _encoder.encode(document).decode()


def to_micros(time: datetime) -> int:
    """Microseconds since 1970, exact."""
    return (time - _EPOCH) // _MICROSECOND


def to_time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def rest_of(job: Job) -> JobRest:
    return JobRest(
        stop_cause=job.stop_cause,
        consented=job.consented,
        ceiling=job.ceiling,
        retries=job.retries,
        avoid=job.avoid,
        standbys=job.standbys,
        numbered=job.numbered,
        plan_state=job.plan_state,
        held_until=job.held_until,
        last_run=job.last_run,
    )


def plain(text: str) -> str:
    """Text without what a database column cannot hold (NUL, lone surrogates); agents send any
    bytes.
    """
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def storable_job(job: Job) -> Job:
    """The job as a read will give it back, one version on. Raises HashMismatch where its task could
    not be read again.
    """
    stop = job.stop_reason if job.stop_reason is None else plain(job.stop_reason)
    return replace(job, reason=plain(job.reason), stop_reason=stop, version=job.version + 1)


def storable_attempt(attempt: Attempt) -> Attempt:
    return replace(attempt, reason=plain(attempt.reason), version=attempt.version + 1)


def storable_node(node: Node) -> Node:
    """The node one version on; JSON has no NaN or infinity, so such a measurement becomes text
    or is left out.
    """
    telemetry, progress = node.telemetry, node.progress
    if not all(map(isfinite, telemetry.values())):
        telemetry = {name: value for name, value in telemetry.items() if isfinite(value)}
    if any(isinstance(value, float) and not isfinite(value) for value in progress.values()):
        progress = {
            name: str(value) if isinstance(value, float) and not isfinite(value) else value
            for name, value in progress.items()
        }
    return replace(
        node,
        telemetry=telemetry,
        progress=progress,
        exit_reason=plain(node.exit_reason),
        version=node.version + 1,
    )


def storable_event(event: Event, event_id: int) -> Event:
    return replace(event, text=plain(event.text), id=event_id)


def check_readable(job: Job) -> tuple[str, str]:
    """JSON of the job's task and origin, proven to be readable. Raises HashMismatch."""
    try:
        task, origin = encode(job.task), encode(job.origin)
        decode_task(task)
        decode_origin(origin)
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise HashMismatch(
            f"job {job.name}: its task cannot be stored ({error}); "
            "numbers must be finite and text must be valid Unicode"
        ) from error
    return task, origin
