"""Tests the test that judges a canary, with requests drawn from a fixed seed."""

from math import comb, log, sqrt
from random import Random
from statistics import NormalDist

import msgspec
import pytest

from cavvy.control.decide.canary import (
    CanaryJudgement,
    CanaryTerms,
    add,
    draw_failed,
    find_tail,
    judge,
    observe,
    tilt,
)
from cavvy.domain.service_updates import (
    GROUP,
    CanaryTrial,
    NullDistribution,
    RevisionSums,
    UpdateEnd,
)
from cavvy.domain.values import replace

TERMS = CanaryTerms()


def add_up(logs: list[float], errors: int = 0) -> RevisionSums:
    """The sums that a gateway reports of requests with these logarithms of the latency."""
    groups = zip(*[iter(logs)] * GROUP, strict=False)
    means = [sum(each) / GROUP for each in groups]
    return RevisionSums(
        requests=len(logs) + errors,
        errors=errors,
        timed=len(logs),
        logs=sum(logs),
        squares=sum(each**2 for each in logs),
        groups=len(means),
        means=sum(means),
        mean_squares=sum(each**2 for each in means),
    )


def draw(random: Random, count: int, errors: float = 0.0, slower: float = 1.0) -> RevisionSums:
    failed = [random.random() < errors for _ in range(count)]
    logs = [log(slower) + random.gauss(0.0, 0.2) for each in failed if not each]
    return add_up(logs, sum(failed))


def draw_delayed(random: Random, count: int) -> RevisionSums:
    """Requests of which each four in a row share half of the variance of their latency."""
    shared = [random.gauss() for _ in range(0, count, 4)]
    return add_up([0.1 * (shared[each // 4] + random.gauss()) for each in range(count)])


def try_out(
    seed: int, errors: tuple[float, float] = (0.0, 0.0), slower: float = 1.0
) -> tuple[UpdateEnd, int]:
    """What the test says of a new revision that gets a fifth of the requests, and when."""
    random, trial, old, new = Random(seed), CanaryTrial(), RevisionSums(), RevisionSums()
    while True:
        old += draw(random, 40, errors[0])
        new += draw(random, 10, errors[1], slower)
        trial = observe(trial, old, new, TERMS)
        trial = msgspec.json.decode(msgspec.json.encode(trial), type=CanaryTrial)
        found = judge(trial, TERMS)
        if found.end is not None:
            return found.end, found.requests


def test_five_percent_more_latency_is_rolled_back() -> None:
    found = [try_out(seed, slower=1.05) for seed in range(5)]
    assert {end for end, _ in found} == {UpdateEnd.LATENCY}
    assert max(requests for _, requests in found) < 2000


@pytest.mark.parametrize("base", [0.0, 0.001])
def test_one_percent_more_errors_are_rolled_back(base: float) -> None:
    found = [try_out(seed, (base, base + 0.01)) for seed in range(5)]
    assert {end for end, _ in found} == {UpdateEnd.ERRORS}


def test_a_revision_that_is_equal_or_better_is_promoted() -> None:
    equal = [try_out(seed, (0.01, 0.01)) for seed in range(5)]
    better = try_out(0, (0.02, 0.0), slower=0.8)
    assert {*equal, better} == {(UpdateEnd.ENOUGH, 2000)}


def test_a_revision_that_only_fails_is_rolled_back_at_once() -> None:
    end, requests = try_out(0, (0.0, 1.0))
    assert end is UpdateEnd.ERRORS
    assert requests <= 20


def test_a_block_waits_until_each_revision_has_ten_requests() -> None:
    trial = observe(CanaryTrial(), RevisionSums(requests=900), RevisionSums(requests=9), TERMS)
    assert trial == CanaryTrial()
    trial = observe(trial, RevisionSums(requests=1000), RevisionSums(requests=10), TERMS)
    assert (trial.new.requests, trial.old.requests) == (10, 1000)


def test_a_gateway_that_counts_from_zero_again_adds_to_the_trial() -> None:
    trial = observe(CanaryTrial(), RevisionSums(requests=90), RevisionSums(requests=10), TERMS)
    trial = observe(trial, RevisionSums(requests=5), RevisionSums(requests=1), TERMS)
    trial = observe(trial, RevisionSums(requests=200), RevisionSums(requests=20), TERMS)
    assert (trial.new.requests, trial.old.requests) == (30, 290)


def test_a_load_that_slows_both_revisions_is_no_evidence() -> None:
    """All requests become three times as slow at once, while the new revision gets more of them."""
    random, trial, old, new = Random(3), CanaryTrial(), RevisionSums(), RevisionSums()
    for block in range(200):
        slower, share = (1.0, 10) if block < 100 else (3.0, 40)
        old += draw(random, 40, slower=slower)
        new += draw(random, share, slower=slower)
        trial = observe(trial, old, new, TERMS)
    found = judge(trial, TERMS)
    assert found.end is UpdateEnd.ENOUGH
    assert found.slower == pytest.approx(1.0, abs=0.02)


def test_few_equal_revisions_are_rolled_back_although_each_block_is_looked_at() -> None:
    """Errors alone, of which the distribution is exact: one of a hundred, with room for chance."""
    alarms = 0
    for seed in range(300):
        random, trial, old, new = Random(seed), CanaryTrial(), RevisionSums(), RevisionSums()
        terms = CanaryTerms(requests=500)
        while (end := judge(trial, terms).end) is None:
            failed, failed_new = (sum(random.random() < 0.02 for _ in range(10)) for _ in "on")
            old += RevisionSums(requests=10, errors=failed)
            new += RevisionSums(requests=10, errors=failed_new)
            trial = observe(trial, old, new, terms)
        alarms += end is not UpdateEnd.ENOUGH
    assert alarms <= 8  # more would be chance in 1 of 100 sets of seeds


def test_few_equal_revisions_are_rolled_back_although_their_requests_are_delayed_together() -> None:
    alarms = 0
    for seed in range(200):
        random, trial, old, new = Random(seed), CanaryTrial(), RevisionSums(), RevisionSums()
        terms = CanaryTerms(requests=500)
        while (end := judge(trial, terms).end) is None:
            old, new = old + draw_delayed(random, 40), new + draw_delayed(random, 20)
            trial = observe(trial, old, new, terms)
        alarms += end is not UpdateEnd.ENOUGH
    assert alarms <= 6  # more would be chance in 1 of 100 sets of seeds


def test_all_looks_together_spend_no_more_than_alpha() -> None:
    """The new revision's errors are as many as no look rolls back, so that all looks happen."""
    trial, old, new = CanaryTrial(), RevisionSums(), RevisionSums()
    for block in range(199):
        old += RevisionSums(requests=90, errors=1 + block % 2)
        new += RevisionSums(requests=10)
        trial = observe(trial, old, new, TERMS)
    walk = trial.failures
    assert 0.2 * TERMS.alpha < walk.spent < 0.5 * TERMS.alpha
    assert sum(walk.masses) + walk.spent == pytest.approx(1.0, abs=1e-9)


def test_the_last_look_spends_what_the_others_have_left() -> None:
    """11 of 100 errors at a share of a tenth are no evidence, 19 are: only for the last look."""
    found = {}
    for failed in (11, 19):
        trial = CanaryTrial(
            old=RevisionSums(requests=9000, errors=100 - failed),
            new=RevisionSums(requests=1000, errors=failed),
            failed=failed,
            failures=add(NullDistribution(), draw_failed(1000, 9000, 100)),
        )
        found[failed] = [judge(trial, TERMS, last=last).end for last in (False, True)]
    assert found == {11: [None, None], 19: [None, UpdateEnd.ERRORS]}


def test_the_last_look_spends_no_more_than_the_others_have_left() -> None:
    """The chance that no difference is found to be one, over all looks and both kinds of evidence,
    at the least evidence for which the last look rolls back.
    """
    random, trial, old, new = Random(7), CanaryTrial(), RevisionSums(), RevisionSums()
    for block in range(199):
        old += draw(random, 90) + RevisionSums(requests=1, errors=1 + block % 2)
        new += draw(random, 10)
        trial = observe(trial, old, new, TERMS)
    assert trial.found is None

    def roll_back(failed: int, shift: float) -> UpdateEnd | None:
        return judge(replace(trial, failed=failed, shift=shift), TERMS, last=True).end

    failed = next(each for each in range(200) if roll_back(each, 0.0) is UpdateEnd.ERRORS)
    tenths = next(each for each in range(999) if roll_back(0, each / 10) is UpdateEnd.LATENCY)
    spread = sqrt(trial.deviation / trial.free * trial.information)
    by_latency = 1 - NormalDist().cdf(tenths / 10 / spread)
    spent = trial.failures.spent + trial.shifts.spent
    assert spent > 0.35 * TERMS.alpha
    assert min(by_latency, find_tail(trial.failures, failed)) > 0.02 * TERMS.alpha
    assert spent + by_latency + find_tail(trial.failures, failed) < 0.8 * TERMS.alpha


@pytest.mark.parametrize("sizes", [(10, 90, 1), (10, 90, 95), (10, 10, 10), (50, 450, 40)])
def test_failed_requests_have_the_hypergeometric_distribution(sizes: tuple[int, int, int]) -> None:
    new, old, failed = sizes
    found = draw_failed(new, old, failed)
    for value, mass in enumerate(found.masses, found.first):
        ways = comb(new, value) * comb(old, failed - value) / comb(new + old, failed)
        assert mass == pytest.approx(ways, rel=1e-6, abs=1e-12)


def test_a_trial_without_requests_has_no_evidence() -> None:
    assert judge(CanaryTrial(), TERMS, last=True) == CanaryJudgement()


def test_one_very_long_request_among_few_is_no_evidence() -> None:
    random, old, new = Random(1), draw(Random(2), 360), draw(Random(3), 39)
    long = RevisionSums(requests=1, timed=1, logs=log(60), squares=log(60) ** 2)
    trial = observe(CanaryTrial(), old, new + long, TERMS)
    assert trial.found is None
    slower = old + draw(random, 90), new + long + draw(random, 40, slower=2.0)
    assert observe(trial, *slower, TERMS).found is UpdateEnd.LATENCY


def begin_at_earlier_version(new: RevisionSums) -> CanaryTrial:
    """A trial as Cavvy stored it when it weighed other statistics."""
    old = draw(Random(1), 900, 0.01)
    stored = {
        "old": old,
        "new": new,
        "counted_old": old,
        "counted_new": new,
        "errors": [0.1, 0.2, 0.3],
        "slower": 1.2,
        "weight": 90.0,
        "deviation": 36.0,
        "free": 995,
    }
    return msgspec.json.decode(msgspec.json.encode(stored), type=CanaryTrial)


def test_a_trial_that_an_earlier_version_began_ends_without_another_request() -> None:
    trial = begin_at_earlier_version(draw(Random(2), 100))
    assert judge(trial, TERMS).end is None
    found = judge(trial, TERMS, last=True)
    assert (found.end, found.requests) == (None, 100)


def test_a_trial_that_an_earlier_version_began_is_rolled_back_if_all_requests_fail() -> None:
    trial = begin_at_earlier_version(new := draw(Random(2), 100))
    old = trial.counted_old
    for _ in range(10):
        old, new = old + draw(Random(3), 40), new + RevisionSums(requests=10, errors=10)
        trial = observe(trial, old, new, TERMS)
    assert judge(trial, TERMS).end is UpdateEnd.ERRORS


def test_a_restarted_gateway_with_as_many_requests_begins_at_0() -> None:
    old, new = draw(Random(1), 40), draw(Random(2), 20)
    trial = observe(CanaryTrial(), old, new, TERMS)
    failing = RevisionSums(requests=40, errors=40)
    trial = observe(trial, old + old, failing, TERMS)
    assert (trial.new.requests, trial.new.errors, trial.new.timed) == (60, 40, 20)


def test_a_distribution_of_many_failures_is_tilted_without_a_division_by_zero() -> None:
    """Of a fleet of 100,000 devices: the masses of the upper tail, and high powers of the odds, are
    0 as floats."""
    known = NullDistribution(first=0, masses=(0.25, 0.5, 0.25, *[0.0] * 20_000))
    tilted = tilt(known, 3.0)
    assert sum(tilted.masses) == pytest.approx(1)
    assert tilted.masses[:3] == pytest.approx((1 / 16, 6 / 16, 9 / 16))
