"""Decides where the replicas of a service run: on spot in several zones, with spare replicas if the
risk requires them, and on demand if there is not enough spot. No I/O. The caller must request a
decision at every tick and whenever a replica starts or ends.

A policy sees only what happened to its own replicas and launches in a zone. A failed launch costs
nothing and shows that the zone has no spot now.
"""

from math import inf
from typing import NamedTuple, Protocol

from cavvy.domain.services import DEFAULT_AVAILABILITY
from cavvy.domain.values import Struct

_HOUR_S, _DAY_S = 3600.0, 86400.0
_MOST_SPARES = 2
NEVER_S = -_DAY_S  # the time of an event that has not happened


_MOST_REPLICAS = 2_000  # of a service; task files permit 1,000


class ServiceTerms(Struct, frozen=True, kw_only=True):
    """The constants of a service. `replicas` replicas should be ready for the share `availability`
    of the time.
    """

    replicas: int
    zones: int
    cold_start_s: float
    tick_s: float
    availability: float = DEFAULT_AVAILABILITY
    # The region of each zone. Zones of one region tend to lose their spot at the same time.
    regions: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The replicas that are placed one by one: `replicas`, at most `_MOST_REPLICAS`."""
        return min(_MOST_REPLICAS, self.replicas)

    def together(self, zone: int) -> list[int]:
        """Return all zones in the region of this zone, including the zone itself."""
        if not self.regions:
            return [zone]
        return [other for other, region in enumerate(self.regions) if region == self.regions[zone]]


class ServiceView(NamedTuple):
    """The state of a service at one moment.

    `ages_s` contains the ages of all spot replicas in each zone, ready or not, oldest first. `lost`
    and `failed` are the numbers of replicas lost and launches failed in each zone since the last
    decision. `ready` and `on_demand` are the numbers of ready replicas on spot and on demand.
    """

    now_s: float
    ages_s: tuple[tuple[float, ...], ...]
    lost: tuple[int, ...]
    failed: tuple[int, ...]
    ready: int
    on_demand: int


class ReplicaPlacement(NamedTuple):
    """The wanted number of spot replicas in each zone, and the wanted number of on-demand
    replicas.
    """

    spot: tuple[int, ...]
    on_demand: int


class PlacementPolicy(Protocol):
    """Decides for one service. A policy may learn from each view that it receives."""

    def place(self, seen: ServiceView) -> ReplicaPlacement: ...


class SpotHedge:
    """The policy of SkyServe (Mao et al., EuroSys 2025). The policy spreads replicas over the
    zones, adds one spare replica and uses on-demand as a fallback.

    While enough other zones are left, the policy avoids zones in which a replica was lost or
    refused. Each replica (including the spare) that is not ready on spot is replaced on demand, up
    to `replicas` on-demand replicas.
    """

    def __init__(self, service: ServiceTerms, spare: int = 1) -> None:
        self._service, self._spare = service, spare
        self._shunned: set[int] = set()
        self._turn = 0

    def place(self, seen: ServiceView) -> ReplicaPlacement:
        wanted = self._service.count + self._spare
        for zone in range(self._service.zones):
            if seen.lost[zone] or seen.failed[zone]:
                self._shunned.add(zone)
            elif seen.ages_s[zone]:
                self._shunned.discard(zone)
        if self._service.zones - len(self._shunned) <= min(1, self._service.zones - 3):
            self._shunned.clear()
        spot = [len(ages) for ages in seen.ages_s]
        while sum(spot) < wanted:
            spot[self._next(spot)] += 1
        return ReplicaPlacement(tuple(spot), min(self._service.count, max(0, wanted - seen.ready)))

    def _next(self, spot: list[int]) -> int:
        """Return the next zone in round-robin order. Zones without a replica of the service are
        preferred."""
        zones = [zone for zone in range(self._service.zones) if zone not in self._shunned] or list(
            range(len(spot))
        )
        self._turn += 1
        free = [zone for zone in zones if not spot[zone]] or zones
        return free[self._turn % len(free)]


class SteadyWeights(Struct, frozen=True, kw_only=True):
    """The constants of `SteadyPlacement`. The defaults were chosen on parts of the four SpotHedge
    traces. benchmarks/left_out.py tests constants on traces other than the traces on which the
    constants were chosen.
    """

    # the losses and the hours that the prior adds to the record of each zone
    prior_losses: float = 0.6
    prior_hr: float = 0.5
    # Replicas may be missing for the share of time that `availability` allows. All of this time may
    # occur while there is no spare, so at one moment the allowed risk is this many times the
    # average.
    thrift: float = 3.0
    # the number of additional on-demand replicas while there are fewer spot replicas than the
    # service needs
    scarce_backing: int = 2
    # after losses in this many zones within an hour, on-demand replicas also back up the remaining
    # spot replicas
    storm: int = 3
    # the weights of the service's replicas in the zone, of its replicas in the region, and of a
    # recent failure
    spread: float = 4.0
    near: float = 4.0
    recent: float = 4.0


_DEFAULTS = SteadyWeights()


class SteadyRecord(Struct, frozen=True, kw_only=True):
    """The state of `SteadyPlacement`. For each zone: the losses, the hours with replicas, and the
    times of the last failure and of the last loss. The record also has the time of the last
    decision and that decision's number of spares.
    """

    losses: tuple[float, ...]
    held_hr: tuple[float, ...]
    failed_s: tuple[float, ...]
    lost_s: tuple[float, ...]
    before_s: float
    spares: int


class SteadyPlacement:
    """Cavvy's policy: it prefers the zones that have kept their replicas longest, and adds spares
    only while the risk of a loss requires spares.

    Replicas are launched in the zones with the lowest loss rate, (losses + prior losses) / (hours
    with replicas + prior hours), preferably in zones and regions without replicas of the service.
    The policy assumes that a zone loses all its replicas at the same time, and that a loss becomes
    less likely the longer a zone has kept its replicas. The assumed losses per hour are the prior
    losses divided by the sum of two times in hours: the age of the zone's oldest replica, and the
    prior hours. The policy assumes that lost replicas are replaced after the time of one cold start
    and one tick, if too few others remain. Spares are added while the expected shortfall of
    replicas exceeds the allowed shortfall. On-demand replicas fill the gap until spot replicas are
    ready, and back up spot replicas that are scarce or at risk.
    """

    def __init__(
        self,
        service: ServiceTerms,
        weights: SteadyWeights = _DEFAULTS,
        record: SteadyRecord | None = None,
    ) -> None:
        zones = service.zones
        if record is None or len(record.losses) != zones:
            none, never = (0.0,) * zones, (NEVER_S,) * zones
            record = SteadyRecord(
                losses=none, held_hr=none, failed_s=never, lost_s=never, before_s=0.0, spares=0
            )
        self._service, self._weights = service, weights
        self._losses, self._held_hr = list(record.losses), list(record.held_hr)
        self._failed_at, self._lost_at = list(record.failed_s), list(record.lost_s)
        self._age_hr = [0.0] * zones
        self._before_s, self._spares = record.before_s, record.spares

    @property
    def record(self) -> SteadyRecord:
        """The state from which a new policy object can continue the work of this object."""
        return SteadyRecord(
            losses=tuple(self._losses),
            held_hr=tuple(self._held_hr),
            failed_s=tuple(self._failed_at),
            lost_s=tuple(self._lost_at),
            before_s=self._before_s,
            spares=self._spares,
        )

    def place(self, seen: ServiceView) -> ReplicaPlacement:
        self._learn(seen)
        need = self._service.count
        held = [len(ages) for ages in seen.ages_s]
        self._spares, risk = self._choose_spares(held, seen.now_s)
        spot = held.copy()
        excess = sum(spot) - need - self._spares
        # The limit keeps enough ready replicas: a replica that is still loading does not replace a
        # ready one.
        for _ in range(min(excess, seen.ready - need)):
            spot[self._worst(spot)] -= 1
        while sum(spot) < need + self._spares:
            spot[self._best(spot, seen.now_s)] += 1
        empty = [zone for zone in range(len(spot)) if not spot[zone]]
        # Replicas in the same zone are lost together, so one more is tried in an empty zone.
        if risk > self._allowed() and max(spot) > 1 and empty:
            spot[min(empty, key=lambda zone: (self._failed_at[zone], self.rate(zone)))] += 1
        backed = int(risk > self._allowed() or self._recently_lost() >= self._weights.storm)
        if sum(held) < need:
            backed = self._weights.scarce_backing
        return ReplicaPlacement(tuple(spot), min(need, max(0, need + backed - seen.ready)))

    def rate(self, zone: int) -> float:
        """Return the expected losses per hour in a zone, computed from the zone's record."""
        return (self._losses[zone] + self._weights.prior_losses) / (
            self._held_hr[zone] + self._weights.prior_hr
        )

    def _recently_lost(self) -> int:
        """Return the number of zones that lost a replica within the last hour."""
        return sum(self._before_s - at < _HOUR_S for at in self._lost_at)

    def _allowed(self) -> float:
        """Return how often per hour the service may lose so many replicas that it has too few."""
        return (
            self._weights.thrift
            * (1 - self._service.availability)
            * _HOUR_S
            / (self._service.cold_start_s + self._service.tick_s)
        )

    def _learn(self, seen: ServiceView) -> None:
        hours = (seen.now_s - self._before_s) / _HOUR_S
        self._before_s = seen.now_s
        for zone, ages in enumerate(seen.ages_s):
            self._age_hr[zone] = ages[0] / _HOUR_S if ages else 0.0
            if ages or seen.lost[zone]:
                self._held_hr[zone] += hours
            if seen.lost[zone]:
                self._losses[zone] += 1
                self._lost_at[zone] = seen.now_s
            if seen.failed[zone] or seen.lost[zone]:
                self._failed_at[zone] = seen.now_s

    def _choose_spares(self, held: list[int], now_s: float) -> tuple[int, float]:
        """Return the smallest number of spares with an acceptable risk, and the risk with the
        current replicas.

        If no number of spares is enough, the number with the lowest risk is returned.
        """
        need = self._service.count
        spot = held.copy()
        while sum(spot) > need:
            spot[self._worst(spot)] -= 1
        best = 0, inf
        for spares in range(_MOST_SPARES + 1):
            while sum(spot) < need + spares:
                spot[self._best(spot, now_s)] += 1
            risk = self._risk(spot)
            if risk < best[1] - 1e-9:
                best = spares, risk
            if risk <= self._allowed():
                break
        return best[0], self._risk(held)

    def _risk(self, spot: list[int]) -> float:
        """Return the expected number of losses per hour that leave too few replicas."""
        short = [
            zone
            for zone, count in enumerate(spot)
            if count and sum(spot) - count < self._service.count
        ]
        return sum(self._hazard(zone) for zone in short)

    def _hazard(self, zone: int) -> float:
        """Return the expected losses per hour in a zone, given how long the zone has kept its
        replicas. The longer a zone has kept its replicas, the lower the result.
        """
        return self._weights.prior_losses / (self._age_hr[zone] + self._weights.prior_hr)

    def _worst(self, spot: list[int]) -> int:
        """Return the zone from which to remove a replica: the zone for which the risk after the
        removal is lowest. If several zones are equally good, a zone with several replicas is
        chosen.
        """

        def without(zone: int) -> tuple[float, bool, float]:
            left = spot.copy()
            left[zone] -= 1
            return self._risk(left), spot[zone] == 1, -self.rate(zone)

        return min((zone for zone in range(len(spot)) if spot[zone]), key=without)

    def _best(self, spot: list[int], now_s: float) -> int:
        """Return the best zone for a launch: a zone with few losses, few replicas of the service
        and no recent failure.
        """

        def badness(zone: int) -> float:
            since = (now_s - self._failed_at[zone]) / _HOUR_S
            near = sum(spot[other] for other in self._service.together(zone))
            return self.rate(zone) * (
                1 + self._weights.spread * spot[zone] + self._weights.near * near
            ) + self._weights.recent / (0.05 + since)

        return min(range(self._service.zones), key=badness)
