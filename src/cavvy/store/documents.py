"""Conversions for all stores: documents to JSON, times to microseconds, and strings to strings that
every database can store.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any, TypedDict, get_type_hints

import msgspec

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, JobRecord, Node, RunOrigin
from cavvy.domain.machines import NamedMachine
from cavvy.domain.maintenance import NodeState, Reservation
from cavvy.domain.markets import Observation
from cavvy.domain.node_pools import NodePool
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.trusts import IssuerTrust
from cavvy.domain.values import replace
from cavvy.store.base import HashMismatch

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


# The fields of a job that have their own column. The first three never change. The task and the
# origin are stored in a separate table. The column `rest` contains all other fields as one
# document.
JOB_FIELDS = (
    "id",
    "project",
    "name",
    "user",
    "phase",
    "reason",
    "submitted_at",
    "since",
    "not_before",
    "attempt",
    "stop_reason",
    "exit_code",
    "ended_at",
    "array_id",
    "member",
    "version",
)
_rest = {
    name: hint
    for name, hint in get_type_hints(JobRecord).items()
    if name not in {*JOB_FIELDS, "task", "origin"}
}
# of JobRecord
_rest_fields: Any = TypedDict("_rest_fields", _rest, total=False)  # type: ignore[misc]

_encoder = msgspec.json.Encoder()
decode_task = msgspec.json.Decoder(TaskSpec).decode
decode_origin = msgspec.json.Decoder(RunOrigin).decode
decode_rest: Callable[[str], Any] = msgspec.json.Decoder(_rest_fields).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_machine = msgspec.json.Decoder(NamedMachine).decode
decode_reservation = msgspec.json.Decoder(Reservation).decode
decode_node_state = msgspec.json.Decoder(NodeState).decode
decode_pool = msgspec.json.Decoder(NodePool).decode
decode_trust = msgspec.json.Decoder(IssuerTrust).decode
decode_budget = msgspec.json.Decoder(SpendingBudget).decode
decode_policy = msgspec.json.Decoder(ProjectPolicy).decode
decode_node = msgspec.json.Decoder(Node).decode
decode_tags = msgspec.json.Decoder(dict[str, str]).decode
decode_devices = msgspec.json.Decoder(tuple[str, ...]).decode


def encode(document: object) -> str:
    """Return the JSON text of a domain object."""
    return _encoder.encode(document).decode()


def to_micros(time: datetime) -> int:
    """Return the time in whole microseconds since 1970. The conversion is exact."""
    return (time - _EPOCH) // _MICROSECOND


def to_time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def encode_rest(job: JobRecord) -> str:
    return encode({name: getattr(job, name) for name in _rest})


def plain(text: str) -> str:
    """Replace characters that a database column cannot hold (NUL, lone surrogates)."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def storable_job(job: JobRecord) -> JobRecord:
    """Return the job in the form in which the database will store it. The version is increased by
    1, and characters that the database cannot store are replaced.
    """
    stop = job.stop_reason if job.stop_reason is None else plain(job.stop_reason)
    return replace(job, reason=plain(job.reason), stop_reason=stop, version=job.version + 1)


def storable_attempt(attempt: Attempt) -> Attempt:
    wait = attempt.wait and replace(attempt.wait, said=plain(attempt.wait.said))
    return replace(attempt, reason=plain(attempt.reason), wait=wait, version=attempt.version + 1)


def storable_node(node: Node) -> Node:
    """Return the node in the form in which the database will return it. The version is one higher,
    and values that the database cannot store are replaced. JSON has no NaN or infinity, so such
    values become text in `progress` and are dropped from `telemetry`.
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


def storable_event(event: Event) -> Event:
    return replace(event, text=plain(event.text), id=0)


def storable_observation(seen: Observation) -> Observation:
    return replace(seen, text=plain(seen.text))


def check_readable(job: JobRecord) -> tuple[str, str]:
    """Return the JSON texts of the job's task and origin. Raises HashMismatch if these texts could
    not be read back."""
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
