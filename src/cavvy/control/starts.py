"""The rows that start a job: its next attempt, and the job itself once that attempt is its own.
Pure.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from cavvy.domain.jobs import Attempt, Job, JobPhase, Node, attempt_id
from cavvy.domain.offers import Offer


def make_attempt(
    job: Job, offer: Offer, gang_of: Callable[[str], str], now: datetime, reason: str
) -> tuple[Attempt, list[Node]]:
    """The next attempt of a job, as rows to be written before anything is bought."""
    number = job.last_number + 1
    mine = attempt_id(job.id, number)
    attempt = Attempt(
        id=mine,
        job_id=job.id,
        project=job.project,
        number=number,
        gang=gang_of(mine),
        offer=offer,
        nodes=job.task.nodes,
        reason=reason,
        created_at=now,
        since=now,
    )
    return attempt, [
        Node(attempt_id=mine, project=job.project, rank=rank) for rank in range(job.task.nodes)
    ]


def start_job(job: Job, attempt: Attempt, reason: str, now: datetime) -> Job:
    """The job from now on: this attempt is its own."""
    return replace(
        job,
        phase=JobPhase.STARTING,
        since=now,
        reason=reason,
        attempt=attempt.number,
        numbered=attempt.number if job.numbered else 0,
        not_before=None,
    )
