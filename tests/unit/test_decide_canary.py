"""Tests the test that judges a canary, with requests drawn from a fixed seed."""

from math import log
from random import Random

import msgspec
import pytest

from cavvy.control.decide.canary import (
    CanaryCause,
    CanaryTerms,
    CanaryTrial,
    CanaryVerdict,
    RevisionSums,
    judge,
    observe,
)

TERMS = CanaryTerms()
VERDICTS = CanaryVerdict


def draw(random: Random, count: int, errors: float = 0.0, slower: float = 1.0) -> RevisionSums:
    sums = RevisionSums()
    for _ in range(count):
        failed = random.random() < errors
        value = 0.0 if failed else log(slower) + random.gauss(0.0, 0.2)
        sums += RevisionSums(
            requests=1, errors=failed, timed=not failed, logs=value, squares=value**2
        )
    return sums


def try_out(
    seed: int, errors: tuple[float, float] = (0.0, 0.0), slower: float = 1.0, size: int = 10
) -> tuple[CanaryVerdict, CanaryCause, int]:
    """What the test says of a new revision that gets a fifth of the requests, and when."""
    random, trial = Random(seed), CanaryTrial()
    while True:
        old = draw(random, 4 * size, errors[0])
        trial = observe(trial, old, draw(random, size, errors[1], slower))
        trial = msgspec.json.decode(msgspec.json.encode(trial), type=CanaryTrial)
        found = judge(trial, TERMS)
        if found.verdict is not VERDICTS.CONTINUE:
            return found.verdict, found.cause, found.requests


def test_five_percent_more_latency_is_rolled_back() -> None:
    found = [try_out(seed, slower=1.05) for seed in range(5)]
    assert {each[:2] for each in found} == {(VERDICTS.ROLL_BACK, CanaryCause.LATENCY)}
    assert max(requests for _, _, requests in found) < 2000


@pytest.mark.parametrize("base", [0.0, 0.001])
def test_one_percent_more_errors_are_rolled_back(base: float) -> None:
    found = [try_out(seed, (base, base + 0.01)) for seed in range(5)]
    assert {each[:2] for each in found} == {(VERDICTS.ROLL_BACK, CanaryCause.ERRORS)}


def test_a_revision_that_is_equal_or_better_is_promoted() -> None:
    equal = [try_out(seed, (0.01, 0.01)) for seed in range(5)]
    better = try_out(0, (0.02, 0.0), slower=0.8)
    assert {*equal, better} == {(VERDICTS.PROMOTE, CanaryCause.ENOUGH, 2000)}


def test_a_revision_that_only_fails_is_rolled_back_at_once() -> None:
    verdict, cause, requests = try_out(0, (0.0, 1.0))
    assert (verdict, cause) == (VERDICTS.ROLL_BACK, CanaryCause.ERRORS)
    assert requests <= 20


def test_small_blocks_wait_until_each_revision_has_ten_requests() -> None:
    random, trial = Random(0), CanaryTrial()
    for _ in range(9):
        trial = observe(trial, draw(random, 4), draw(random, 1))
    assert (trial.new.requests, trial.requests) == (0, 9)
    trial = observe(trial, draw(random, 4), draw(random, 1))
    assert (trial.new.requests, trial.old.requests, trial.requests) == (10, 40, 10)


def test_a_load_that_slows_both_revisions_is_no_evidence() -> None:
    """All requests become three times as slow at once, while the new revision gets more of them."""
    random, trial = Random(3), CanaryTrial()
    for block in range(200):
        slower, share = (1.0, 10) if block < 100 else (3.0, 40)
        old, new = draw(random, 40, slower=slower), draw(random, share, slower=slower)
        trial = observe(trial, old, new)
    found = judge(trial, TERMS)
    assert found.verdict is VERDICTS.PROMOTE
    assert found.slower == pytest.approx(1.0, abs=0.02)


def test_the_share_of_false_alarms_is_bounded_under_permanent_looks() -> None:
    """Errors alone, of which the bound is exact: 1 of 200 is allowed, with room for chance."""
    alarms = 0
    for seed in range(200):
        random, trial = Random(seed), CanaryTrial()
        for _ in range(200):
            old, new = (sum(random.random() < 0.02 for _ in range(size)) for size in (10, 10))
            trial = observe(
                trial,
                RevisionSums(requests=10, errors=old),
                RevisionSums(requests=10, errors=new),
            )
            if judge(trial, TERMS).verdict is VERDICTS.ROLL_BACK:
                alarms += 1
                break
    assert alarms <= 4
