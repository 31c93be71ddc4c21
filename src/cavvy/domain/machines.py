"""Named machines: gangs that users get, keep and use again by name."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cavvy.domain.jobs import Attempt, Job
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money

USUAL_KEEP = timedelta(minutes=30)  # keep time of a machine whose first task states no keep time


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMachine:
    """A name within a project that stands for one gang at a time: the gang of the machine's newest
    job.

    `task` is the machine's last request, which its next start repeats; `task.keep` is the machine's
    keep time. Without an open gang, the machine is stopped and costs nothing.
    """

    project: str
    name: str
    user: str = ""
    task: Task
    job_id: str | None = None  # the newest job that got the machine
    consented: bool = False  # the user agreed to pay for the machine
    bought_at: datetime | None = None  # when the machine's newest gang was requested
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """A machine and the state of its gang; `gang` is None if the machine is stopped."""

    machine: NamedMachine
    state: str  # starting, busy, idle or stopped
    holder: Job | None  # the machine's newest job
    gang: Attempt | None
    waiting: int  # number of jobs that wait for the machine
    spent: Money  # cost of the gang so far
