"""Reads market observations, and records prices. Market records are cached for a few seconds."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.planner.markets import LONGEST_REST, MarketKnowledge, MarketRecord, standings_of
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import Store

SINCE = timedelta(days=30)  # age of the oldest observations that market records include
RECENT = timedelta(days=3)  # age of the oldest single observations that policies get
KEEP = timedelta(days=90)
_AGE = timedelta(seconds=5)
_MOST = 400  # maximum number of observations that a policy gets for one decision


class MarketHistory:
    """Reads the records and observations of markets from the store, and records prices in the
    store.
    """

    def __init__(self, store: Store, clock: ControlClock) -> None:
        self._store = store
        self._clock = clock
        self._standings: Mapping[str, MarketRecord] = {}
        self._read_at: datetime | None = None
        self._prices: dict[str, int] = {}
        self._resting: Collection[str] = ()
        self._rested_at: datetime | None = None

    async def standings(self) -> Mapping[str, MarketRecord]:
        """Return the record of each market that was used recently."""
        now = self._clock.now()
        if self._read_at is None or now - self._read_at >= _AGE:
            self._standings, self._read_at = (
                standings_of(await self._store.tallies(now - SINCE)),
                now,
            )
        return self._standings

    async def knowledge(self, markets: Collection[str]) -> MarketKnowledge:
        """Return the records of all markets, and the recent observations of the given markets."""
        recent: dict[str, list[Observation]] = {}
        for seen in await self._store.observations(markets, self._clock.now() - RECENT, _MOST):
            recent.setdefault(seen.market, []).append(seen)
        return MarketKnowledge(standings=await self.standings(), recent=recent)

    async def cooling_down(self) -> Collection[str]:
        """Return the markets in which a launch or a gang of any job has failed recently, or in
        which several launches in a row ended before their nodes had booted. Jobs should try all
        other markets before the returned markets.
        """
        now = self._clock.now()
        if self._rested_at is None or now - self._rested_at >= _AGE:
            lately = [
                key
                for key, known in (await self.standings()).items()
                if (known.refused_at is not None and now - known.refused_at <= LONGEST_REST)
                # After launches that never worked, the cooldown can be as long as their period.
                or (known.lost_at is not None and now - known.lost_at <= RECENT)
            ]
            known = await self.knowledge(lately) if lately else MarketKnowledge()
            until = {
                key: known.cooldown_until(key, works_after=known.of(key).expect_boot())
                for key in lately
            }
            self._resting = {key for key, at in until.items() if at is not None and at > now}
            self._rested_at = now
        return self._resting

    async def note_prices(self, offers: Iterable[Offer]) -> None:
        """Record the spot prices that have changed since they were last recorded."""
        spot = {offer.key: offer.rate for offer in offers if offer.purchase is Purchase.SPOT}
        unknown = [key for key in spot if key not in self._prices]
        now = self._clock.now()
        if unknown:
            for seen in await self._store.observations(unknown, now - SINCE):
                if seen.rate is not None:
                    self._prices[seen.market] = seen.rate.micros_per_hour
        news = {
            key: rate for key, rate in spot.items() if self._prices.get(key) != rate.micros_per_hour
        }
        if news:
            observations = [
                Observation(market=key, kind=ObservationKind.PRICE, at=now, rate=rate)
                for key, rate in news.items()
            ]
            await self._store.commit(AtomicWrite(observations=observations))
            self._prices.update({key: rate.micros_per_hour for key, rate in news.items()})

    async def forget(self) -> None:
        """Remove observations that are too old to be useful."""
        await self._store.forget_observations(self._clock.now() - KEEP)
