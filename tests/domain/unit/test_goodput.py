"""Goodput: throughput by nodes, replicas and batch, times the progress per sample."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.goodput import (
    BatchLimits,
    GradientNoise,
    StepSeen,
    StepTimes,
    find_batch,
    fit_step_times,
    guess_step_times,
)
from cavvy.domain.values import replace

TIMES = StepTimes(
    compute_s=0.02,
    compute_sample_s=0.001,
    inside_s=0.01,
    inside_replica_s=0.001,
    between_s=0.05,
    between_replica_s=0.002,
    overlap=1.6,
)
NOISE = GradientNoise(batch=32, square=1.0, variance=100.0)
LIMITS = BatchLimits(least=32, most=4096, part_least=4, part_most=128)


def test_one_replica_exchanges_nothing() -> None:
    assert TIMES.step_s(1, 1, 100) == pytest.approx(0.12)
    assert TIMES.sync_s(1, 4) == pytest.approx(0.012)
    assert TIMES.sync_s(2, 4) == pytest.approx(0.054)


def test_computation_hides_a_part_of_the_exchange() -> None:
    step = TIMES.step_s(2, 8, 100)
    assert max(0.12, TIMES.sync_s(2, 8)) < step < 0.12 + TIMES.sync_s(2, 8)
    assert TIMES.step_s(2, 8, 100, parts=3) == pytest.approx(step + 2 * 0.12)


def test_formulas_take_arrays() -> None:
    samples = np.array([10.0, 100.0])
    assert TIMES.step_s(2, 8, samples) == pytest.approx([TIMES.step_s(2, 8, s) for s in samples])
    assert NOISE.efficiency(samples) == pytest.approx([NOISE.efficiency(float(s)) for s in samples])


def test_efficiency_is_that_of_the_gradient_noise_scale() -> None:
    scale = 32 * 100.0 / 1.0
    assert NOISE.efficiency(32.0) == 1
    assert NOISE.efficiency(320.0) == pytest.approx((scale + 32) / (scale + 320))
    # gradients without noise: a larger batch brings nothing
    calm = GradientNoise(batch=32, square=1.0, variance=0.0)
    assert calm.efficiency(64.0) == pytest.approx(0.5)
    # an estimate of the variance may be negative
    assert GradientNoise(batch=32, square=1.0, variance=-10.0).efficiency(64.0) == 0.5


def test_noise_decides_how_far_the_batch_grows() -> None:
    calm = GradientNoise(batch=32, square=1.0, variance=1.0)
    small = find_batch(TIMES, calm, LIMITS, 2, 8)
    large = find_batch(TIMES, NOISE, LIMITS, 2, 8)
    whole = find_batch(TIMES, None, LIMITS, 2, 8)
    assert small is not None
    assert large is not None
    assert whole is not None
    sizes = [each.samples * each.parts * 8 for each in (small, large, whole)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] == 4096


def test_batch_keeps_its_limits() -> None:
    for replicas in (1, 2, 8, 64):
        batch = find_batch(TIMES, NOISE, LIMITS, math.ceil(replicas / 4), replicas)
        assert batch is not None
        assert 4 <= batch.samples <= 128
        # rounded up to whole samples of each part, at most one each
        assert 32 <= batch.samples * batch.parts * replicas <= 4096 + batch.parts * replicas
    assert find_batch(TIMES, NOISE, LIMITS, 300, 1200) is None, "no sample for some replicas"


def test_one_replica_accumulates_two_parts_to_see_its_noise() -> None:
    batch = find_batch(TIMES, NOISE, LIMITS, 1, 1)
    assert batch is not None
    assert batch.samples * batch.parts > 32
    assert batch.parts >= 2
    smallest = find_batch(TIMES, NOISE, replace(LIMITS, most=32), 1, 1)
    assert smallest is not None
    assert (smallest.samples, smallest.parts) == (32, 1)


def see(nodes: int, replicas: int, samples: int) -> StepSeen:
    step = TIMES.step_s(nodes, replicas, samples)
    return StepSeen(
        nodes=nodes, replicas=replicas, samples=samples, part_s=TIMES.part_s(samples), step_s=step
    )


def test_fit_finds_the_times_of_measured_steps() -> None:
    seen = [see(n, r, s) for n, r in [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)] for s in (16, 64)]
    times = fit_step_times(seen)
    assert times.overlap == 1.6
    for nodes, replicas in [(1, 3), (3, 12), (8, 32)]:
        assert times.step_s(nodes, replicas, 100) == pytest.approx(
            TIMES.step_s(nodes, replicas, 100), rel=0.01
        )


def test_what_was_not_measured_is_assumed_to_be_fast() -> None:
    times = fit_step_times([see(1, 1, 32)])
    assert times.step_s(1, 1, 32) == pytest.approx(TIMES.step_s(1, 1, 32))
    assert times.step_s(2, 8, 32) == pytest.approx(times.step_s(1, 1, 32), rel=1e-3)
    inside = fit_step_times([see(1, 1, 32), see(1, 2, 32)])
    assert inside.sync_s(2, 2) >= inside.sync_s(1, 2) > 0.002
    assert times.overlap == 1, "nothing says that anything is hidden"
    # half of the time is taken to depend on the number of samples
    assert times.part_s(64) == pytest.approx(1.5 * times.part_s(32))


def test_small_batches_count_as_much_as_large_ones() -> None:
    points = [(1, 0.1), (2, 0.2), (100, 20.0)]
    seen = [
        StepSeen(nodes=1, replicas=1, samples=samples, part_s=part, step_s=part)
        for samples, part in points
    ]
    assert fit_step_times(seen).part_s(1) == pytest.approx(0.1, rel=0.15)
    # no time is negative: the best line that begins at 0 has this slope
    assert fit_step_times([seen[0], replace(seen[1], samples=10, part_s=2.0, step_s=2.0)]).part_s(
        1
    ) == pytest.approx(0.12)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        fit_step_times([])


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-4, 10), st.floats(0, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_any_measurements_give_times_that_are_finite(
    rows: list[tuple[int, int, float, float]],
) -> None:
    seen = [
        StepSeen(nodes=-(-r // 4), replicas=r, samples=s, part_s=part, step_s=part + sync)
        for r, s, part, sync in rows
    ]
    times = fit_step_times(seen)
    for each in seen:
        step = times.step_s(each.nodes, each.replicas, each.samples)
        assert 0 < step < math.inf


def test_another_type_is_guessed_by_its_speed() -> None:
    speeds = {"T4": 10.0, "A100": 40.0}
    guessed = guess_step_times({"T4": TIMES}, "A100", speeds)
    assert guessed is not None
    for nodes in (1, 2):
        assert guessed.step_s(nodes, 8, 64) == pytest.approx(TIMES.step_s(nodes, 8, 64) / 4)
    assert guess_step_times({"T4": TIMES}, "T4", speeds) is TIMES
    assert guess_step_times({}, "T4", speeds) is None
    assert guess_step_times({"T4": TIMES}, "H100", speeds) is None
