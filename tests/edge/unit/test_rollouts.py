"""Rollouts: waves, halts, and what a device is to serve."""

import random
from datetime import UTC, datetime, timedelta
from math import log

import pytest

from cavvy.capabilities.edge.nouns import (
    DeviceReport,
    EdgeDevice,
    ModelReport,
    Rollout,
    RolloutPhase,
)
from cavvy.capabilities.edge.rollouts import (
    SILENT,
    choose_versions,
    count_wave,
    decide_rollout,
    list_doubtful,
    order_devices,
)
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.domain.service_updates import RevisionSums
from cavvy.domain.values import replace

START = datetime(2026, 1, 1, tzinfo=UTC)


def make_devices(count: int, **more: object) -> list[EdgeDevice]:
    return [
        EdgeDevice(
            project="p", name=f"d{number}", site="lyon", key="0" * 64, enrolled_at=START, **more
        )
        for number in range(count)
    ]


def make_rollout(**more: object) -> Rollout:
    given: dict[str, object] = {"name": "m-1", "to": 2, "wave_at": START, "created_at": START}
    return Rollout(project="p", model="m", **{**given, **more})


class Fleet:
    """Devices that follow a rollout, with the given shares of failed requests by version. Requests
    to the new version take `slower` times as long."""

    def __init__(
        self, count: int, errors: dict[int, float], seed: int = 0, slower: float = 1.0
    ) -> None:
        self.now, self.random, self.errors = START, random.Random(seed), errors
        self.seconds = {1: 0.01, 2: 0.01 * slower}
        self.sums = {
            each.name: {1: RevisionSums(), 2: RevisionSums()} for each in make_devices(count)
        }
        self.devices = make_devices(count)
        self.exposed: set[str] = set()

    def step(self, rollout: Rollout, requests: int = 20) -> Rollout:
        """Let a minute pass."""
        self.now += timedelta(minutes=1)
        ordered = order_devices(rollout, self.devices)
        wave = {each.name for each in ordered[: count_wave(rollout, len(ordered))]}
        halted = rollout.phase is RolloutPhase.HALTED
        self.devices = [
            self._serve(each, each.name in wave and not halted, requests) for each in self.devices
        ]
        return decide_rollout(rollout, self.devices, self.now)

    def _serve(self, device: EdgeDevice, fresh: bool, requests: int) -> EdgeDevice:
        version = 2 if fresh else 1
        if fresh:
            self.exposed.add(device.name)
        failed = sum(self.random.random() < self.errors[version] for _ in range(requests))
        times = [
            log(self.seconds[version]) + self.random.gauss(0, 0.3) for _ in range(requests - failed)
        ]
        more = RevisionSums(
            requests=requests,
            errors=failed,
            timed=len(times),
            logs=sum(times),
            squares=sum(each * each for each in times),
        )
        self.sums[device.name][version] += more
        model = ModelReport(name="m", serving=version, sums=self.sums[device.name][version])
        return replace(device, report=DeviceReport(at=self.now, models=(model,)))


def run(fleet: Fleet, rollout: Rollout, minutes: int = 400) -> Rollout:
    for _ in range(minutes):
        rollout = fleet.step(rollout)
        if rollout.phase is not RolloutPhase.RUNNING:
            break
    return rollout


def test_a_good_version_reaches_all_devices_wave_by_wave() -> None:
    fleet, rollout = Fleet(200, {1: 0.01, 2: 0.01}), make_rollout()
    sizes = []
    while rollout.phase is RolloutPhase.RUNNING:
        rollout = fleet.step(rollout)
        sizes.append(len(fleet.exposed))
    assert rollout.phase is RolloutPhase.DONE
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 20, 40, 80, 160, 200]


def test_a_wave_grows_once_its_devices_serve_the_version_and_after_its_time_in_any_case() -> None:
    rollout = make_rollout(waves=(0.0, 1.0), wave=1, grown=4)
    devices = order_devices(rollout, make_devices(50))
    now = START + timedelta(minutes=2)

    def look(*serving: int, silent: int = 0, at: datetime = now) -> int:
        told = [
            replace(each, report=DeviceReport(at=at, models=(ModelReport(name="m", serving=one),)))
            for each, one in zip(devices, [*serving, *[1] * (50 - len(serving))], strict=True)
        ]
        for index in range(silent):
            told[index] = replace(told[index], report=DeviceReport(at=START - SILENT))
        return count_wave(decide_rollout(rollout, told, at), 50)

    assert look(2, 2, 2, 2) == 8
    assert look(2, 2, 2, 1) == 4, "one still fetches"
    assert look(1, 2, 2, 2, silent=1) == 8, "a device that is away holds nothing up"
    assert look(1, 1, 1, 1, silent=4) == 4, "nobody serves it"
    assert look(2, 2, 2, 1, at=START + timedelta(minutes=10)) == 50


@pytest.mark.parametrize("version", [1, 2])
def test_counts_that_are_limited_keep_their_share_of_errors(version: int) -> None:
    told = []
    for number, each in enumerate(make_devices(200)):
        requests, serving = (1050, version) if number % 4 == 0 else (6, 3 - version)
        sums = RevisionSums(requests=requests, errors=requests // 50)
        model = ModelReport(name="m", serving=serving, sums=sums)
        told.append(replace(each, report=DeviceReport(at=START, models=(model,))))
    early = START - timedelta(minutes=1)
    known = {
        each.name: ModelReport(name="m", serving=each.report.models[0].serving, at=early)
        for each in told
        if each.report
    }
    found = decide_rollout(make_rollout(waves=(1.0,), counted=known), told, START)
    sums = found.sums_new if version == 2 else found.sums_old
    assert sums.requests < 50 * 1050
    assert sums.errors / sums.requests == pytest.approx(0.02, rel=0.02)


def test_a_bad_version_halts_before_it_is_everywhere() -> None:
    fleet = Fleet(300, {1: 0.01, 2: 0.11})
    rollout = run(fleet, make_rollout())
    assert rollout.phase is RolloutPhase.HALTED
    assert "more of its requests fail" in rollout.reason
    assert len(fleet.exposed) <= 30


def test_good_versions_are_rarely_halted() -> None:
    halted = [
        run(Fleet(60, {1: 0.02, 2: 0.02}, seed), make_rollout(soak_s=300.0)).phase
        for seed in range(40)
    ]
    assert halted.count(RolloutPhase.HALTED) <= 2


def test_the_first_device_that_refuses_halts_the_rollout() -> None:
    rollout, devices = make_rollout(), make_devices(50)
    first = order_devices(rollout, devices)[0]
    model = ModelReport(name="m", serving=1, refused=2, problem="its engine ended")
    report = DeviceReport(at=START, models=(model,))
    devices = [replace(each, report=report) if each == first else each for each in devices]
    halted = decide_rollout(rollout, devices, START + timedelta(minutes=1))
    assert halted.phase is RolloutPhase.HALTED
    assert halted.reason == "1 of 1 devices refused it: its engine ended"


def test_a_device_that_is_away_does_not_hold_a_wave_up() -> None:
    rollout = make_rollout(waves=(1.0,))
    now = START + timedelta(hours=1)
    served = DeviceReport(at=now, models=(ModelReport(name="m", serving=2),))
    away = DeviceReport(at=now - SILENT, models=(ModelReport(name="m", serving=1),))
    devices = make_devices(3)
    devices = [
        replace(devices[0], report=away),
        *(replace(each, report=served) for each in devices[1:]),
    ]
    assert decide_rollout(rollout, devices, now).phase is RolloutPhase.DONE
    assert decide_rollout(rollout, [replace(devices[0], report=None)], now) == rollout


def test_a_halted_or_replaced_rollout_gives_the_former_version_back() -> None:
    device = make_devices(1)[0]
    done = make_rollout(to=1, phase=RolloutPhase.DONE)
    for phase in (RolloutPhase.HALTED, RolloutPhase.REPLACED):
        newer = make_rollout(name="m-2", phase=phase)
        assert choose_versions(device, [newer, done], {})["m"] == done
    running = make_rollout(name="m-2")
    assert choose_versions(device, [running, done], {})["m"] == done
    assert choose_versions(device, [running, done], {"m-2": frozenset({"d0"})})["m"] == running


@pytest.mark.parametrize(
    "device",
    [
        {"site": "paris"},
        {"labels": {"kind": "pi"}},
        {"labels": {"kind": "jetson", "residency": "us"}},
        {"labels": {"kind": "jetson", "residency": "eu"}, "retired_at": START},
    ],
)
def test_a_rollout_leaves_other_devices_alone(device: dict[str, object]) -> None:
    rollout = make_rollout(
        site="lyon", labels={"kind": "jetson"}, residency="eu", phase=RolloutPhase.DONE
    )
    mine = replace(make_devices(1)[0], labels={"kind": "jetson", "residency": "eu"})
    assert choose_versions(mine, [rollout], {}) == {"m": rollout}
    assert choose_versions(replace(mine, **device), [rollout], {}) == {}


def test_the_counts_of_a_device_that_starts_anew_are_added() -> None:
    rollout = make_rollout(waves=(1.0,), soak_s=3600.0)
    at = START + timedelta(minutes=1)
    for requests in (50, 80, 20, 60):  # started anew after 80
        sums = RevisionSums(requests=requests)
        report = DeviceReport(at=at, models=(ModelReport(name="m", serving=2, sums=sums),))
        device = replace(make_devices(1)[0], report=report)
        rollout = decide_rollout(rollout, [device], at)
        at += timedelta(minutes=1)
    assert rollout.sums_new.requests == 80 + 60


@pytest.mark.parametrize("restarts", [False, True])
def test_a_device_that_checks_in_often_counts_no_more_than_others(restarts: bool) -> None:
    def count(every_s: float) -> int:
        rollout, said = make_rollout(waves=(1.0,), soak_s=36_000.0), 0
        for look in range(720):  # an hour
            at = START + timedelta(seconds=5.0 * look)
            if not 5.0 * look % every_s:
                said = 50_000 - look if restarts else said + 50_000
                sums = RevisionSums(requests=said)
                report = DeviceReport(at=at, models=(ModelReport(name="m", serving=2, sums=sums),))
                device = replace(make_devices(1)[0], report=report)
            rollout = decide_rollout(rollout, [device], at)
        return rollout.sums_new.requests

    usual = count(60.0)
    assert usual == 60_000
    assert usual < count(5.0) <= 1.4 * usual, "12 times the usual without a limit"
    one = make_rollout(waves=(1.0,))
    for at in (START, START - timedelta(hours=1)):  # the clock of another server
        sums = RevisionSums(requests=10 if at == START else 500)
        report = DeviceReport(at=at, models=(ModelReport(name="m", serving=2, sums=sums),))
        one = decide_rollout(one, [replace(make_devices(1)[0], report=report)], START)
    assert one.sums_new.requests == 10


@pytest.mark.parametrize(("requests", "minutes"), [(1, 10), (0, 20)])
def test_each_wave_lasts_its_time_and_twice_that_without_requests(
    requests: int, minutes: int
) -> None:
    fleet, rollout = Fleet(5, {1: 0.0, 2: 0.0}), make_rollout(waves=(0.2, 0.4, 1.0), soak_s=600.0)
    waves = []
    for _ in range(3 * minutes):
        waves.append(rollout.wave)
        rollout = fleet.step(rollout, requests)
    assert waves == [0] * minutes + [1] * minutes + [2] * minutes
    assert rollout.phase is RolloutPhase.DONE


@pytest.mark.parametrize(
    ("tried", "refused", "halts"),
    [(1, 1, False), (2, 1, False), (3, 2, True), (20, 2, False), (20, 3, True)],
)
def test_one_of_ten_devices_may_refuse_a_version(tried: int, refused: int, halts: bool) -> None:
    now, devices = START + timedelta(minutes=1), make_devices(30)
    models = [ModelReport(name="m", serving=1, refused=2)] * refused
    models += [ModelReport(name="m", serving=2)] * (tried - refused)
    models += [ModelReport(name="m", serving=1)] * (30 - tried)
    devices = [
        replace(each, report=DeviceReport(at=now, models=(model,)))
        for each, model in zip(devices, models, strict=True)
    ]
    found = decide_rollout(make_rollout(waves=(1.0,)), devices, now)
    assert (found.phase is RolloutPhase.HALTED) is halts


def test_a_slower_version_halts() -> None:
    fleet = Fleet(60, {1: 0.01, 2: 0.01}, slower=2.0)
    rollout = run(fleet, make_rollout())
    assert rollout.phase is RolloutPhase.HALTED
    assert "times as long" in rollout.reason
    assert len(fleet.exposed) <= 6


def test_each_rollout_has_an_order_of_its_own() -> None:
    devices = make_devices(20)
    first = {order_devices(make_rollout(name=f"m-{each}"), devices)[0].name for each in range(9)}
    assert len(first) > 3


def test_a_wave_waits_for_the_trials_on_its_devices() -> None:
    rollout, now = make_rollout(waves=(1.0,)), START + timedelta(hours=1)
    for on_trial, phase in ((True, RolloutPhase.RUNNING), (False, RolloutPhase.DONE)):
        model = ModelReport(name="m", serving=2, on_trial=on_trial)
        report = DeviceReport(at=now, models=(model,))
        device = replace(make_devices(1)[0], report=report)
        assert decide_rollout(rollout, [device], now).phase is phase


@pytest.mark.parametrize("dead", range(4))
def test_a_device_that_never_checked_in_does_not_keep_a_rollout_in_its_first_wave(
    dead: int,
) -> None:
    rollout, now = make_rollout(waves=(0.0, 1.0)), START
    for _ in range(60):
        now += timedelta(minutes=1)
        served = ModelReport(name="m", serving=2)
        report = DeviceReport(at=now, models=(served,))
        devices = [
            each if number == dead else replace(each, report=report)
            for number, each in enumerate(make_devices(4))
        ]
        rollout = decide_rollout(rollout, devices, now)
    assert rollout.phase is RolloutPhase.DONE


def test_a_rollout_goes_on_without_the_devices_of_a_newer_one() -> None:
    rollout, now = make_rollout(waves=(1.0,)), START + timedelta(hours=1)
    newer = ModelReport(name="m", serving=3, sums=RevisionSums(requests=50, errors=50))
    mine = ModelReport(name="m", serving=2)
    devices = [
        replace(each, report=DeviceReport(at=now, models=(told,)))
        for each, told in zip(make_devices(2), (mine, newer), strict=True)
    ]
    assert decide_rollout(rollout, devices, now).phase is RolloutPhase.RUNNING
    decided = decide_rollout(rollout, devices, now, {"d1"})
    assert (decided.phase, decided.sums_old.requests) == (RolloutPhase.DONE, 0)
    replaced = decide_rollout(rollout, devices, now, {"d0", "d1"})
    assert replaced.phase is RolloutPhase.REPLACED


def test_a_rollout_without_devices_or_with_silent_ones_waits() -> None:
    now = START + timedelta(days=30)
    for devices in ([], make_devices(3)):
        rollout = make_rollout()
        assert decide_rollout(rollout, devices, now).phase is RolloutPhase.RUNNING


def test_new_devices_get_the_version_of_a_rollout_that_is_done() -> None:
    fleet, rollout = Fleet(3, {1: 0.0, 2: 0.0}), make_rollout(soak_s=0.0)
    rollout = fleet.step(rollout)
    fleet.devices = make_devices(5)
    fleet.sums |= Fleet(5, {}).sums
    rollout = run(fleet, rollout)
    assert rollout.phase is RolloutPhase.DONE
    assert len(fleet.exposed) == 5
    late = replace(make_devices(6)[5])
    assert choose_versions(late, [rollout], {}) == {"m": rollout}


class LiarFleet(Fleet):
    """A fleet in which one device, the first of the wave, says that most requests to the new version
    fail or take very long."""

    liar = ""

    def _serve(self, device: EdgeDevice, fresh: bool, requests: int) -> EdgeDevice:
        served = super()._serve(device, fresh, requests)
        if device.name != self.liar or not fresh or served.report is None:
            return served
        count = self.each_minute * int((self.now - START) / timedelta(minutes=1))
        sums = RevisionSums(requests=count, errors=self.share * count // 10)
        timed = count - sums.errors
        sums = replace(sums, timed=timed, logs=2.0 * timed, squares=4.1 * timed)
        model = ModelReport(name="m", serving=2, sums=sums)
        return replace(served, report=DeviceReport(at=self.now, models=(model,)))

    share, each_minute = 9, 900


@pytest.mark.parametrize(("share", "each_minute"), [(9, 900), (0, 900), (0, 20_000)])
def test_one_device_cannot_halt_a_rollout_and_does_not_hide_a_bad_version(
    share: int, each_minute: int
) -> None:
    for errors, phase in ((0.02, RolloutPhase.DONE), (0.3, RolloutPhase.HALTED)):
        fleet, rollout = LiarFleet(40, {1: 0.02, 2: errors}), make_rollout(waves=(0.2, 1.0))
        fleet.share, fleet.each_minute = share, each_minute
        fleet.liar = order_devices(rollout, fleet.devices)[2].name
        found = run(fleet, rollout)
        assert found.phase is phase, found.reason
        assert found.doubted == (fleet.liar,) or phase is RolloutPhase.HALTED


def test_the_first_refusal_in_a_wave_of_many_waits_for_a_second() -> None:
    now, rollout = START + timedelta(minutes=1), make_rollout(waves=(1.0,))
    told = [ModelReport(name="m", serving=1, refused=2), ModelReport(name="m", serving=1)]

    def decide(*models: ModelReport) -> RolloutPhase:
        pairs = zip(make_devices(len(models)), models, strict=True)
        devices = [replace(each, report=DeviceReport(at=now, models=(m,))) for each, m in pairs]
        return decide_rollout(rollout, devices, now).phase

    assert decide(told[0], told[1], told[1]) is RolloutPhase.RUNNING
    assert decide(told[0], told[0], told[1]) is RolloutPhase.HALTED
    assert decide(told[0]) is RolloutPhase.HALTED


def test_a_wave_whose_only_device_fell_silent_makes_way_for_others() -> None:
    rollout, devices = make_rollout(waves=(0.0, 1.0), soak_s=60.0), make_devices(5)
    first = order_devices(rollout, [replace(each, report=report_at(START)) for each in devices])[0]
    waves = []
    for minutes in range(0, 90, 5):
        now = START + timedelta(minutes=minutes)
        told = [
            replace(each, report=report_at(START if each.name == first.name else now))
            for each in devices
        ]
        rollout = decide_rollout(rollout, told, now)
        waves.append(rollout.wave)
    assert waves == [0] * 12 + [1] * 6
    everyone = [replace(each, report=report_at(START)) for each in devices]
    again = make_rollout(waves=(0.0, 1.0), soak_s=60.0)
    later = START + timedelta(days=3)
    assert decide_rollout(again, everyone, later).wave == 0, "the link to all of them is broken"


def test_a_version_that_takes_devices_off_the_network_does_not_reach_all() -> None:
    for waves, most in (((0.0, 0.02, 0.1, 1.0), 2), ((0.1, 1.0), 10), ((0.0, 0.01, 1.0), 1)):
        rollout, devices = make_rollout(waves=waves, soak_s=60.0), make_devices(100)
        devices = [replace(each, report=report_at(START)) for each in devices]
        reached: set[str] = set()
        for minutes in range(0, 600, 5):
            now = START + timedelta(minutes=minutes)
            ordered = order_devices(rollout, devices)
            devices = [
                each if each.name in reached else replace(each, report=report_at(now))
                for each in devices
            ]
            reached |= {each.name for each in ordered[: count_wave(rollout, len(ordered))]}
            rollout = decide_rollout(rollout, devices, now)
            if rollout.phase is not RolloutPhase.RUNNING:
                break
        assert len(reached) == most
        assert rollout.reason.endswith("of the wave fell silent"), rollout.reason


def test_devices_that_were_lost_before_a_rollout_do_not_halt_it() -> None:
    rollout, devices = make_rollout(waves=(0.0, 0.2, 1.0), soak_s=60.0), make_devices(20)
    ordered = order_devices(rollout, [replace(each, report=report_at(START)) for each in devices])
    lost = {each.name for each in ordered[:4]}
    waves = []
    for minutes in range(0, 180, 5):
        now = START + timedelta(minutes=minutes)
        before = START - timedelta(days=1)
        told = [
            replace(each, report=report_at(before if each.name in lost else now))
            for each in devices
        ]
        rollout = decide_rollout(rollout, told, now)
        waves.append(rollout.wave)
    assert rollout.phase is RolloutPhase.RUNNING
    assert set(waves) == {0, 1, 2}


def report_at(at: datetime) -> DeviceReport:
    return DeviceReport(at=at, models=(ModelReport(name="m", serving=1),))


def test_what_a_device_refused_in_an_earlier_rollout_does_not_halt_a_new_one() -> None:
    def refuse(in_rollout: int) -> list[EdgeDevice]:
        model = ModelReport(name="m", serving=1, refused=2, refused_in=in_rollout)
        at = START + timedelta(minutes=1)
        return [
            replace(each, report=DeviceReport(at=at, models=(model,))) for each in make_devices(3)
        ]

    again, now = make_rollout(name="m-4"), START + timedelta(minutes=1)
    assert decide_rollout(again, refuse(3), now).phase is RolloutPhase.RUNNING
    for number in (4, 0):  # 0: a program that does not tell in which one
        assert decide_rollout(again, refuse(number), now).phase is RolloutPhase.HALTED


FULL = "m@2 was not fetched: the disk has 5 MiB free"


class FullFleet:
    """Devices of which some cannot fetch the new version, as the agents report it."""

    def __init__(self, count: int, full: set[str]) -> None:
        self.full, self.now, self.devices = full, START, make_devices(count)

    def step(self, rollout: Rollout) -> Rollout:
        self.now += timedelta(minutes=1)
        ordered = order_devices(rollout, self.devices)
        wave = {each.name for each in ordered[: count_wave(rollout, len(ordered))]}
        self.devices = [self._report(each, each.name in wave) for each in self.devices]
        return decide_rollout(rollout, self.devices, self.now)

    def _report(self, device: EdgeDevice, wanted: bool) -> EdgeDevice:
        model = ModelReport(name="m", serving=2 if wanted else 1)
        if wanted and device.name in self.full:
            model = ModelReport(name="m", serving=1, unfetched=2, problem=FULL)
        return replace(device, report=DeviceReport(at=self.now, models=(model,)))

    def run(self, rollout: Rollout, minutes: int = 400) -> Rollout:
        for _ in range(minutes):
            rollout = self.step(rollout)
            if rollout.phase is not RolloutPhase.RUNNING:
                break
        return rollout


@pytest.mark.parametrize("waves", [(1.0,), (0.1, 0.5, 1.0)])
@pytest.mark.parametrize("full", [1, 4, 9])
def test_a_rollout_ends_without_devices_that_cannot_fetch(
    waves: tuple[float, ...], full: int
) -> None:
    rollout = make_rollout(waves=waves)
    ordered = [each.name for each in order_devices(rollout, make_devices(10))]
    rollout = FullFleet(10, set(ordered[:full])).run(rollout)
    assert rollout.phase is RolloutPhase.DONE
    named = ", ".join(sorted(ordered[:full])[:3]) + ", …" * (full > 3)
    assert rollout.reason == f"{full} of 10 devices could not fetch it ({named}): {FULL}"


def test_a_rollout_that_no_device_can_fetch_says_so_and_halts() -> None:
    fleet, rollout = FullFleet(4, {f"d{number}" for number in range(4)}), make_rollout()
    rollout = fleet.run(rollout, minutes=30)
    assert rollout.phase is RolloutPhase.RUNNING
    assert rollout.reason.startswith("4 of 4 devices could not fetch it (d0, d1, d2, …): m@2 was")
    rollout = fleet.run(rollout)
    assert rollout.phase is RolloutPhase.HALTED
    assert "4 of 4 devices could not fetch it" in rollout.reason


def test_a_device_that_can_fetch_again_gets_the_version_and_is_no_longer_named() -> None:
    rollout = make_rollout(waves=(1.0,), soak_s=7200)
    fleet = FullFleet(3, {"d1"})
    for _ in range(5):
        rollout = fleet.step(rollout)
    assert "(d1)" in rollout.reason
    fleet.full = set()
    rollout = fleet.step(rollout)
    assert rollout.reason == ""
    assert rollout.phase is RolloutPhase.RUNNING


def test_devices_that_seem_unable_are_no_part_of_the_first_wave() -> None:
    version = ModelVersion(
        project="p",
        name="m@2",
        snapshot="0" * 64,
        main="m.onnx",
        files=(ModelFile(path="m.onnx", sha256="0" * 64, size=10 << 20),),
        created_at=START,
    )

    def report(free_mib: int = 900, skew_s: float = 0.0, unfetched: int = 0) -> DeviceReport:
        model = ModelReport(name="m", serving=1, unfetched=unfetched)
        return DeviceReport(at=START, models=(model,), free_mib=free_mib, skew_s=skew_s)

    told = [report(free_mib=9), report(skew_s=9e6), report(unfetched=1), report(), None]
    devices = [replace(each, report=one) for each, one in zip(make_devices(5), told, strict=True)]
    doubtful = list_doubtful(devices, version)
    assert sorted(doubtful) == ["d0", "d1", "d2"]
    rollout = make_rollout(unable=dict.fromkeys(doubtful, ""))
    assert order_devices(rollout, devices)[0].name == "d3"
    assert decide_rollout(rollout, devices, START).reason == "", "none of them has tried it"
