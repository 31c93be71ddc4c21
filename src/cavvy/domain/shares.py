"""Jobs in the queue as rows without their tasks, and what projects hold of the shared machines.

Sizes are counted in GPUs. A node without GPUs counts as `WITHOUT_GPU`.
"""

from datetime import datetime, timedelta

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct

HALF_LIFE_SETTING = "queue.half_life_days"
HALF_LIFE = timedelta(days=7)  # Slurm's default of PriorityDecayHalfLife
MIN_RUN_SETTING = "queue.min_run_minutes"
# How long work runs before its nodes may be reclaimed for another project's quota.
MIN_RUN = timedelta(minutes=30)
WITHOUT_GPU = 1 / 8  # GPUs that a node without GPUs counts as; the usual node has eight


class QueueRow(Struct, frozen=True):
    """A waiting job in the queue of its project, with its size in GPUs. `array` is the array that
    it is a member of, of which at most `parallel` members run at once."""

    id: str
    project: str
    user: str
    size: float
    array: str | None = None
    parallel: int | None = None


class HeldShare(Struct, frozen=True):
    """The GPUs that the jobs of one user in one project hold now, and the number of these jobs.
    `idle` are further GPUs on nodes that are kept warm for the project's next job."""

    project: str
    user: str
    gpus: float
    jobs: int
    idle: float = 0.0


class EndedGang(Struct, frozen=True):
    """How long a gang held its nodes until it ended, and how much of this time passed until its
    work ran."""

    attempt_id: str
    project: str
    user: str
    name: str  # of its job
    provider: str
    held: timedelta
    boot: timedelta


class ProjectUse(Struct, frozen=True, kw_only=True):
    """The decayed use of a project's own jobs up to `at`, and the GPUs that they use since `at`."""

    gpu_hours: float
    held: float
    at: datetime


def size_of_task(task: TaskSpec) -> float:
    """Return the number of GPUs that the task's gang requests. If the task has alternatives, the
    first one counts."""
    wanted = (task.resources.any_of or (task.resources,))[0].accelerators
    return task.nodes * (wanted[0].count_min * wanted[0].part if wanted else WITHOUT_GPU)
