"""Computes a record of each market from observations, mixed with cautious priors. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from math import inf

from cavvy.domain.markets import LIVES, MarketTally, Observation, ObservationKind
from cavvy.domain.values import Struct, field, replace
from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR
from cavvy.planner.work import MACHINE_START

# The weights of the priors: each prior counts as this many observations. The values are round
# numbers, and so low that a few real observations outweigh them.
_PRIOR_HOURS = 10.0  # prior node-hours, with the preemption rate SPOT_PREEMPTIONS_PER_HOUR
_PRIOR_BOOTS = 2.0  # prior boots, each of the time that `expect_boot` describes
# The cooldown after a refusal. The cooldown doubles with each further refusal in a row.
FIRST_REST = timedelta(seconds=60)
# With a longer cooldown, spot that has returned would be noticed too late.
LONGEST_REST = timedelta(minutes=10)
NO = frozenset({ObservationKind.REFUSED, ObservationKind.TAKEN, ObservationKind.FAILED})


class MarketRecord(Struct, frozen=True, kw_only=True):
    """The record of one market. Rates are for one node."""

    market: str
    granted: int = 0
    refused: int = 0
    refused_at: datetime | None = None
    lost_at: datetime | None = None  # when a gang in this market was last preempted or failed
    boots: int = 0
    boot_s: float = 0.0  # the total time of all boots
    lives: int = 0
    taken: int = 0
    failed: int = 0
    node_hours: float = 0.0

    @property
    def preemptions_per_hour(self) -> float:
        """Preemptions per hour of one node: the observed rate, mixed with the prior."""
        seen = self.taken + SPOT_PREEMPTIONS_PER_HOUR * _PRIOR_HOURS
        return seen / (self.node_hours + _PRIOR_HOURS)

    def expect_boot(self, documented: timedelta | None = None) -> timedelta:
        """Return the mean time from an accepted launch to the agents' first reports, mixed with a
        prior. The prior is the time that the provider documents or, if it documents none,
        MACHINE_START.
        """
        prior = (documented or MACHINE_START).total_seconds() * _PRIOR_BOOTS
        return timedelta(seconds=(self.boot_s + prior) / (self.boots + _PRIOR_BOOTS))


class MarketKnowledge(Struct, frozen=True, kw_only=True):
    """The records of all markets and their recent observations. Observations are sorted, oldest
    first.
    """

    standings: Mapping[str, MarketRecord] = field(default_factory=dict)
    recent: Mapping[str, Sequence[Observation]] = field(default_factory=dict)

    def of(self, market: str) -> MarketRecord:
        return self.standings.get(market) or MarketRecord(market=market)

    def cooldown_until(self, market: str, works_after: timedelta = timedelta(0)) -> datetime | None:
        """Return the end of the market's cooldown, during which no node is launched in the market.
        The market has a cooldown only if its latest observation is a refusal, preemption or
        failure; prices are ignored. Without a cooldown, the result is None.

        `works_after` is the time from a launch until the work starts. With it, launches in a row
        that ended earlier make the cooldown longer. See `MarketRest`.
        """
        return cooldown_until(self.recent.get(market, ()), works_after)


def standings_of(tallies: Iterable[MarketTally]) -> dict[str, MarketRecord]:
    """Combine the tallies into one record for each market."""
    found: dict[str, MarketRecord] = {}
    for tally in tallies:
        known = found.get(tally.market) or MarketRecord(market=tally.market)
        found[tally.market] = _add(known, tally)
    return found


def _add(known: MarketRecord, tally: MarketTally) -> MarketRecord:
    match tally.kind:
        case ObservationKind.GRANTED:
            return replace(known, granted=known.granted + tally.count)
        case ObservationKind.REFUSED:
            return replace(known, refused=known.refused + tally.count, refused_at=tally.last_at)
        case ObservationKind.BOOTED:
            return replace(
                known, boots=known.boots + tally.count, boot_s=known.boot_s + tally.seconds
            )
        case ObservationKind.PRICE:
            return known
    lived = replace(
        known,
        lives=known.lives + tally.count,
        node_hours=known.node_hours + tally.node_seconds / 3600,
    )
    if tally.kind is ObservationKind.TAKEN:
        return replace(
            lived, taken=lived.taken + tally.count, lost_at=_later(known.lost_at, tally.last_at)
        )
    if tally.kind is ObservationKind.FAILED:
        return replace(
            lived, failed=lived.failed + tally.count, lost_at=_later(known.lost_at, tally.last_at)
        )
    return lived


def _later(known: datetime | None, at: datetime) -> datetime:
    return at if known is None else max(known, at)


def cooldown_until(
    seen: Sequence[Observation], works_after: timedelta = timedelta(0)
) -> datetime | None:
    """Return the end of the cooldown, computed from the observations of one market, oldest first.
    See `MarketKnowledge.cooldown_until`.
    """
    if not seen:
        return None
    rest, began = MarketRest(works_after.total_seconds()), seen[0].at
    for each in seen:
        rest.note((each.at - began).total_seconds(), each.kind, each.seconds or None)
    return None if rest.until_s == -inf else began + timedelta(seconds=rest.until_s)


class BarrenLaunches(Struct, frozen=True, kw_only=True):
    """The latest launches in a row in one market that ended before the work started. `since_s` is
    the time of the first of these launches. The market rests until `until_s`.
    """

    count: int
    since_s: float
    until_s: float


class MarketRest:
    """The rest of one market, in which nothing should be launched there. The observations of the
    market must be noted in order of time. Times are in seconds.

    A launch that was granted but ended before the work started is evidence against the market, like
    a refusal, but costs money. Several such launches in a row show that the market has a bad
    period. Bad periods have no typical length: a period that has lasted for some time is as likely
    as any other to last as long again. Therefore the market rests for as long as its bad period has
    lasted so far.
    """

    __slots__ = ("_granted_s", "_refusals", "_works_after_s", "barren", "until_s")

    def __init__(self, works_after_s: float = 0.0) -> None:
        """`works_after_s` is the time from a launch until the work starts."""
        self._works_after_s = works_after_s
        self._refusals = 0  # number of refusals, preemptions and failures in a row
        self._granted_s = -inf  # the time of the latest granted launch
        self.until_s = -inf
        self.barren: BarrenLaunches | None = None

    def note(self, at_s: float, kind: ObservationKind, lasted_s: float | None = None) -> None:
        """Add one observation. `lasted_s` is the lifetime of a gang that ended. Without it, the
        gang was launched by the latest grant.
        """
        if kind in NO:
            self._refusals += 1
            self.until_s = at_s + cooldown_after(self._refusals).total_seconds()
        elif kind is not ObservationKind.PRICE:
            self._refusals, self.until_s = 0, -inf
        if kind is ObservationKind.GRANTED:
            self._granted_s = at_s
        elif kind in LIVES:
            self._note_life(self._granted_s if lasted_s is None else at_s - lasted_s, at_s, kind)

    def _note_life(self, began_s: float, at_s: float, kind: ObservationKind) -> None:
        """Count a launch that ended before its work started, or end the count. The first of several
        such launches may be a coincidence; from the second on, the market rests for longer.
        """
        if at_s - began_s >= self._works_after_s:
            self.barren = None
        elif kind is not ObservationKind.ENDED:
            old = self.barren
            if old is not None and began_s - old.until_s > old.until_s - old.since_s:
                old = None  # The market was not tried for so long that its bad period may be over.
            count, since_s = (1, began_s) if old is None else (old.count + 1, old.since_s)
            rest_s = at_s - since_s if count > 1 else 0.0
            self.until_s = max(self.until_s, at_s + rest_s)
            self.barren = BarrenLaunches(count=count, since_s=since_s, until_s=self.until_s)


@lru_cache(maxsize=64)
def cooldown_after(said_no: int) -> timedelta:
    """Return the cooldown of a market after this many refusals, preemptions or failures in a
    row.
    """
    return min(LONGEST_REST, FIRST_REST * (1 << min(said_no - 1, 10)))
