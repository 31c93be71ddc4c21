"""Kinds of failure: found from what an attempt ended with, and what each means for its place."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.control.markets.troubles import Trouble, find_trouble, rest_after
from cavvy.domain.jobs import Attempt, Outcome
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
ATTEMPT = Attempt(
    id="j-1",
    job_id="j",
    project="p",
    number=1,
    gang="g",
    offer=OFFER,
    nodes=1,
    created_at=T0,
    since=T0,
)


def ended(outcome: Outcome, reason: str = "because") -> Attempt:
    return replace(ATTEMPT, outcome=outcome, reason=reason)


@pytest.mark.parametrize(
    ("outcome", "reason", "kind"),
    [
        (Outcome.CAPACITY, "no capacity at p/r/t", Trouble.CAPACITY),
        (Outcome.REFUSED, "p refused: your quota for this type is 0", Trouble.QUOTA),
        (Outcome.REFUSED, "p refused: VcpuLimitExceeded", Trouble.QUOTA),
        (Outcome.REFUSED, "p refused: the key has expired", Trouble.REFUSED),
        (Outcome.PREEMPTED, "taken", Trouble.TAKEN),
        (Outcome.NODE, "GPU fault: Xid 79 (exit code 1)", Trouble.GPU),
        (
            Outcome.NODE,
            "GPU fault: GPU 1: its memory moves 900 GB/s, at least 1223 are wanted",
            Trouble.GPU,
        ),
        (
            Outcome.NODE,
            "slow link: 40 Mbit/s from rank 1 (h2), at least 600 Mbit/s are wanted",
            Trouble.LINK,
        ),
        (Outcome.NODE, "the agent of rank 0 was silent for longer than its lease", Trouble.NETWORK),
        (Outcome.NODE, "the node of rank 1 was lost: failed its hardware check", Trouble.NODE),
        (Outcome.TIMEOUT, "no agent of rank 0 reported in within 20 minutes", Trouble.BOOT),
        (Outcome.EXIT, "GPU fault: says the user", Trouble.PROGRAM),
        (Outcome.SETUP, "exit code 1", Trouble.PROGRAM),
    ],
)
def test_each_end_is_of_a_kind(outcome: Outcome, reason: str, kind: Trouble) -> None:
    assert find_trouble(ended(outcome, reason)) is kind


def test_a_place_rests_longer_with_each_failure_of_a_kind_and_not_for_ever() -> None:
    gone = ended(Outcome.CAPACITY)
    rests = [rest_after(Trouble.CAPACITY, gone, before) for before in (0, 1, 2, 60)]
    assert rests == [
        timedelta(seconds=30),
        timedelta(seconds=60),
        timedelta(seconds=120),
        timedelta(hours=1),
    ]
    assert rest_after(Trouble.GPU, gone, 0) > rest_after(Trouble.NODE, gone, 0)
    assert rest_after(Trouble.PROGRAM, gone, 5) == timedelta(0)
    assert rest_after(Trouble.QUOTA, gone, 0) == timedelta(days=1)


def test_a_shared_host_rests_for_a_broken_gpu_and_not_for_a_lost_process() -> None:
    shared = replace(ATTEMPT, offer=replace(OFFER, shared=True))
    assert rest_after(Trouble.NODE, shared, 3) == timedelta(0)
    assert rest_after(Trouble.GPU, shared, 0) > timedelta(0)
    assert rest_after(Trouble.LINK, shared, 0) > timedelta(0)
