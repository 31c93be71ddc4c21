"""The inputs and outputs of a deadline policy; its caller is the production control plane or the
trace simulator.

Times are seconds since the job was submitted. Rates are floating US dollars per hour: they rank,
they never bill. `PolicyView`, `SpotQuote` and `PolicyDecision` are named tuples because a
simulation creates hundreds of thousands per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol

NOWHERE = -1  # the market of a job that has never run
GRAIN_S = 1e-3  # shorter times count as 0: sums of floats are not exact


class RunMode(StrEnum):
    IDLE = "idle"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMarket:
    """A location with nodes: on-demand always, spot while its quote says so."""

    name: str
    region: str = ""
    on_demand_usd_hr: float = 1.0


class SpotQuote(NamedTuple):
    """A market's spot offer at one moment. `at_risk`: the provider reported that it may soon
    preempt nodes there.
    """

    up: bool
    usd_hr: float
    at_risk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """The constants of a job.

    `overhead_s` is the time from a launch until the job is where it had stopped: boot, setup,
    restore. It is billed, and no work is done in it. `move_usd[i][j]` is the price of copying the
    checkpoint from market i to j.
    """

    work_s: float
    deadline_s: float
    overhead_s: float
    markets: tuple[PolicyMarket, ...]
    move_usd: tuple[tuple[float, ...], ...] = ()

    def move(self, source: int, target: int) -> float:
        """The dollars for copying the checkpoint; 0 while there is none."""
        return self.move_usd[source][target] if self.move_usd and source != NOWHERE else 0.0


class PolicyView(NamedTuple):
    """One moment: `left_s` of work is left, the gang (or, while idle, the checkpoint) is in
    `market`, and a new gang needs `loading_s` more before it works (0: it works). `quotes` are in
    the order of the terms' markets, `unsaved_s` is work of the gang since its last checkpoint, and
    `budget_usd` may still be spent.
    """

    now_s: float
    left_s: float
    mode: RunMode
    market: int
    loading_s: float
    quotes: tuple[SpotQuote, ...]
    unsaved_s: float = 0.0
    budget_usd: float = inf


class PolicyDecision(NamedTuple):
    """The state to be in from now on. The driver asks again at `again_s`, and earlier if a quote
    changes.
    """

    mode: RunMode
    market: int
    again_s: float = inf
    reason: str = ""


class MarketPolicy(Protocol):
    """Decides for one job; each job has its own, because it keeps its observations. Asking does not
    change it.
    """

    def learn(self, at_s: float, quotes: Sequence[SpotQuote]) -> None:
        """Record facts. Times increase, and may be below 0."""
        return None

    def decide(self, view: PolicyView) -> PolicyDecision:
        """The state to be in from now on. The view's quotes may be beliefs."""
        ...


class PolicyMaker(Protocol):
    """Builds a policy for one job."""

    def __call__(self, terms: JobTerms) -> MarketPolicy: ...
