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
    fit_host,
    read_measured,
    read_mpt,
    read_steps,
    read_unseen,
    read_vision,
)

from cavvy.planner.device_rates import DeviceRates, MeasuredRate, carry
from cavvy.planner.estimate.roofline import HOST_US
from cavvy.planner.estimate.table import CARRIED, estimate_memory

pytestmark = pytest.mark.skipif(not bench.DATA.is_dir(), reason=f"no measurements in {bench.DATA}")


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return [*read_steps(), *read_measured(), *(step for step, _ in read_unseen())]


@pytest.fixture(scope="module")
def published() -> list[Step]:
    return [*read_vision(), *read_mpt()]


def off(steps: list[Step]) -> list[float]:
    return [abs(error_of(step, bench.read_devices())) for step in steps]


def test_the_bars_of_families_that_are_left_out() -> None:
    """The worst steps wait for the host: densenet121 is off by 45 %, and took 42 % longer on one of
    two equal hosts than on the other; bert-base with 8 samples is off by 43 %, and launched the
    same kernels in 73 % of the time of 64 samples. The worst that kernels limit are MPT's of long
    sequences on H100, which ran with slower kernels (`read_mpt`), and Mixtral, whose experts wait
    for the host.
    """
    held = bench.hold_out()
    off = [abs(each.error) for each in held]
    assert len(off) > 300
    assert statistics.median(off) <= 0.08
    assert max(off) <= 0.47
    busy = [
        abs(each.error)
        for each in held
        if each.step.source != "MPT" and not bench.waits_for_host(each.step)
    ]
    assert len(busy) > 120
    assert sorted(busy)[-2] <= 0.25
    assert max(busy) <= 0.32
    inside = bench.find_inside(held)
    assert 0.85 <= statistics.mean(inside.values()) <= 0.95


def test_models_of_libraries_are_nearer_than_before_their_causes_were_mended() -> None:
    """With the constants of the host of other families. Before, the worst was off by 69 %, and the
    memory of two was too low.
    """
    said = list[str]()
    bench.check_unseen(said.append)
    held = {each.step: abs(each.error) for each in bench.hold_out()}
    rows = bench.read_unseen()
    assert len(rows) == 32
    assert max(held[step] for step, _ in rows) <= 0.33
    assert statistics.median(held[step] for step, _ in rows) <= 0.10
    assert not any(line.endswith("| no |") for line in said)


def test_the_constants_of_the_host_are_those_that_the_steps_give(steps: list[Step]) -> None:
    assert fit_host(steps, bench.read_devices()) == pytest.approx(dict(HOST_US), rel=0.02)


def test_a_step_measured_on_one_accelerator_predicts_it_on_another(steps: list[Step]) -> None:
    """The worst errors are of steps that wait for the host, which differ between hosts."""
    carried = sorted(abs(each) for each in bench.check_carried(steps, lambda line: None))
    assert len(carried) > 60
    assert statistics.median(carried) <= 0.035
    assert carried[int(0.9 * (len(carried) - 1))] <= CARRIED - 1


def test_the_cheapest_of_five_accelerators_is_found() -> None:
    """With prices that are in proportion to those of whole systems. The choice among today's offers
    is worse (docs/measured/estimate.md): the prices of a consumer card and of the data center's
    differ by less than the errors.
    """
    found = bench.check_cheapest(lambda line: None)
    offers = found["Lambda, offers, from a trace"]
    assert statistics.mean(each <= 0.05 for each in offers) >= 0.85
    for title, least in (("from a trace", 0.94), ("from one measured rate", 0.91)):
        more = found[f"Lambda, Lambda's prices of systems, {title}"]
        assert len(more) > 2000
        assert statistics.mean(each <= 0.05 for each in more) >= least


def test_step_time_of_published_measurements(published: list[Step]) -> None:
    """One constant was fitted to the MPT runs, and the rate of the RTX 3090 to its steps. The worst
    MPT steps, of long sequences on H100, ran with kernels of attention that the H100 runs slowly
    (`read_mpt`): they took up to 43 % longer than estimated.
    """
    mpt = off([each for each in published if each.source == "MPT"])
    assert len(mpt) > 70
    assert statistics.median(mpt) <= 0.095
    assert max(mpt) <= 0.31
    assert len(published) - len(mpt) > 70


def test_no_vision_model_is_far_off(published: list[Step]) -> None:
    """Attention whose heads are mixed by tiny products (cait) was once off by 142 %. No kernel was
    measured on an RTX 3090: those of an H200 and the data sheets are enough.
    """
    vision = off([each for each in published if each.source == "RTX3090"])
    assert statistics.median(vision) <= 0.065
    assert max(vision) <= 0.25


def test_peak_memory(steps: list[Step]) -> None:
    shares = [
        abs(estimate_memory(s.profile, s.run).peak / s.allocated_mib - 1)
        for s in steps
        if s.allocated_mib > 1024
    ]
    assert statistics.median(shares) <= 0.01
    assert max(shares) <= 0.14  # maxvit_tiny_tf, whose images are padded; others at most 10 %


def test_the_need_is_more_than_was_held_and_not_much_more(steps: list[Step]) -> None:
    """The excess is largest for small steps, whose 300 MiB for the driver were not counted as held,
    and for steps whose largest tensor is a large part of them (mlp, gru_512, compiled GPT-2). If
    another order of requests leaves no block for this tensor, the allocator reserves it once more.
    """
    excess = []
    for step in steps:
        needed = estimate_memory(step.profile, step.run).needed
        assert max(step.allocated_mib, step.reserved_mib) <= needed
        most = 1.52 if step.run.compile else 1.42
        assert needed <= most * step.reserved_mib + 1400
        excess.append(needed / step.reserved_mib - 1)
    assert statistics.median(excess) <= 0.15
    assert sum(each <= 0.40 for each in excess) >= 0.9 * len(excess)


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
