"""A job, an attempt of it and offers, for tests that care for some of their fields."""

from datetime import datetime
from typing import Any

from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

TASK = TaskSpec(name="n", run="x")
FIXED = Offer(
    provider="fake",
    region="r",
    zone="a",
    instance_type="m",
    vcpus=8,
    memory_mib=32768,
    rate=HourlyRate(1_000_000),
)
SPOT = replace(FIXED, purchase=Purchase.SPOT, rate=HourlyRate(300_000))


def make_job_record(now: datetime, **changes: Any) -> JobRecord:
    """The job `j` of the project `p`, submitted now."""
    usual = {"id": "j", "project": "p", "name": "n", "task": TASK}
    return JobRecord(**{**usual, "submitted_at": now, "since": now, **changes})


def make_attempt_record(now: datetime, offer: Offer, **changes: Any) -> Attempt:
    """The first attempt of the job `j`, made now: the gang `g` of one node at this offer."""
    usual = {"id": "j-1", "job_id": "j", "project": "p", "number": 1, "gang": "g", "nodes": 1}
    return Attempt(**{**usual, "offer": offer, "created_at": now, "since": now, **changes})
