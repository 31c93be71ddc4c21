"""The bars that estimates are held to, on what was measured; skipped where the measurements are
absent.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from benchmarks import estimate as bench

from cavvy.planner.estimate.devices import DeviceRates, device_of
from cavvy.planner.estimate.memory import estimate_memory
from cavvy.planner.estimate.roofline import CALIBRATED, estimate_step
from cavvy.planner.estimate.transfer import MeasuredRate, carry

pytestmark = pytest.mark.skipif(not bench.DATA.is_dir(), reason=f"no measurements in {bench.DATA}")


@pytest.fixture(scope="module")
def steps() -> list[bench.Step]:
    return bench.read_steps()


@pytest.fixture(scope="module")
def h200() -> DeviceRates:
    device = device_of("H200")
    assert device is not None
    return device


def test_step_time_of_a_model_that_calibration_has_not_seen(
    steps: list[bench.Step], h200: DeviceRates
) -> None:
    off = []
    for model in {step.model for step in steps}:
        constants = bench.fit([step for step in steps if step.model != model], h200)
        mine = [step for step in steps if step.model == model]
        off += [
            abs(estimate_step(s.profile, h200, s.run, constants).total / s.step_s - 1) for s in mine
        ]
    assert len(off) == len(steps) == 28
    assert statistics.median(off) <= 0.15


def test_the_shipped_constants_are_those_of_the_fit(
    steps: list[bench.Step], h200: DeviceRates
) -> None:
    fitted = bench.fit(steps, h200)
    for name in (
        "half",
        "tf32",
        "fp32",
        "conv",
        "attention",
        "memory",
        "reduction",
        "layout",
        "host_us",
    ):
        assert getattr(CALIBRATED, name) == pytest.approx(getattr(fitted, name), rel=0.01)


def test_peak_memory(steps: list[bench.Step]) -> None:
    off = [abs(estimate_memory(s.profile, s.run).peak / s.allocated_mib - 1) for s in steps]
    assert statistics.median(off) <= 0.10
    assert max(off) <= 0.20


def test_the_need_is_never_below_what_was_held(steps: list[bench.Step]) -> None:
    for step in steps:
        assert estimate_memory(step.profile, step.run).needed >= max(
            step.allocated_mib, step.reserved_mib
        )


@pytest.mark.parametrize(("title", "read"), bench.TITLES)
def test_rates_on_an_accelerator_that_was_not_seen(
    title: str, read: Callable[[], Iterator[bench.Row]]
) -> None:
    groups: dict[tuple[str, ...], list[tuple[DeviceRates, int, float, str]]] = defaultdict(list)
    for key, name, count, rate, precision in read():
        if device := bench.find_device(name):
            groups[key].append((device, count, rate, precision))
    off = [
        abs(carry(others, device, count, precision) / rate - 1)
        for rows in groups.values()
        for device, count, rate, precision in rows
        if (
            others := [
                MeasuredRate(device=d, count=n, rate=r)
                for d, n, r, _ in rows
                if d.name != device.name
            ]
        )
    ]
    assert len(off) > 100
    assert statistics.median(off) <= 0.15


def test_the_range_of_a_scaled_duration_holds_four_of_five_measurements() -> None:
    inside = bench.check_pairs(list(bench.read_foundry()), lambda line: None)
    assert len(inside) > 1000
    assert statistics.mean(inside) >= 0.8
