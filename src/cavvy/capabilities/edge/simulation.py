"""Simulates the rollout of a model to many devices on virtual time, with the rule of the server
(`control.decide.rollouts`): links that a site shares, power cuts, devices that are away, and models
that are worse."""

import random
from datetime import UTC, datetime, timedelta
from math import log

from cavvy.capabilities.edge.nouns import (
    DeviceReport,
    EdgeDevice,
    ModelReport,
    Rollout,
    RolloutPhase,
)
from cavvy.capabilities.edge.rollouts import count_wave, decide_rollout, order_devices
from cavvy.domain.service_updates import RevisionSums
from cavvy.domain.values import Struct

_START = datetime(2026, 1, 1, tzinfo=UTC)
_STEP = timedelta(minutes=1)  # in which each device that is there checks in
_DAY_MIN = 1440
_OLD, _FETCHING, _TRIAL, _NEW, _REFUSED = range(5)
_TRIES = 3  # starts of a trial, as in edge/slots.py
# The devices with the old version are alike, so that the requests of these show how good it is.
_COMPARED = 2000
_LOG, _SPREAD = log(0.01), 0.3  # of the natural logarithm of a latency in seconds


class EdgeScenario(Struct, frozen=True, kw_only=True):
    """A fleet and a new version. `offline` is the share of time for which a device is away, for
    `away_min` minutes at a time on average. The new version fails `worse` more of its requests than
    the old one, which fails `errors`, and its trial fails on the share `refuses` of the devices."""

    devices: int = 100_000
    sites: int = 100
    size_mib: float = 20.0  # that a device fetches
    site_mib_per_s: float = 12.0  # for all devices of a site
    cuts_per_day: float = 1.0  # power cuts of a device
    offline: float = 0.1
    away_min: float = 120.0
    requests_per_min: int = 6
    errors: float = 0.02
    worse: float = 0.0
    refuses: float = 0.0
    soak_s: float = 600.0
    days: float = 2.0  # after which the simulation ends
    seed: int = 0


class EdgeOutcome(Struct, frozen=True, kw_only=True):
    """How a rollout ended. `exposed` devices had answered requests by the new version by then, of
    which `failed` of `requests` failed."""

    phase: RolloutPhase
    reason: str
    wave: int
    minutes: int
    exposed: int
    serving: int
    refused: int
    requests: int
    failed: int
    power_cuts: int
    fetched_gib: float


class _Fleet:
    """The devices in the order of the rollout."""

    def __init__(self, scenario: EdgeScenario, rollout: Rollout) -> None:
        self._options, self._rng = scenario, random.Random(scenario.seed)
        known = ModelReport(name=rollout.model, serving=1)
        first = DeviceReport(at=_START, models=(known,))
        made = [
            EdgeDevice(
                project="p",
                name=f"d{scenario.seed}-{index}",
                site=f"s{index % scenario.sites}",
                key="",
                enrolled_at=_START,
                report=first,
            )
            for index in range(scenario.devices)
        ]
        self.devices = list(order_devices(rollout, made))
        count = len(made)
        self.stages = [_OLD] * count
        self.exposed: set[int] = set()
        self.requests = self.failed = self.power_cuts = 0
        self.fetched_mib = 0.0
        self._left = [scenario.size_mib] * count
        self._tries = [0] * count
        self._sums = [RevisionSums()] * count
        self._back_at = [
            self._find_absence() if self._rng.random() < scenario.offline else 0.0 for _ in made
        ]
        # of a device that is there, in each minute
        there = max(1e-9, 1 - scenario.offline)
        self._leaves = scenario.offline / there / scenario.away_min
        self._cut = scenario.cuts_per_day / _DAY_MIN

    def step(self, rollout: Rollout, minute: int) -> None:
        """Let one minute pass."""
        wave = count_wave(rollout, len(self.devices))
        there = [each for each in range(wave) if self._is_there(each, minute)]
        self._fetch([each for each in there if self.stages[each] <= _FETCHING])
        for each in there:
            self._run(each)
            self._report(each, rollout, minute)
        for each in range(wave, min(wave + _COMPARED, len(self.devices))):
            if self._is_there(each, minute):
                self._answer(each)
                self._report(each, rollout, minute)

    def _is_there(self, index: int, minute: int) -> bool:
        if self._back_at[index] > minute:
            return False
        if self._rng.random() < self._leaves:
            self._back_at[index] = minute + self._find_absence()
            return False
        return True

    def _find_absence(self) -> float:
        return self._rng.expovariate(1 / self._options.away_min)

    def _fetch(self, fetching: list[int]) -> None:
        """Share each site's link among its devices that fetch. A part outlives a power cut."""
        sites: dict[str, list[int]] = {}
        for each in fetching:
            sites.setdefault(self.devices[each].site, []).append(each)
        for members in sites.values():
            share = 60 * self._options.site_mib_per_s / len(members)
            for each in members:
                got = min(share, self._left[each])
                self.fetched_mib += got
                self._left[each] -= got
                self.stages[each] = _FETCHING if self._left[each] > 0 else _TRIAL

    def _run(self, index: int) -> None:
        """A trial lasts until the next minute; the device may lose its power in it."""
        stage = self.stages[index]
        if self._rng.random() < self._cut:
            self.power_cuts += 1
            self._sums[index] = RevisionSums()
            if stage == _TRIAL:
                self._tries[index] += 1
                if self._tries[index] >= _TRIES:
                    self.stages[index] = _REFUSED
            return
        if stage == _TRIAL:
            self._sums[index] = RevisionSums()
            bad = self._rng.random() < self._options.refuses
            self.stages[index] = _REFUSED if bad else _NEW
        self._answer(index)

    def _answer(self, index: int) -> None:
        is_new, options = self.stages[index] == _NEW, self._options
        share, count = options.errors + options.worse * is_new, options.requests_per_min
        errors = sum(self._rng.random() < share for _ in range(count))
        logs = [self._rng.gauss(_LOG, _SPREAD) for _ in range(count - errors)]
        self._sums[index] += RevisionSums(
            requests=count,
            errors=errors,
            timed=len(logs),
            logs=sum(logs),
            squares=sum(each * each for each in logs),
        )
        if is_new:
            self.exposed.add(index)
            self.requests += count
            self.failed += errors

    def _report(self, index: int, rollout: Rollout, minute: int) -> None:
        stage = self.stages[index]
        told = ModelReport(
            name=rollout.model,
            serving=rollout.to if stage == _NEW else 1,
            refused=rollout.to if stage == _REFUSED else 0,
            problem="its trial failed" if stage == _REFUSED else "",
            sums=self._sums[index],
        )
        report = DeviceReport(at=_START + minute * _STEP, models=(told,))
        old = self.devices[index]
        self.devices[index] = EdgeDevice(
            project=old.project,
            name=old.name,
            site=old.site,
            key="",
            enrolled_at=_START,
            report=report,
        )


def simulate_rollout(scenario: EdgeScenario) -> EdgeOutcome:
    """Roll the new version out until the rule has decided, or the time of the scenario is over."""
    rollout = Rollout(
        project="p",
        name=f"m-{scenario.seed + 1}",
        model="m",
        to=2,
        wave_at=_START,
        soak_s=scenario.soak_s,
        created_at=_START,
    )
    fleet, minute = _Fleet(scenario, rollout), 0
    while rollout.phase is RolloutPhase.RUNNING and minute < scenario.days * _DAY_MIN:
        minute += 1
        fleet.step(rollout, minute)
        rollout = decide_rollout(rollout, fleet.devices, _START + minute * _STEP)
    return EdgeOutcome(
        phase=rollout.phase,
        reason=rollout.reason,
        wave=rollout.wave,
        minutes=minute,
        exposed=len(fleet.exposed),
        serving=fleet.stages.count(_NEW),
        refused=fleet.stages.count(_REFUSED),
        requests=fleet.requests,
        failed=fleet.failed,
        power_cuts=fleet.power_cuts,
        fetched_gib=fleet.fetched_mib / 1024,
    )
