"""Runs the placement policy of a service on recorded spot capacity, tick by tick, as in the
evaluation of SpotHedge.

A replica is billed from its launch on, and is ready after the cold start. If a zone loses capacity,
the simulation ends the youngest replicas in the zone. The cost is divided by the cost of running
all replicas on demand. The availability is the share of ticks with enough ready replicas. Neither
the cost nor the availability includes the time of the first cold start.
"""

from collections.abc import Sequence
from pathlib import Path

from cavvy.capabilities.serving.autoscaler.placement import (
    PlacementPolicy,
    ServiceTerms,
    ServiceView,
)
from cavvy.capabilities.simulation.traces.readers import list_traces, read_series
from cavvy.domain.values import Struct

# assumed capacity of a zone if its trace records only whether there is any capacity
_UNLIMITED = 1_000_000


class ServingResult(Struct, frozen=True, kw_only=True):
    """The result of simulating one window. `floor` is a lower bound of the cost. The bound assumes
    that launches are free and instant, so that in each tick the lowest price is paid.
    """

    cost: float
    availability: float
    floor: float


class SpotCapacity(Struct, frozen=True, kw_only=True):
    """The number of available spot replicas as `counts[zone][tick]`, the region of each zone, and
    the number of ticks that all zones have in common.
    """

    counts: tuple[tuple[int, ...], ...]
    regions: tuple[str, ...]
    ticks: int


def read_capacity(folder: Path, *, tick_s: float, unlimited: bool = False) -> SpotCapacity:
    """Read all traces of a folder and convert them to ticks of the same length. With `unlimited`, a
    zone that has any capacity can take any number of replicas.
    """
    zones = [read_series(path) for path in list_traces([folder])]
    counts = []
    for zone in zones:
        repeats = round(zone.gap_s / tick_s)
        counts.append(
            tuple(n * _UNLIMITED if unlimited else n for n in zone.counts for _ in range(repeats))
        )
    return SpotCapacity(
        counts=tuple(counts),
        regions=tuple(zone.market.region for zone in zones),
        ticks=min(map(len, counts)),
    )


def window(capacity: SpotCapacity, start: int, ticks: int) -> list[tuple[int, ...]]:
    """Return the capacity of every zone for `ticks` ticks, starting at tick `start`. Raises
    ValueError if the traces are too short.
    """
    if start + ticks > capacity.ticks:
        raise ValueError(
            f"{ticks} ticks from tick {start} exceed the traces, which have {capacity.ticks} ticks"
        )
    return [zone[start : start + ticks] for zone in capacity.counts]


def serve(
    capacity: Sequence[Sequence[int]],
    service: ServiceTerms,
    policy: PlacementPolicy,
    *,
    on_demand_ratio: float = 3.0,
) -> ServingResult:
    """Run one service over one window. `capacity[zone][tick]` is the number of available spot
    replicas; `on_demand_ratio` is the on-demand price divided by the spot price.
    """
    state = _Window(service, on_demand_ratio)
    for tick in range(len(capacity[0])):
        state.step(policy, [zone[tick] for zone in capacity])
    return state.result()


class _Window:
    """The state of the simulation of one window. Each replica is stored as the number of the tick
    in which it was launched, oldest first.
    """

    def __init__(self, service: ServiceTerms, ratio: float) -> None:
        self._service, self._ratio = service, ratio
        self._cold = round(service.cold_start_s / service.tick_s)
        self._spot: list[list[int]] = [[] for _ in range(service.zones)]
        self._demand: list[int] = []
        self._lost = [0] * service.zones
        self._failed = [0] * service.zones
        self._tick = self._counted = self._met = 0
        self._paid = self._floor = 0.0

    def step(self, policy: PlacementPolicy, capacity: Sequence[int]) -> None:
        now = self._tick
        wanted = policy.place(self._seen(now))
        for zone, held in enumerate(self._spot):
            before = len(held)
            del held[wanted.spot[zone] :]
            kept = len(held)
            held += [now] * (wanted.spot[zone] - kept)
            taken = max(0, len(held) - capacity[zone])
            del held[len(held) - taken :]
            self._lost[zone] = max(0, min(before, kept) - len(held))
            self._failed[zone] = taken - self._lost[zone]
        del self._demand[wanted.on_demand :]
        self._demand += [now] * (wanted.on_demand - len(self._demand))
        if now >= self._cold:
            self._count(now, capacity)
        self._tick += 1

    def result(self) -> ServingResult:
        whole = self._counted * self._service.replicas * self._ratio
        return ServingResult(
            cost=self._paid / whole,
            availability=self._met / self._counted,
            floor=self._floor / whole,
        )

    def _count(self, now: int, capacity: Sequence[int]) -> None:
        need = self._service.replicas
        self._counted += 1
        self._met += self._ready(now) + self._ready_on_demand(now) >= need
        self._paid += sum(map(len, self._spot)) + self._ratio * len(self._demand)
        spot = min(need, sum(capacity))
        self._floor += spot + self._ratio * (need - spot)

    def _seen(self, now: int) -> ServiceView:
        tick_s = self._service.tick_s
        return ServiceView(
            now * tick_s,
            tuple(tuple((now - since) * tick_s for since in held) for held in self._spot),
            tuple(self._lost),
            tuple(self._failed),
            self._ready(now - 1),
            self._ready_on_demand(now - 1),
        )

    def _ready(self, now: int) -> int:
        return sum(now - since >= self._cold for held in self._spot for since in held)

    def _ready_on_demand(self, now: int) -> int:
        return sum(now - since >= self._cold for since in self._demand)
