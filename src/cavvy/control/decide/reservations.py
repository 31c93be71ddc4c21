"""Compares jobs with the reservations of hosts, and says why they wait for one."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.control.decide.queue import QueueWait
from cavvy.domain.jobs import JobRecord
from cavvy.domain.maintenance import Reservation
from cavvy.scheduler.queue import JobWait
from cavvy.scheduler.reservations import ReservedFor


def compare_reserved(job: JobRecord) -> ReservedFor:
    """Return what the job is compared with reservations by. The jobs of a machine have no end, as
    the machine keeps its nodes."""
    task = job.task
    longest = task.limits.duration if task.machine is None else None
    runs = None if longest is None else longest + task.grace
    return ReservedFor(project=job.project, user=job.user, runs=runs)


def wait_for_reservation(job: JobRecord, closed: Sequence[Reservation], now: datetime) -> QueueWait:
    """Return why the job waits whose offers are all reserved for others."""
    first = min(closed, key=lambda each: each.ends_at)
    hosts = ", ".join(dict.fromkeys(part.host for part in first.parts))
    reason = f"waits because {hosts} is {first.describe(job.project)}"
    if job.project == first.project:
        reason += f" (reservation {first.name})"
    if first.begins_at > now:
        reason += "; a `limits.duration` that ends before lets it start"
    times = [each.begins_at if each.begins_at > now else each.ends_at for each in closed]
    wait = JobWait(job=job, reason=reason, behind=())
    return QueueWait(wait=wait, again_at=min(times))
