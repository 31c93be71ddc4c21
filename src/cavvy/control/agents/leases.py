"""How long the agents of a gang may work without a response from the server: the task's lease, or
less if the budget ends earlier.
"""

from datetime import datetime, timedelta

from cavvy.control.decide.bills import paid_time
from cavvy.control.decide.job import MARGIN, cap_of
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.units import HourlyRate, Money


def lease_until(job: JobRecord, until: datetime | None, now: datetime) -> timedelta:
    """Return the task's lease, or a shorter lease if it is paid only `until` this time; None if
    there is no limit.
    """
    lease = job.task.limits.unattended
    return lease if until is None else max(timedelta(0), min(lease, until - now))


def first_lease(job: JobRecord, attempt: Attempt, spent: Money | None) -> timedelta:
    """Return the lease at a gang's launch, before its agents have reported; `spent` is the cost of
    earlier attempts.
    """
    return lease_until(job, paid_until(job, attempt, spent), attempt.created_at)


def paid_until(job: JobRecord, attempt: Attempt, spent: Money | None = None) -> datetime | None:
    """Return the time until which the rest of the budget pays for this attempt alone. The rest does
    not include what the attempt itself has spent, which may be unknown. Returns None if there is no
    limit.
    """
    cap, rate = cap_of(job), attempt.offer.rate.times(attempt.nodes).micros_per_hour
    if cap is None or not rate:
        return None
    left = cap if spent is None else Money(max(0, cap.micros - spent.micros))
    return attempt.created_at + lease_paid_by(left, HourlyRate(rate), job)


def lease_paid_by(left: Money, rate: HourlyRate, job: JobRecord) -> timedelta:
    """Return how long work may continue if `left` must also pay for ending the work. `left` pays
    for a certain time. The time that is needed to end the work is subtracted from the paid time; at
    most half of the paid time is subtracted.
    """
    paid = paid_time(left, rate)
    return paid - min(job.task.grace + MARGIN, paid / 2)
