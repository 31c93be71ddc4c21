"""The bars that estimates are held to, on what was measured; skipped where the measurements are
absent.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from benchmarks import estimate as bench
from benchmarks.estimate_steps import (
    Step,
    error_of,
    fit,
    flatten,
    read_mpt,
    read_steps,
    read_vision,
)

from cavvy.planner.device_rates import DeviceRates, MeasuredRate, carry
from cavvy.planner.estimate.roofline import CALIBRATED, RooflineConstants
from cavvy.planner.estimate.table import estimate_memory

pytestmark = pytest.mark.skipif(not bench.DATA.is_dir(), reason=f"no measurements in {bench.DATA}")


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return read_steps()


@pytest.fixture(scope="module")
def published() -> list[Step]:
    return [*read_vision(), *read_mpt()]


def off(steps: list[Step], constants: RooflineConstants = CALIBRATED) -> list[float]:
    return [abs(error_of(step, constants)) for step in steps]


def test_step_time_of_models_that_calibration_has_not_seen(
    steps: list[Step], published: list[Step]
) -> None:
    """Two families, since a fit takes half a minute; docs/reference/estimate.md has all."""
    families = {"BERT", "transformers for images"}
    known = [each for each in (*steps, *published) if each.family not in families]
    unseen = off(
        [each for each in steps if each.family in families], fit(known, CALIBRATED, rounds=2)
    )
    assert len(unseen) == 9
    assert statistics.median(unseen) <= 0.10
    assert max(unseen) <= 0.30


def test_step_time_of_published_measurements(published: list[Step]) -> None:
    mpt = off([each for each in published if each.source == "MPT"])
    assert len(mpt) > 70
    assert statistics.median(mpt) <= 0.05
    assert max(mpt) <= 0.30
    assert len(published) - len(mpt) > 70


def test_no_vision_model_is_far_off(published: list[Step]) -> None:
    """Attention whose heads are mixed by tiny products (cait) was once off by 142 %."""
    assert max(off([each for each in published if each.source == "RTX3090"])) <= 0.30


def test_the_shipped_constants_are_those_of_the_fit(
    steps: list[Step], published: list[Step]
) -> None:
    fitted = flatten(fit([*steps, *published], CALIBRATED, rounds=1))
    assert flatten(CALIBRATED) == pytest.approx(fitted, rel=0.06)


def test_peak_memory(steps: list[Step]) -> None:
    shares = [abs(estimate_memory(s.profile, s.run).peak / s.allocated_mib - 1) for s in steps]
    assert statistics.median(shares) <= 0.01
    assert max(shares) <= 0.10


def test_the_need_is_more_than_was_held_and_not_much_more(steps: list[Step]) -> None:
    for step in steps:
        needed = estimate_memory(step.profile, step.run).needed
        assert max(step.allocated_mib, step.reserved_mib) <= needed
        assert needed <= 1.25 * step.reserved_mib + 1024


@pytest.mark.parametrize(("title", "read"), bench.TITLES)
def test_rates_on_an_accelerator_that_was_not_seen(
    title: str, read: Callable[[], Iterator[bench.Row]]
) -> None:
    groups: dict[tuple[str, ...], list[tuple[DeviceRates, int, float, str]]] = defaultdict(list)
    for key, name, count, rate, precision in read():
        if device := bench.find_device(name):
            groups[key].append((device, count, rate, precision))
    shares = [
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
    assert len(shares) > 100
    assert statistics.median(shares) <= 0.15


def test_the_range_of_a_scaled_duration_holds_four_of_five_measurements() -> None:
    inside = bench.check_pairs(list(bench.read_foundry()), lambda line: None)
    assert len(inside) > 1000
    assert statistics.mean(inside) >= 0.8
