"""Runs one job under a policy on recorded markets. Time jumps from one change of the markets to the
next.
"""

from enum import StrEnum
from math import inf

from cavvy.capabilities.simulation.traces.readers import TraceWorld
from cavvy.domain.markets import ObservationKind
from cavvy.domain.values import Struct
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.deadline.session import PolicySession, start_session
from cavvy.planner.spot.view import (
    GRAIN_S,
    NOWHERE,
    JobTerms,
    PolicyMaker,
    PolicyView,
    RunMode,
    SpotQuote,
)


class Knows(StrEnum):
    """The facts about the markets that a simulated job can observe."""

    EVERYTHING = "everything"  # at every moment, which markets have spot
    LAUNCHES = "launches"  # only prices and the results of its own launches, like a real job


class PolicyFault(Exception):
    """Raised if the policy made an impossible decision. The message states the decision and its
    time."""


class RunSegment(Struct, frozen=True):
    """A period in which the gang runs in one market or the job waits. Times are seconds since the
    start of the job.
    """

    mode: RunMode
    market: int
    start_s: float
    end_s: float
    usd: float
    work_s: float
    reason: str


class TraceRun(Struct, frozen=True, kw_only=True):
    """The result of one job. `usd` includes the price of copying the job's checkpoint."""

    usd: float
    end_s: float
    missed: bool
    launches: int
    segments: tuple[RunSegment, ...] = ()


NO_MARGINS = PolicyMargins(spare_s=0.0, spare_share=0.0)


def run_job(
    world: TraceWorld,
    start_s: float,
    terms: JobTerms,
    make: PolicyMaker,
    *,
    knows: Knows = Knows.EVERYTHING,
    margins: PolicyMargins = NO_MARGINS,
    budget_usd: float = inf,
    keep_segments: bool = False,
) -> TraceRun:
    """Run one job that starts at second `start_s` of the record. A preemption loses at most
    `terms.again_s` of the gang's work.

    `knows` selects the policy's knowledge about the markets. `margins` are added to the terms that
    the policy receives; the job itself uses the terms without the margins. If the job still waits
    when the record ends, it has missed its deadline.

    Raises PolicyFault if the policy takes spot capacity that its view shows as unavailable, or asks
    for the next decision at a time that is not in the future.
    """
    quotes = world.quotes[world.at(start_s)]
    session = start_session(terms, [quote.usd_hr for quote in quotes], margins, make)
    job = _Job(world, start_s, terms, session, budget_usd, keep_segments, knows)
    while job.left_s > 0 and not job.given_up:
        job.step(session.decide(job.view()))
    job.close()
    return TraceRun(
        usd=job.usd,
        end_s=job.now_s,
        missed=job.given_up or job.now_s > terms.deadline_s + GRAIN_S,
        launches=job.launches,
        segments=tuple(job.segments),
    )


class _Job:
    """The state of one simulated job."""

    __slots__ = (
        "_budget",
        "_index",
        "_keep",
        "_knows",
        "_left_at_launch_s",
        "_opened",
        "_reason",
        "_session",
        "_start",
        "_terms",
        "_times",
        "_world",
        "given_up",
        "launches",
        "left_s",
        "loading_s",
        "market",
        "mode",
        "now_s",
        "quotes",
        "segments",
        "usd",
    )

    def __init__(
        self,
        world: TraceWorld,
        start_s: float,
        terms: JobTerms,
        session: PolicySession,
        budget_usd: float,
        keep: bool,
        knows: Knows,
    ) -> None:
        self._world, self._start, self._terms, self._keep = world, start_s, terms, keep
        self._session, self._budget, self._knows = session, budget_usd, knows
        self._times = world.times_s
        self._index = world.at(start_s)
        self.quotes = world.quotes[self._index]
        self.now_s, self.left_s, self.loading_s, self.usd = 0.0, terms.work_s, 0.0, 0.0
        self.mode, self.market, self.launches, self.given_up = RunMode.IDLE, NOWHERE, 0, False
        self._left_at_launch_s = terms.work_s
        self.segments: list[RunSegment] = []
        # the time, the dollars and the remaining work at the start of the current segment
        self._opened = (
            0.0,
            0.0,
            terms.work_s,
        )
        self._reason = ""
        if knows is Knows.EVERYTHING:
            session.show(0.0, self.quotes)

    @property
    def _own(self) -> int:
        """The market in which the job runs on spot, or NOWHERE if the job does not run on spot."""
        return self.market if self.mode is RunMode.SPOT else NOWHERE

    def view(self) -> PolicyView:
        """Return the current state of the job, without the quotes of markets."""
        return PolicyView(
            self.now_s,
            self.left_s,
            self.mode,
            self.market,
            self.loading_s,
            budget_usd=self._budget - self.usd,
        )

    def step(self, decision: tuple[RunMode, int, float, str]) -> None:
        """Apply the decision and advance to the time of the next decision."""
        mode, market, again_s, reason = decision
        if again_s <= self.now_s:
            raise PolicyFault(
                f"the policy asked to decide again at {again_s:.3f} s, which is not after the "
                f"current time, {self.now_s:.3f} s"
            )
        if mode is not self.mode or (mode is not RunMode.IDLE and market != self.market):
            if mode is RunMode.SPOT and not self._try_spot(market):
                return
            self._become(mode, market, reason)
        again_s = min(again_s, self._session.changes_at(self.now_s))
        while not self._go_on(again_s):
            pass

    def _go_on(self, again_s: float) -> bool:
        """Advance to the next change of the markets or to `again_s`, whichever is earlier. Return
        whether the policy must decide again.
        """
        now, after = self.now_s, self._index + 1
        change = self._times[after] - self._start if after < len(self._times) else inf
        until = change if change < again_s else again_s
        if self.mode is RunMode.IDLE:
            end = self._world.end_s - self._start
            if change == inf and until > max(end, self._terms.deadline_s):
                until, self.given_up = max(now, end), True
        else:
            until = self._work(until)
        self.now_s = until
        noticed = until >= change and self.left_s > 0 and self._change(after)
        return noticed or until >= again_s or self.left_s <= 0 or self.given_up

    def _work(self, until: float) -> float:
        """Let the gang load and work until the time `until` or until the work is done, whichever is
        earlier. Return the time that the simulation has reached.
        """
        now = self.now_s
        end = now + self.loading_s + self.left_s
        spot = self.mode is RunMode.SPOT
        rate = (
            self.quotes[self.market].usd_hr
            if spot
            else self._terms.markets[self.market].on_demand_usd_hr
        )
        if end <= until:
            self.loading_s = self.left_s = 0.0
            until = end
        else:
            worked = until - now - self.loading_s
            if worked > 0:
                self.left_s -= worked
                self.loading_s = 0.0
            else:
                self.loading_s = -worked
        self.usd += rate * (until - now) / 3600
        return until

    def _change(self, index: int) -> bool:
        """Apply a change of the markets. Return whether the job can observe the change."""
        before = self.quotes
        self._index, self.quotes = index, self._world.quotes[index]
        noticed = self._notice(before)
        if self.mode is RunMode.SPOT and not self.quotes[self.market].up:
            self.left_s = min(self.left_s + self._terms.again_s, self._left_at_launch_s)
            self.close()
            self.mode, self.loading_s = RunMode.IDLE, 0.0
            self._reason = "spot was preempted"
        return noticed

    def _notice(self, before: tuple[SpotQuote, ...]) -> bool:
        """Report to the policy the changes of quotes that the job can notice. Return whether there
        was such a change.
        """
        if self._knows is Knows.EVERYTHING:
            self._session.show(self.now_s, self.quotes)
            return True
        own, noticed = self._own, False
        for market, (quote, old) in enumerate(zip(self.quotes, before, strict=True)):
            if quote.usd_hr != old.usd_hr:
                self._observe(market, ObservationKind.PRICE)
            elif market != own or quote == old:
                continue
            noticed = True
        if own != NOWHERE and not self.quotes[own].up:
            self._observe(own, ObservationKind.TAKEN)
        return noticed

    def _observe(self, market: int, kind: ObservationKind) -> None:
        if self._knows is Knows.LAUNCHES:
            self._session.observe(self.now_s, market, kind, self.quotes[market].usd_hr)

    def _try_spot(self, market: int) -> bool:
        granted = self.quotes[market].up
        if not self._session.quotes(self.now_s, self._own)[market].up:
            raise PolicyFault(
                f"the policy takes spot in {self._terms.markets[market].name} at "
                f"{self.now_s:.0f} s, but this market has no spot capacity"
            )
        self._observe(market, ObservationKind.GRANTED if granted else ObservationKind.REFUSED)
        return granted

    def _become(self, mode: RunMode, market: int, reason: str) -> None:
        if self.mode is RunMode.SPOT:
            self._observe(self.market, ObservationKind.ENDED)
        self.close()
        self.mode, self._reason = mode, reason
        self.loading_s = 0.0
        if mode is not RunMode.IDLE:
            self.usd += self._terms.move(self.market, market)
            self.market = market
            self.loading_s, self._left_at_launch_s = self._terms.overhead_s, self.left_s
            self.launches += 1

    def close(self) -> None:
        """End the current segment. The segment is stored only if the run keeps segments and the
        segment's length is above 0."""
        since, usd, left = self._opened
        if self._keep and self.now_s > since:
            self.segments.append(
                RunSegment(
                    self.mode,
                    self.market,
                    since,
                    self.now_s,
                    self.usd - usd,
                    left - self.left_s,
                    self._reason,
                )
            )
        self._opened = (self.now_s, self.usd, self.left_s)
