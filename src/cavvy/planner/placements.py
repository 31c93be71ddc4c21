"""The result of a plan: a placement is one gang on one offer, with its expected time, price and
risk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money


class Objective(StrEnum):
    """The criterion by which placements are ordered."""

    COST = "cost"  # orders by total cost if the work is stated, else by price per hour
    TIME = "time"  # expected finish


class PlanLimit(StrEnum):
    """The limits of a task, in the order in which they are checked."""

    DURATION = "duration"
    DEADLINE = "deadline"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotLoss:
    """The expected cost of preemptions. None: unknown, because the running time is."""

    per_hour: float  # preemptions of the whole gang per hour, by the prior
    checkpoint_every: timedelta | None  # None: no checkpoint, so each preemption restarts the work
    preemptions: float | None = None
    time: timedelta | None = (
        None  # beyond the undisturbed run: repeated work, new starts, writing checkpoints
    )
    cost: Money | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One way to run the task. Every estimate is an expectation, not a promise; `notes` state its
    basis.
    """

    offer: Offer
    nodes: int
    rate: HourlyRate  # of the whole gang
    run_time: timedelta | None = None  # duration of the remaining work, undisturbed
    wall_time: timedelta | None = None  # from the launch to the end of the work, losses included
    finish: datetime | None = None
    cost: Money | None = None  # cost of nodes and egress
    spot_loss: SpotLoss | None = None
    egress: Money | None = (
        None  # egress cost of the stated output; None: its size or the price is unknown
    )
    available: bool = True  # False: the provider reports too few free nodes now
    avoided: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """The known facts at planning time besides the task; the defaults are those of a job not yet
    submitted.
    """

    submitted_at: datetime | None = None  # None: now
    avoid: Collection[str] = ()  # keys of offers that failed lately
    ran: timedelta = timedelta(0)  # running time so far, which counts against limits.duration
    done: float = 0.0  # share of the work that is done, on any offer
    spent: Money = field(default_factory=Money)  # spent so far, which counts against limits.budget
    output_mib: int | None = None  # data that will leave the location at the end
    egress: Mapping[str, Money] = field(
        default_factory=dict
    )  # price per GB by provider, or "provider/region"
    notices: Mapping[str, timedelta] = field(
        default_factory=dict
    )  # the preemption notice of a provider


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingView:
    """The part of a ranking to return. `distinct` keeps the best of each provider, instance type
    and purchase.
    """

    limit: int | None = None
    distinct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitMiss:
    """The offer that came nearest to meeting a limit, and what would have to change."""

    offer: Offer
    limit: PlanLimit
    text: str  # e.g. "would cost $19.40, your budget leaves $15.00"
    change: str  # e.g. "raise limits.budget to $20.00"
    excess: float  # estimate divided by the first broken limit, above 1
    doubtful: bool = False  # offers with no expected end come last
    broken: int = 1  # number of broken limits; `text` and `change` name all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The ranked placements, and an account of the offers that fit but break a limit.

    `considered` == `kept` + sum(rejected.values()); `placements` are those kept, or as many as the
    view asked for.
    """

    placements: tuple[Placement, ...]
    considered: int
    kept: int
    rejected: Mapping[PlanLimit, int] = field(default_factory=dict)
    misses: tuple[LimitMiss, ...] = ()
