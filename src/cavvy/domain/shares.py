"""Jobs in the queue as rows without their tasks, and what projects hold of the shared machines.

Sizes are counted in GPUs. A node without GPUs counts as `WITHOUT_GPU`.
"""

from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct

HALF_LIFE_SETTING = "queue.half_life_days"
HALF_LIFE = timedelta(days=7)  # Slurm's default of PriorityDecayHalfLife
MIN_RUN_SETTING = "queue.min_run_minutes"
# How long work runs before its nodes may be reclaimed for another project's quota.
MIN_RUN = timedelta(minutes=30)
# What quotas and limits count, beside the GPUs with one name, which is that of a product, family,
# vendor or kind: the GPUs of all products together, and micro-dollars an hour.
GPUS, DOLLARS = "", "$"
WITHOUT_GPU = 1 / 8  # GPUs that a node without GPUs counts as; the usual node has eight


class QueueRow(Struct, frozen=True):
    """A waiting job in the queue of its project, with its size in GPUs. `array` is the array that
    it is a member of, of which at most `parallel` members run at once. `accelerators` are the names
    of the accelerators that it accepts, as its task has them; if it accepts any, there are none.
    The row of a group stands for several `jobs`, which start together.
    """

    id: str
    project: str
    user: str
    size: float
    array: str | None = None
    parallel: int | None = None
    accelerators: tuple[str, ...] = ()
    jobs: int = 1


class HeldShare(Struct, frozen=True):
    """The GPUs that the jobs of one user in one project hold now, and the number of these jobs.
    `idle` are further GPUs on nodes that are kept warm for the project's next job."""

    project: str
    user: str
    gpus: float
    jobs: int
    idle: float = 0.0


class GangShare(Struct, frozen=True):
    """What one gang holds on its offer: GPUs of one product, and its price in micro-dollars an
    hour. Without GPUs, the product is ""."""

    accelerator: str = ""
    gpus: float = 0.0
    micros_per_hour: int = 0


class HeldGang(Struct, frozen=True):
    """A gang that a job holds now. An idle gang is kept warm for the project's next job."""

    project: str
    user: str
    share: GangShare
    idle: bool = False


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


def accelerators_of_task(task: TaskSpec) -> tuple[str, ...]:
    """Return the names of the accelerators that the task accepts, or () if it accepts any or
    none."""
    names: list[str] = []
    for need in task.resources.any_of or (task.resources,):
        named = [each.name for each in need.accelerators if each.name is not None]
        if not named or len(named) < len(need.accelerators):
            return ()
        names += named
    return tuple(dict.fromkeys(names))


def share_of(offer: Offer, nodes: int, size: float) -> GangShare:
    """Return what a gang of this many nodes holds on the offer. On shared hosts, it holds only the
    GPUs that its task requests, which are its `size`."""
    gpus = size if offer.shared else nodes * offer.accelerator_count * offer.accelerator_part
    micros = nodes * offer.rate.micros_per_hour
    return GangShare(offer.accelerator or "", gpus if offer.accelerator else 0.0, micros)
