"""What a plan says: a placement is one gang on one offer, with its expected time, price and
risk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money


class Objective(StrEnum):
    """What the first placement is best at."""

    COST = "cost"  # total cost where the work is stated, else price per hour
    TIME = "time"  # expected finish


class PlanLimit(StrEnum):
    """A limit of the task that an offer's estimate breaks, in the order in which they are tried."""

    DURATION = "duration"
    DEADLINE = "deadline"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotLoss:
    """What being preempted is expected to cost. None: unknown, because the running time is."""

    per_hour: float  # preemptions of the whole gang per hour, by the prior
    checkpoint_every: (
        timedelta | None
    )  # None: no checkpoint, each preemption starts from the beginning
    preemptions: float | None = None
    time: timedelta | None = (
        None  # beyond the undisturbed run: work done again, new starts, writing checkpoints
    )
    cost: Money | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One way to run the task. Every estimate is an expectation, not a promise; `notes` say what
    it rests on.
    """

    offer: Offer
    nodes: int
    rate: HourlyRate  # of the whole gang
    run_time: timedelta | None = None  # of the work that is left, undisturbed
    wall_time: timedelta | None = None  # from the launch to the end of the work, losses included
    finish: datetime | None = None
    cost: Money | None = None  # nodes and egress
    spot_loss: SpotLoss | None = None
    egress: Money | None = None  # of the stated output; None: its size or the price is unknown
    available: bool = True  # False: the place says that it has not enough now
    avoided: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """What is known at planning time beside the task; the defaults are those of a job not yet
    submitted.
    """

    submitted_at: datetime | None = None  # None: now
    avoid: Collection[str] = ()  # keys of offers that failed lately
    ran: timedelta = timedelta(0)  # running so far, counted against limits.duration
    done: float = 0.0  # share of the work that need not be done again, wherever it was done
    spent: Money = field(default_factory=Money)  # counted against limits.budget
    output_mib: int | None = None  # data that will leave the place at the end
    egress: Mapping[str, Money] = field(
        default_factory=dict
    )  # price per GB by provider, or "provider/region"
    notices: Mapping[str, timedelta] = field(
        default_factory=dict
    )  # that a provider gives before it takes a node


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingView:
    """How much of a ranking is wanted. `distinct` keeps the best of each provider, instance type
    and purchase.
    """

    limit: int | None = None
    distinct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitMiss:
    """The offer that came nearest to keeping a limit, and what would have to change."""

    offer: Offer
    limit: PlanLimit
    text: str  # e.g. "would cost $19.40, your budget leaves $15.00"
    change: str  # e.g. "raise limits.budget to $20.00"
    excess: float  # estimate over the first limit broken, above 1
    doubtful: bool = False  # its end cannot be expected, so it comes after those whose can
    broken: int = 1  # how many limits it breaks; `text` and `change` tell of all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The ranked placements and an account of the offers that fit but break a limit.

    `considered` == `kept` + sum(rejected.values()); `placements` are those kept, or as many as the
    view wanted.
    """

    placements: tuple[Placement, ...]
    considered: int
    kept: int
    rejected: Mapping[PlanLimit, int] = field(default_factory=dict)
    misses: tuple[LimitMiss, ...] = ()
