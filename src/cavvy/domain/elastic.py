"""On what an elastic job may run: the numbers of nodes between its least and its most, the types of
accelerators, and how fast the job is on each. The scheduler chooses among these sizes.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import assert_never

from cavvy.domain.values import Struct

# The most sizes that are tried of one job at once. At every pass of the queue, each is compared
# with all offers, which takes 30 ms of CPU time for 2,000 of them.
MOST_SIZES = 16


class NodeRange(Struct, frozen=True, kw_only=True):
    """The numbers of nodes on which a job may run, both inclusive."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"

    def list_sizes(self, most: int | None = None) -> Sequence[int]:
        """Return the sizes to try, the largest one first, and none above `most`. Of a range of more
        than MOST_SIZES, only so many are tried: both ends, and between them each about as many
        times as large as the one before."""
        top = max(self.least, self.most if most is None else min(self.most, most))
        sizes = [self.least]
        for left in range(MOST_SIZES - 1, 0, -1):
            size = sizes[-1]
            if size == top:
                break
            sizes.append(max(size + 1, round(size * (top / size) ** (1 / left))))
        return sizes[::-1]

    def list_samples(self) -> Sequence[int]:
        """Return the least and the most nodes, and about the geometric mean of both: what is shown
        of a range, ascending."""
        return sorted({self.least, round((self.least * self.most) ** 0.5), self.most})

    def find_finer(self, size: int, most: int | None = None) -> "NodeRange | None":
        """Return the range from a tried size to below the next larger one, for a job that can start
        on the former, but not on the latter; None if there is no size between them."""
        larger = min((each for each in self.list_sizes(most) if each > size), default=size)
        return NodeRange(least=size, most=larger - 1) if larger > size + 1 else None

    def __contains__(self, nodes: int) -> bool:
        return self.least <= nodes <= self.most


class SizeCause(StrEnum):
    """Why an elastic job gets another number of nodes."""

    GROW = "grow"  # nodes are free, and the job ends sooner with them
    GIVE_WAY = "give-way"  # another job waits for the nodes
    ASKED = "asked"  # a person has asked for it: `cavvy resize`
    ROLL_BACK = "roll-back"  # the program did not take its new number of nodes, or is slower there


class SizeChange(Struct, frozen=True, kw_only=True):
    """The last change of an elastic job's size: from `before` to `nodes`. `attempt` is the number
    of the attempt that ends because of it; only the next one has at most `nodes`, and later ones
    start on what is free then. `rate` is the work per second before the change, None if the program
    told none. `gain_s` is how much sooner the job was expected to end. `told` states that an event
    has said what the change has cost and won.
    """

    nodes: int
    before: int
    cause: SizeCause
    at: datetime
    attempt: int
    rate: float | None = None
    gain_s: float | None = None
    told: bool = False


class HoldCause(StrEnum):
    """Why an elastic job that runs has no more nodes than it has."""

    OFF = "off"  # the setting elastic.change_sizes
    NO_CHECKPOINT = "no-checkpoint"  # it would start from its beginning
    FIXED = "fixed"  # jobs of this kind keep their size
    UNTAKEN = "untaken"  # the program did not take more nodes
    BUDGET = "budget"  # a budget would keep it from starting again
    NO_OFFER = "no-offer"  # no place has more nodes like its own for it, at no higher price
    NO_ROOM = "no-room"  # the nodes are there, but not free
    WAITING = "waiting"  # another job waits for the free nodes
    RESTS = "rests"  # it has not run long enough since its last start
    NO_GAIN = "no-gain"  # more nodes would win too little for what they and its restart cost


class SizeHold(Struct, frozen=True, kw_only=True):
    """Why the attempt of this number has no more nodes. `nodes` is the next larger size, `job` the
    name of the job that waits for the nodes, and `until` the time from which the job may grow. An
    event has told the causes in `told`."""

    cause: HoldCause
    attempt: int
    nodes: int
    job: str = ""
    until: datetime | None = None
    told: tuple[HoldCause, ...] = ()

    def explain(self) -> str:
        """Return the reason for people, as a clause that follows "because"."""
        match self.cause:
            case HoldCause.OFF:
                return "the setting elastic.change_sizes of the server is off"
            case HoldCause.NO_CHECKPOINT:
                return "without `checkpoint`, it would start again from its beginning"
            case HoldCause.FIXED:
                return (
                    "jobs of machines, pools, groups and arrays, and those whose spot policy "
                    "chooses markets, keep their size"
                )
            case HoldCause.UNTAKEN:
                return "its program did not take more nodes; `cavvy resize` tries it again"
            case HoldCause.BUDGET:
                return "a budget would keep it from starting again"
            case HoldCause.NO_OFFER:
                return f"no place has {self.nodes} nodes like its own for it, at no higher price"
            case HoldCause.NO_ROOM:
                return f"fewer than {self.nodes} nodes like its own are free for it"
            case HoldCause.WAITING:
                return f"job {self.job} waits for the free nodes"
            case HoldCause.RESTS:
                at = "" if self.until is None else f" before {self.until:%H:%M:%S} UTC"
                return f"it will not have run long enough since its last start{at}"
            case HoldCause.NO_GAIN:
                return "more nodes would win too little for what they and its restart cost"
            case unreachable:
                assert_never(unreachable)


class ElasticSize(Struct, frozen=True, kw_only=True):
    """One size of an elastic job: so many nodes with so many accelerators of one type each.

    `throughput` is in samples per second of the whole job, and `efficiency` is the progress per
    sample, relative to the job's smallest batch: at most 1, and 1 if the batch is the same at all
    sizes. `measured` states whether the throughput comes from a run, not from an estimate.
    """

    nodes: int
    accelerator: str | None = None  # None for nodes without accelerators
    accelerators_per_node: int = 0
    throughput: float
    efficiency: float = 1.0
    measured: bool = False

    @property
    def goodput(self) -> float:
        """The useful samples per second."""
        return self.throughput * self.efficiency

    @property
    def accelerators(self) -> int:
        """The number of accelerators of all nodes together."""
        return self.nodes * self.accelerators_per_node


class ElasticJob(Struct, frozen=True, kw_only=True):
    """What the scheduler knows of an elastic job. `current` is the size on which it runs, None if
    it waits, and `resize_s` how many seconds a change of size costs it. `remaining` are the useful
    samples that it has still to process, None if it does not tell; `done` those that it has. Its
    `weight` is that of its share, and the quota of `owner` counts its accelerators."""

    id: str
    sizes: tuple[ElasticSize, ...]
    current: ElasticSize | None = None
    resize_s: float = 0.0
    remaining: float | None = None
    done: float = 0.0
    weight: float = 1.0
    owner: str = ""


def fit_sizes(
    sizes: Iterable[ElasticSize], nodes: int, accelerator: str | None = None
) -> Sequence[ElasticSize]:
    """Return the sizes of at most `nodes` nodes with this type of accelerator, fastest first. Of
    equally fast sizes, the smaller one is first, because it leaves nodes to other jobs."""
    fits = [each for each in sizes if each.nodes <= nodes and each.accelerator == accelerator]
    return sorted(fits, key=lambda each: (-each.goodput, each.nodes))
