"""What runs is counted to now in views, although the ledger's rows come later."""

from datetime import UTC, datetime, timedelta

from tests.records import make_attempt_record, make_offer

from cavvy.costs.metering import charge_node, total
from cavvy.costs.running import charge_to_now, list_unwritten
from cavvy.domain.budgets import ChargedRate
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

START = datetime(2026, 1, 1, tzinfo=UTC)
RATE = HourlyRate(3_600_000_000)  # a dollar a second


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def make_attempt(phase: AttemptPhase, nodes: int = 1) -> Attempt:
    offer = make_offer("fake/r/t", RATE.micros_per_hour)
    made = make_attempt_record(START, offer, id="job-1", job_id="job")
    return replace(made, phase=phase, nodes=nodes, running_at=at(0))


def charge(attempt: Attempt, until: float, rank: int = 0, since: float = 0) -> Charge:
    return charge_node(attempt, rank, at(since), at(until), RATE)


def dollars(charges: list[Charge]) -> float:
    return total(charges).micros / 1e6


def test_a_running_node_costs_its_rate_to_now() -> None:
    attempt = make_attempt(AttemptPhase.RUNNING)
    assert dollars(charge_to_now([attempt], [], at(25))) == 25
    former = [charge(attempt, 10), charge(attempt, 30, since=10)]
    assert dollars(charge_to_now([attempt], former, at(86))) == 86
    assert dollars(charge_to_now([attempt], former, at(20))) == 30, "nothing is taken back"


def test_what_has_ended_or_not_begun_costs_what_the_ledger_says() -> None:
    attempt = make_attempt(AttemptPhase.ENDED)
    assert dollars(charge_to_now([attempt], [charge(attempt, 30)], at(86))) == 30
    waits = replace(make_attempt(AttemptPhase.LAUNCHING), running_at=None)
    assert charge_to_now([waits], [], at(86)) == []


def test_a_node_that_ended_before_the_others_costs_no_more() -> None:
    attempt = make_attempt(AttemptPhase.RUNNING, nodes=3)
    former = [charge(attempt, 10, rank=0), charge(attempt, 40, rank=1)]
    disk = replace(charge(attempt, 40, rank=1), kind=ChargeKind.DISK)
    grown = charge_to_now([attempt], [*former, disk], at(60))
    assert [(each.rank, each.amount.micros / 1e6) for each in grown] == [
        (0, 10),
        (1, 60),
        (1, 60),
        (2, 60),
    ]


def test_a_sum_grows_by_the_rate_of_the_newest_charges() -> None:
    attempt, rate = make_attempt(AttemptPhase.RUNNING, nodes=2), RATE.times(2)
    known = {"job": ChargedRate(job_id="job", until=at(30), rate=rate)}
    assert list_unwritten([attempt], known, at(86)) == {"job": Money(112_000_000)}
    assert list_unwritten([attempt], known, at(9)) == {"job": Money()}
    assert list_unwritten([attempt], {}, at(25)) == {"job": Money(50_000_000)}
    assert list_unwritten([replace(attempt, running_at=None)], {}, at(25)) == {}
