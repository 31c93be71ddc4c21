"""Kinds of failure: found from what an attempt ended with, and what each means for its place."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record

from cavvy.control.decide.failures import cooldown_after, failure_of
from cavvy.domain.jobs import Attempt, AttemptOutcome, FailureKind
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
ATTEMPT = make_attempt_record(T0, OFFER)


def ended(outcome: AttemptOutcome) -> Attempt:
    return replace(ATTEMPT, outcome=outcome)


@pytest.mark.parametrize(
    ("outcome", "failure", "kind"),
    [
        (AttemptOutcome.CAPACITY, None, FailureKind.CAPACITY),
        (AttemptOutcome.REFUSED, None, FailureKind.REFUSED),
        (AttemptOutcome.REFUSED, FailureKind.QUOTA, FailureKind.QUOTA),
        (AttemptOutcome.PREEMPTED, None, FailureKind.PREEMPTED),
        (AttemptOutcome.NODE, FailureKind.GPU, FailureKind.GPU),
        (AttemptOutcome.NODE, None, FailureKind.NODE),
        (AttemptOutcome.STOPPED, None, FailureKind.NODE),
        (AttemptOutcome.TIMEOUT, None, FailureKind.BOOT),
        (AttemptOutcome.EXIT, None, FailureKind.PROGRAM),
        (AttemptOutcome.SETUP, None, FailureKind.PROGRAM),
    ],
)
def test_each_end_is_of_a_kind(
    outcome: AttemptOutcome, failure: FailureKind | None, kind: FailureKind
) -> None:
    assert failure_of(replace(ended(outcome), failure=failure)) is kind


@pytest.mark.parametrize(
    ("kind", "label"), [(FailureKind.GPU, "GPU fault"), (FailureKind.LINK, "slow link")]
)
def test_a_kind_of_failure_has_a_label_for_people(kind: FailureKind, label: str) -> None:
    assert kind.label == label


def test_a_place_rests_longer_with_each_failure_of_a_kind_and_not_for_ever() -> None:
    gone = ended(AttemptOutcome.CAPACITY)
    cooldowns = [cooldown_after(FailureKind.CAPACITY, gone, before) for before in (0, 1, 2, 60)]
    assert cooldowns == [
        timedelta(seconds=30),
        timedelta(seconds=60),
        timedelta(seconds=120),
        timedelta(minutes=10),
    ]
    assert cooldown_after(FailureKind.GPU, gone, 0) > cooldown_after(FailureKind.NODE, gone, 0)
    for kind in (FailureKind.PROGRAM, FailureKind.PREEMPTED):
        assert cooldown_after(kind, gone, 5) == timedelta(0)
    for kind in (FailureKind.QUOTA, FailureKind.REFUSED):
        assert [cooldown_after(kind, gone, before) for before in (0, 3)] == [timedelta(days=1)] * 2


def test_a_shared_host_rests_for_a_broken_gpu_and_not_for_a_lost_process() -> None:
    shared = replace(ATTEMPT, offer=replace(OFFER, shared=True))
    assert cooldown_after(FailureKind.NODE, shared, 3) == timedelta(0)
    assert cooldown_after(FailureKind.GPU, shared, 0) > timedelta(0)
    assert cooldown_after(FailureKind.LINK, shared, 0) > timedelta(0)
