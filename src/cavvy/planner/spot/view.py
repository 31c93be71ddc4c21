"""The inputs and outputs of a deadline policy. The control plane and the trace simulator call
policies through these types.

Times are seconds since the job was submitted. Rates are US dollars per hour as floats, because they
are used only to compare costs, never for billing. `PolicyView`, `SpotQuote` and `PolicyDecision`
are named tuples because a simulation creates hundreds of thousands of these objects per second.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol

from cavvy.domain.values import Struct

NOWHERE = -1  # the market index of a job that has never run
GRAIN_S = 1e-3  # shorter times are treated as 0, because sums of floats are not exact
ABOUT = 1.1  # spot prices that differ by at most this factor are treated as equal
UNSEEN = inf  # the value of `SpotQuote.since_s` if spot was never observed in this market


class RunMode(StrEnum):
    IDLE = "idle"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class PolicyMarket(Struct, frozen=True, kw_only=True):
    """A location in which on-demand nodes are always available. Spot nodes are available in this
    market while `up` of its `SpotQuote` is true.
    """

    name: str
    region: str = ""
    on_demand_usd_hr: float = 1.0


class SpotQuote(NamedTuple):
    """The spot offer of a market at one moment. `at_risk` is true if the provider reported that it
    may soon preempt nodes in this market.

    `since_s` is the estimated time at which spot last became available or unavailable. `since_s` is
    None if every change is observed immediately, and UNSEEN if only the price is known.
    """

    up: bool
    usd_hr: float
    at_risk: bool = False
    since_s: float | None = None


class JobTerms(Struct, frozen=True, kw_only=True):
    """The constants of a job.

    `overhead_s` is the time from a launch until the job continues where it stopped: boot, setup,
    and loading the checkpoint. The nodes are billed during `overhead_s`, although no work is done.
    `move_usd[i][j]` is the price of copying the checkpoint from market i to market j. A preempted
    gang repeats at most `again_s` of its work. The time reserved for delays is `spare_share` times
    the remaining work.
    """

    work_s: float
    deadline_s: float
    overhead_s: float
    markets: tuple[PolicyMarket, ...]
    move_usd: tuple[tuple[float, ...], ...] = ()
    again_s: float = 0.0
    spare_share: float = 0.0

    @property
    def spot_needs_s(self) -> float:
        """The smallest slack that a start on spot requires: the time for this launch, for the work
        that a preemption may repeat, and for a launch on demand.
        """
        return 2 * self.overhead_s + self.again_s

    def slack_s(self, view: "PolicyView") -> float:
        """Return the slack: the time until the deadline minus the time that the rest of the work
        needs."""
        return self.deadline_s - view.now_s - view.left_s * (1 + self.spare_share)

    def move(self, source: int, target: int) -> float:
        """Return the price in dollars of copying the checkpoint between two markets, or 0 if the
        job has never run.
        """
        return self.move_usd[source][target] if self.move_usd and source != NOWHERE else 0.0


class PolicyView(NamedTuple):
    """The state of a job and its markets at one moment.

    `left_s` is the remaining work in seconds. `market` is the market of the gang or, while the job
    is idle, of the checkpoint. `loading_s` is the time until the gang starts to work; it is 0 if
    the gang already works or the job is idle. `quotes` contains one quote for each market, in the
    order of the markets in the terms. `unsaved_s` is the gang's work since its last checkpoint, and
    `budget_usd` is the money that is left.
    """

    now_s: float
    left_s: float
    mode: RunMode
    market: int
    loading_s: float
    quotes: tuple[SpotQuote, ...] = ()
    unsaved_s: float = 0.0
    budget_usd: float = inf


class PolicyDecision(NamedTuple):
    """The mode and the market that the job should use from now on. The caller must request a new
    decision at `again_s`, or earlier if a quote changes.
    """

    mode: RunMode
    market: int
    again_s: float = inf
    reason: str = ""


class MarketPolicy(Protocol):
    """Decides for one job. Each job has a separate policy object, because the policy stores
    observations. `decide` does not change the policy.
    """

    def learn(self, at_s: float, quotes: Sequence[SpotQuote]) -> None:
        """Record observed quotes. Calls must be in the order of `at_s`, which may be negative."""
        return None

    def decide(self, view: PolicyView) -> PolicyDecision:
        """Decide from a view. The view's quotes may be assumptions instead of observations."""
        ...


class PolicyMaker(Protocol):
    """The constructor of a policy for one job."""

    def __call__(self, terms: JobTerms) -> MarketPolicy: ...
