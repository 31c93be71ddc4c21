"""What is known of each market, from what was seen of it and cautious priors where nothing was.
Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cavvy.domain.markets import Observation, Sight, Tally
from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR
from cavvy.planner.work import MACHINE_START

# A prior counts as so much evidence of its own: round figures, of which a handful of observations
# makes little.
_PRIOR_HOURS = 10.0  # of node life, at SPOT_PREEMPTIONS_PER_HOUR
_PRIOR_BOOTS = 2.0  # of MACHINE_START each
_PRIOR_LAUNCHES = 2.0  # half of them granted
FIRST_REST = timedelta(seconds=60)  # of a market that said no; doubles with each no in a row
LONGEST_REST = timedelta(minutes=30)
NO = frozenset({Sight.REFUSED, Sight.TAKEN, Sight.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One market's record. Rates are for one node."""

    market: str
    granted: int = 0
    refused: int = 0
    refused_at: datetime | None = None
    lost_at: datetime | None = None  # when a gang there was last taken or failed
    boots: int = 0
    boot_s: float = 0.0  # of all boots together
    lives: int = 0
    taken: int = 0
    failed: int = 0
    node_hours: float = 0.0

    @property
    def preemptions_per_hour(self) -> float:
        """Of one node, mixed with the prior."""
        seen = self.taken + SPOT_PREEMPTIONS_PER_HOUR * _PRIOR_HOURS
        return seen / (self.node_hours + _PRIOR_HOURS)

    @property
    def boot(self) -> timedelta:
        """From an accepted launch to the agents' reports, mixed with the prior."""
        prior = MACHINE_START.total_seconds() * _PRIOR_BOOTS
        return timedelta(seconds=(self.boot_s + prior) / (self.boots + _PRIOR_BOOTS))

    @property
    def grant_chance(self) -> float:
        """That a launch asked for is granted, mixed with the prior."""
        return (self.granted + _PRIOR_LAUNCHES / 2) / (
            self.granted + self.refused + _PRIOR_LAUNCHES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What is known at one moment: records by market, and what was seen lately, oldest first."""

    standings: Mapping[str, Standing] = field(default_factory=dict)
    recent: Mapping[str, Sequence[Observation]] = field(default_factory=dict)

    def of(self, market: str) -> Standing:
        return self.standings.get(market) or Standing(market=market)

    def resting_until(self, market: str) -> datetime | None:
        """Until when a market that said no, or took its nodes back, is left alone; None if its
        last word was a yes.
        """
        return resting_until(self.recent.get(market, ()))


def standings_of(tallies: Iterable[Tally]) -> dict[str, Standing]:
    """One record for each market."""
    found: dict[str, Standing] = {}
    for tally in tallies:
        known = found.get(tally.market) or Standing(market=tally.market)
        found[tally.market] = _add(known, tally)
    return found


def _add(known: Standing, tally: Tally) -> Standing:
    match tally.sight:
        case Sight.GRANTED:
            return replace(known, granted=known.granted + tally.count)
        case Sight.REFUSED:
            return replace(known, refused=known.refused + tally.count, refused_at=tally.last_at)
        case Sight.BOOTED:
            return replace(
                known, boots=known.boots + tally.count, boot_s=known.boot_s + tally.seconds
            )
        case Sight.PRICE:
            return known
    lived = replace(
        known,
        lives=known.lives + tally.count,
        node_hours=known.node_hours + tally.node_seconds / 3600,
    )
    if tally.sight is Sight.TAKEN:
        return replace(
            lived, taken=lived.taken + tally.count, lost_at=_later(known.lost_at, tally.last_at)
        )
    if tally.sight is Sight.FAILED:
        return replace(
            lived, failed=lived.failed + tally.count, lost_at=_later(known.lost_at, tally.last_at)
        )
    return lived


def _later(known: datetime | None, at: datetime) -> datetime:
    return at if known is None else max(known, at)


def resting_until(seen: Sequence[Observation]) -> datetime | None:
    """As Knowledge.resting_until, of one market's observations, oldest first."""
    said_no = 0
    last: datetime | None = None
    for each in reversed(seen):
        if each.sight in NO:
            said_no, last = said_no + 1, last or each.at
        elif each.sight is not Sight.PRICE:
            break
    return None if last is None else last + rest_after(said_no)


def rest_after(said_no: int) -> timedelta:
    """How long a market is left alone after so many refusals in a row."""
    return min(LONGEST_REST, FIRST_REST * (1 << min(said_no - 1, 10)))
