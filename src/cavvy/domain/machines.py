"""Named machines: gangs that users start, keep and use again under a name."""

from datetime import datetime, timedelta

from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct

USUAL_KEEP = timedelta(minutes=30)  # keep time of a machine whose first task sets no keep time


class NamedMachine(Struct, frozen=True, kw_only=True):
    """A machine: a name in a project, and at most one gang at a time, which belongs to the
    machine's newest job.

    `task` is the task for which the machine last got a gang; the next start uses this task again.
    `task.keep` is how long the machine is kept without work. While a machine has no gang, its state
    is `stopped`, and the machine costs nothing.
    """

    project: str
    name: str
    user: str = ""
    task: TaskSpec
    job_id: str | None = None  # the newest job that ran on the machine
    consented: bool = False  # the user agreed to pay for the machine
    bought_at: datetime | None = None  # when the machine's newest gang was launched
    version: int = 0


class MachineStatus(Struct, frozen=True, kw_only=True):
    """A machine and the state of its gang; `gang` is None if the machine is stopping or stopped."""

    machine: NamedMachine
    state: str  # starting, busy, idle, stopping or stopped
    holder: JobRecord | None  # the machine's newest job
    gang: Attempt | None
    waiting: int  # number of jobs that wait for the machine
    spent: Money  # cost of the gang so far
