"""Which gangs and attempts a restored database and its providers do not share."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record

from cavvy.control.decide.restored import (
    QUIET,
    JobNumber,
    LostAttempt,
    UnknownGang,
    compare,
    is_settled,
    name_later,
)
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def attempt(number: int, phase: AttemptPhase = AttemptPhase.RUNNING) -> tuple[Attempt, str]:
    offer = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
    made = make_attempt_record(
        NOW,
        offer,
        id=f"j-{number}",
        project="default",
        number=number,
        gang=f"g-j-{number}",
        nodes=2,
        phase=phase,
    )
    return made, "train"


def gang(number: int, state: GangState = GangState.RUNNING) -> tuple[str, GangSeen]:
    """A gang of three nodes, of which one has ended."""
    nodes = [
        NodeSeen(rank=rank, engine_id="", started_at=NOW, ended_at=NOW if rank == 2 else None)
        for rank in range(3)
    ]
    rates = [(NOW, HourlyRate(5)), (NOW, HourlyRate(7))]
    return "p", GangSeen(name=f"g-j-{number}", state=state, nodes=nodes, rates=rates)


def number(value: int) -> JobNumber:
    return JobNumber(job_id="j", project="default", job="train", number=value)


def unknown(value: int, name: str = "") -> UnknownGang:
    return UnknownGang(
        provider="p",
        gang=name or f"g-j-{value}",
        state=GangState.RUNNING,
        nodes=2,
        rate=HourlyRate(14),
        attempt=None if name else number(value),
    )


def later() -> Mapping[str, JobNumber]:
    return name_later([number(3)], lambda attempt: f"g-{attempt}")


def test_later_attempts_of_a_job_are_known_by_their_gangs() -> None:
    assert sorted(each.number for each in later().values()) == list(range(4, 36))
    assert later()["g-j-4"] == number(4)


def test_gangs_without_an_unfinished_attempt_are_unknown() -> None:
    attempts = {"g-j-2": attempt(2, AttemptPhase.ENDED), "g-j-3": attempt(3)}
    seen = [gang(2), gang(3), gang(4), gang(6, GangState.ENDED), gang(5), gang(99)]
    found = compare(seen, attempts, (), later())
    assert found.unknown == [unknown(2), unknown(4), unknown(5), unknown(99, "g-j-99")]
    assert (found.lost, found.found, found.used) == ([], 1, {"j": 6})


@pytest.mark.parametrize(
    ("seen", "silent", "lost"),
    [
        ([gang(3)], (), False),
        ([gang(3, GangState.ENDED)], (), True),
        ([], (), True),
        ([], ("p",), False),
    ],
)
def test_an_attempt_is_lost_if_its_provider_reports_no_gang_that_runs(
    seen: list[tuple[str, GangSeen]], silent: tuple[str, ...], lost: bool
) -> None:
    found = compare(seen, {"g-j-3": attempt(3)}, silent, later())
    assert found.lost == ([LostAttempt(provider="p", gang="g-j-3", attempt=number(3))] * lost)


@pytest.mark.parametrize(
    ("after", "unknown", "silent", "settled"),
    [
        (QUIET, 0, 0, True),
        (QUIET - timedelta(seconds=1), 0, 0, False),
        (QUIET, 1, 0, False),
        (QUIET, 0, 1, False),
    ],
)
def test_a_restored_database_is_settled_after_a_day_without_surprises(
    after: timedelta, unknown: int, silent: int, settled: bool
) -> None:
    assert is_settled(NOW, NOW + after, unknown, silent) is settled
