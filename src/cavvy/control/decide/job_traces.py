"""The trace of an ended job, computed from its rows.

All ids are hashes of the job's id, so a trace that is sent twice is the same trace, and work can
name its span before the span is sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256

from cavvy.domain.events import Event
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptOutcome, AttemptPhase, JobPhase, JobRecord
from cavvy.domain.values import Struct, field, replace

_MOST_ATTEMPTS = 500  # the newest; and as many of their checkpoints
_CLOSED = frozenset({AttemptPhase.ENDED, AttemptPhase.KEPT})


class JobSpan(Struct, frozen=True, kw_only=True):
    """A span of a trace. `failed` says why it failed, or is "". `events` happened in its time."""

    trace_id: int
    span_id: int
    parent_id: int | None = None
    name: str
    begin: datetime
    end: datetime
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    failed: str = ""
    events: Sequence[Event] = ()


def find_run_span(job_id: str, attempt: int) -> tuple[int, int]:
    """Return the ids of the trace of a job and of the span of an attempt's work."""
    trace_id = _make_id(16, job_id)
    return trace_id, _make_id(8, trace_id, "run", attempt)


def write_traceparent(job_id: str, attempt: int) -> str:
    """Return the trace context of an attempt's work, as W3C Trace Context 1 writes it."""
    trace_id, span_id = find_run_span(job_id, attempt)
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def is_traceable(job: JobRecord, attempts: Iterable[Attempt]) -> bool:
    """Return whether the job has ended, and its nodes were removed or serve other jobs."""
    return job.phase in JOB_ENDS and all(each.phase in _CLOSED for each in attempts)


def trace_job(
    job: JobRecord, attempts: Sequence[Attempt], events: Sequence[Event]
) -> list[JobSpan]:
    """Return the spans of an ended job. After a retry, these are the spans since the retry."""
    spell = len(job.ended_spells)
    began = job.ended_spells[-1][1] if spell else job.submitted_at
    ended = job.ended_at or job.since
    root = JobSpan(
        trace_id=_make_id(16, job.id),
        span_id=_make_id(8, _make_id(16, job.id), "job", spell),
        name="job",
        begin=began,
        end=max(began, ended),
        attributes={
            "cavvy.project": job.project,
            "cavvy.job.id": job.id,
            "cavvy.job.name": job.name,
            "cavvy.job.phase": job.phase,
            **({} if job.exit_code is None else {"process.exit.code": job.exit_code}),
        },
        failed=job.reason if job.phase is JobPhase.FAILED else "",
        events=[each for each in events if each.at >= began],
    )
    own = sorted(attempts, key=lambda each: each.number)
    own = [each for each in own if each.created_at >= began][-_MOST_ATTEMPTS:]
    saves = [each for each in root.events if each.kind == "checkpoint"][-_MOST_ATTEMPTS:]
    spans, free_since = [root], began
    for attempt in own:
        if attempt.created_at > free_since:
            spans.append(_make_child(root, "queue", attempt.number, free_since, attempt.created_at))
        spans += _trace_attempt(root, attempt, saves)
        free_since = max(free_since, attempt.finished_at or attempt.ended_at or ended)
    if not own:
        spans.append(_make_child(root, "queue", -spell, began, root.end))
    return spans


def _trace_attempt(root: JobSpan, attempt: Attempt, saves: Sequence[Event]) -> list[JobSpan]:
    offer, number = attempt.offer, attempt.number
    last = attempt.ended_at or attempt.kept_since or attempt.finished_at or root.end
    whole = _make_child(root, "attempt", number, attempt.created_at, last)
    outcome = attempt.outcome or "none"
    attributes: dict[str, str | int] = {
        "cavvy.attempt.number": number,
        "cavvy.attempt.outcome": outcome,
        "cavvy.nodes": attempt.nodes,
        "cavvy.provider": offer.provider,
        "cavvy.purchase": offer.purchase,
        "cloud.region": offer.region,
        "host.type": offer.instance_type,
        "cavvy.accelerator": offer.accelerator or "",
    }
    failed = attempt.reason if outcome not in (AttemptOutcome.SUCCEEDED, "none") else ""
    times = (attempt.created_at, attempt.launched_at, attempt.running_at, attempt.finished_at, last)
    parts, since = list[JobSpan](), attempt.created_at
    if attempt.planned is not None:
        parts.append(_make_child(whole, "plan", number, *attempt.planned))
        since = parts[0].end
    for name, until in zip(("launch", "start", "run", "end"), times[1:], strict=True):
        if until is not None:  # otherwise the attempt has not come so far
            parts.append(_make_child(whole, name, number, since, until))
            since = max(since, until)
    run = next((each for each in parts if each.name == "run"), whole)
    for save in saves:
        if save.attempt == number:
            took = attempt.checkpoint_cost if save.at == attempt.checkpoint_at else None
            span = _make_child(run, "save", save.id, save.at - (took or timedelta(0)), save.at)
            parts.append(span)
    return [replace(whole, attributes=attributes, failed=failed), *parts]


def _make_child(parent: JobSpan, name: str, number: int, begin: datetime, end: datetime) -> JobSpan:
    return JobSpan(
        trace_id=parent.trace_id,
        span_id=_make_id(8, parent.trace_id, name, number),
        parent_id=parent.span_id,
        name=name,
        begin=begin,
        end=max(begin, end),
    )


def _make_id(size: int, *parts: object) -> int:
    """Return an id of this many bytes, which is not 0."""
    digest = sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:size]) or 1
