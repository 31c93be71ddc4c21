"""What runs is counted to now in views, although the ledger's rows come later."""

from datetime import UTC, datetime, timedelta

from tests.records import make_attempt_record, make_offer

from cavvy.control.running_costs import add_unwritten
from cavvy.costs.metering import charge_node, total
from cavvy.costs.running import charge_to_now, list_unwritten, sum_unwritten
from cavvy.domain.budgets import ChargedRate
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.ledger import LedgerSubject, LedgerSum
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import LedgerFilter
from cavvy.store.ledger import make_subject

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

    def grow(
        attempts: list[Attempt], rates: dict[str, ChargedRate], now: datetime
    ) -> dict[str, float]:
        sums = sum_unwritten(list_unwritten(attempts, rates, now))
        return {job_id: each.micros / 1e6 for job_id, each in sums.items()}

    assert grow([attempt], known, at(86)) == {"job": 112}
    assert grow([attempt], known, at(9)) == {}
    assert grow([attempt], {}, at(25)) == {"job": 50}
    assert grow([replace(attempt, running_at=None)], {}, at(25)) == {}
    spare = replace(attempt, id="job-2", number=2)
    assert grow([attempt, spare], known, at(86)) == {"job": 112}, "the rate is that of the job"
    assert grow([attempt, spare], {}, at(25)) == {"job": 100}


def subject(attempt: Attempt, **more: object) -> LedgerSubject:
    return replace(make_subject(attempt, "ann", "train", "", {"team": "x"}), **more)


def test_sums_of_the_ledger_grow_with_what_runs() -> None:
    """At a dollar a second: 86 s after the start, the ledger has the first 30 s."""
    attempt = make_attempt(AttemptPhase.RUNNING)
    known = {"job": ChargedRate(job_id="job", until=at(30), rate=RATE)}
    costs = [(each, subject(attempt)) for each in list_unwritten([attempt], known, at(86))]
    (other,) = list_unwritten([replace(attempt, id="b-1", job_id="b")], {}, at(86))
    costs.append((other, subject(other.attempt, job="other", user="bob", tags={})))

    def add(by: tuple[str, ...], micros: int = 30_000_000, **which: object) -> dict[str, float]:
        groups = dict(zip(by, ("train",), strict=False))
        sums = [LedgerSum(groups=groups, amount=Money(micros), discount=Money(), jobs=1)]
        found = add_unwritten(sums if micros else [], costs, LedgerFilter(**which), by)
        assert [each.amount for each in found] == sorted(
            (each.amount for each in found), reverse=True
        )
        return {",".join(each.groups.values()): each.amount.micros / 1e6 for each in found}

    assert add(()) == {"": 30 + 56 + 86}
    assert add(("job",)) == {"train": 86, "other": 86}
    assert add(("job",), user="ann") == {"train": 86}
    assert add(("job",), tag=("team", "x")) == {"train": 86}
    assert add(("job",), projects="elsewhere") == {"train": 30}
    assert add(("job",), 0, since=at(80)) == {"train": 6, "other": 6}
    assert add(("job",), 0, since=at(50), until=at(60)) == {"train": 10, "other": 10}
    assert add(("kind", "user"), 0) == {"node,ann": 56, "node,bob": 86}
    assert add(("tag:team", "month"), 0) == {"x,2026-01": 56, ",2026-01": 86}


def test_what_runs_over_the_end_of_a_month_counts_in_both() -> None:
    attempt = replace(make_attempt(AttemptPhase.KEPT), running_at=at(-100))
    costs = [(each, subject(attempt)) for each in list_unwritten([attempt], {}, at(50))]
    found = add_unwritten([], costs, LedgerFilter(), ("month", "kind"))
    assert [(each.groups, each.amount.micros, each.jobs) for each in found] == [
        ({"month": "2025-12", "kind": "idle"}, 100_000_000, 1),
        ({"month": "2026-01", "kind": "idle"}, 50_000_000, 1),
    ]


def test_a_job_counts_once_in_a_sum() -> None:
    attempt = make_attempt(AttemptPhase.RUNNING)
    known = {"job": ChargedRate(job_id="job", until=at(30), rate=RATE)}
    sums = [LedgerSum(groups={}, amount=Money(1), discount=Money(), jobs=1)]
    for rates, number, jobs in ((known, 1, 1), ({}, 1, 2), ({}, 2, 1)):
        again = replace(attempt, number=number)
        costs = [(each, subject(again)) for each in list_unwritten([again], rates, at(86))]
        (found,) = add_unwritten(sums, costs, LedgerFilter(), ())
        assert found.jobs == jobs
