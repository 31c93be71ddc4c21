"""The bill of a gang: until its end, until its last sighting, and what may be missing from it."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide.attempt import PRICE_RISE, watch_price
from cavvy.control.decide.bills import (
    ACCRUE,
    BillVerdict,
    ClosedBill,
    accrue,
    audit_bill,
    close_bill,
    close_part,
    closing_charges,
    find_accrual_pause,
    is_accrual_due,
    paid_time,
    spending,
)
from cavvy.control.decide.looks import GangLook, after_look, look_interval
from cavvy.control.decide.rows import JobRows
from cavvy.domain.events import Charge, ChargeKind, replace_charges
from cavvy.domain.gangs import GangSeen, GangState, NodeExtra, NodeSeen
from cavvy.domain.jobs import (
    Attempt,
    AttemptPhase,
    JobRecord,
    Node,
    NodePhase,
    SentData,
    SentKind,
    UnsureBill,
)
from cavvy.domain.offers import ExtraPrice, Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(3_600_000))  # 1000 a s
ATTEMPT = make_attempt_record(T0, OFFER, nodes=2, phase=AttemptPhase.ENDING, launched_at=T0)
NEW = GangLook()


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def node(rank: int, started: float | None, ended: float | None = None, **more: bool) -> NodeSeen:
    began = None if started is None else at(started)
    over = None if ended is None else at(ended)
    return NodeSeen(rank=rank, engine_id="e", started_at=began, ended_at=over, **more)


def gang(*nodes: NodeSeen, state: GangState = GangState.RUNNING, micros: int = 0) -> GangSeen:
    rates = [(T0, HourlyRate(micros))] if micros else []
    return GangSeen(name="g", state=state, nodes=nodes, rates=rates)


def agent(rank: int, claimed: float | None, heard: float | None) -> Node:
    first = None if claimed is None else at(claimed)
    last = None if heard is None else at(heard)
    return Node(attempt_id="j-1", project="p", rank=rank, claimed_at=first, heard_at=last)


def charge(rank: int, since: float, until: float, micros: int = 3_600_000) -> Charge:
    rate = HourlyRate(micros)
    return Charge(
        project="p",
        job_id="j",
        attempt_id="j-1",
        rank=rank,
        since=at(since),
        until=at(until),
        rate=rate,
        amount=rate.over(timedelta(seconds=until - since)),
    )


def close(
    look: GangLook,
    *,
    attempt: Attempt = ATTEMPT,
    nodes: tuple[Node, ...] = (),
    stored: tuple[Charge, ...] = (),
) -> ClosedBill:
    return close_bill(attempt, look, nodes, stored, at(100))


def seconds(bill: ClosedBill) -> tuple[list[tuple[int, float]], float]:
    """By rank what is charged, in seconds at the offer's price, and what may be missing."""
    charged = [(each.rank, each.amount.micros / 1000) for each in bill.charges]
    return charged, bill.unsure_bill.more.micros / 1000 if bill.unsure_bill else 0.0


def test_ends_that_were_reported_are_billed_exactly() -> None:
    look = after_look(NEW, gang(node(0, 5, 45), node(1, 6, 90), state=GangState.ENDED), at(99))
    bill = close(look, nodes=(agent(0, 10, 97), agent(1, 10, 98)))
    assert seconds(bill) == ([(0, 40), (1, 84)], 0)
    assert bill.ended_at == at(90)


def test_each_node_is_billed_by_what_is_known_of_it() -> None:
    look = after_look(NEW, gang(node(0, 5), node(1, 5)), at(30))
    ended = gang(node(0, 5, 50), node(1, 5, 60, unseen=True), state=GangState.ENDED)
    assert seconds(close(after_look(look, ended, at(70)))) == ([(0, 45), (1, 25)], 30)


@pytest.mark.parametrize(
    ("look", "agents", "stored", "least", "more"),
    [
        (after_look(NEW, gang(node(0, 5)), at(30)), (), (), 25, 70),  # the provider saw it last
        (NEW, (agent(0, 10, 40),), (), 30, 70),  # only its agent did
        (NEW, (agent(0, None, None),), (), 0, 100),  # nothing did, but the launch was accepted
        (NEW, (), (charge(0, 5, 50),), 45, 55),  # an earlier server billed it
        (after_look(NEW, gang(node(0, 5)), at(30)), (agent(0, 10, 80),), (), 75, 20),
        (after_look(NEW, gang(node(0, None)), at(30)), (), (), 0, 70),  # not started by then
    ],
)
def test_a_forgotten_gang_is_billed_until_its_last_sighting(
    look: GangLook, agents: tuple[Node, ...], stored: tuple[Charge, ...], least: float, more: float
) -> None:
    bill = close(look, attempt=replace(ATTEMPT, nodes=1), nodes=agents, stored=stored)
    charged, missing = seconds(bill)
    assert (sum(each for _, each in charged), missing) == (least, more)
    assert bill.unsure_bill is not None
    assert bill.unsure_bill.latest == at(100)


def test_nothing_is_missing_from_a_gang_that_never_started_or_was_denied() -> None:
    ended = after_look(NEW, gang(node(0, None), state=GangState.ENDED), at(30))
    for look in (ended, GangLook(denied=True, unsure=True)):
        assert seconds(close(look, attempt=replace(ATTEMPT, nodes=1))) == ([], 0)


def test_the_longest_life_of_a_gang_that_was_taken_over_begins_then() -> None:
    taken = replace(ATTEMPT, nodes=1, adopted_at=at(60))
    assert seconds(close(NEW, attempt=taken)) == ([], 40)
    look = after_look(NEW, gang(node(0, 5)), at(80))
    assert seconds(close(look, attempt=taken)) == ([(0, 20)], 20)


def test_earlier_charges_of_a_node_with_none_left_become_empty() -> None:
    late = after_look(NEW, gang(node(0, 99, 99), state=GangState.ENDED), at(99))
    bill = close(late, attempt=replace(ATTEMPT, nodes=1), stored=(charge(0, 5, 50),))
    assert [(each.since, each.until, each.amount) for each in bill.charges] == [
        (at(5), at(5), Money(0))
    ]


def test_the_price_of_an_earlier_charge_holds_if_the_provider_reports_none() -> None:
    disk = replace(charge(0, 5, 50), kind=ChargeKind.DISK)
    stored = (charge(0, 5, 50, 7_200_000), disk)
    bill = close(NEW, attempt=replace(ATTEMPT, nodes=1), nodes=(agent(0, 6, 60),), stored=stored)
    assert kinds(bill.charges) == {ChargeKind.NODE: 110, ChargeKind.DISK: 55}


def test_charges_of_a_living_gang_end_where_its_end_was_missed() -> None:
    look = after_look(NEW, gang(node(0, 5), node(1, 5), micros=3_600_000), at(50))
    lost = gang(node(0, 5), node(1, 5, 95, unseen=True), micros=3_600_000)
    charges, known = accrue(ATTEMPT, after_look(look, lost, at(100)), ())
    assert [(each.rank, each.amount.micros / 1000) for each in charges] == [(0, 95), (1, 45)]
    assert known.accrued_at == at(100)
    again, _ = accrue(ATTEMPT, after_look(known, lost, at(100) + ACCRUE / 2), ())
    assert again == ()


@pytest.mark.parametrize(
    ("nodes", "seconds"), [(0, 45), (187, 45), (500, 120), (1000, 240), (10_000, 240)]
)
def test_costs_of_many_nodes_are_written_less_often(nodes: int, seconds: float) -> None:
    assert find_accrual_pause(nodes) == timedelta(seconds=seconds)


def test_only_costs_of_running_work_without_a_budget_are_written_less_often() -> None:
    pause, running = find_accrual_pause(1000), replace(ATTEMPT, phase=AttemptPhase.RUNNING)
    seen = gang(node(0, 5), node(1, 5))
    first, look = accrue(running, after_look(NEW, seen, at(50)), (), pause=pause)
    assert len(first) == 2  # the first costs are written at once
    soon, late = (after_look(look, seen, at(50) + each) for each in (ACCRUE, pause))
    assert not is_accrual_due(running, soon, pause=pause)
    assert is_accrual_due(running, late, pause=pause)
    assert is_accrual_due(running, replace(soon, pays=timedelta(hours=1)), pause=pause)
    assert is_accrual_due(running, soon, divided=True, pause=pause)
    assert is_accrual_due(replace(running, phase=AttemptPhase.KEPT), soon, pause=pause)


def test_a_bill_that_is_divided_grows_also_on_nodes_without_a_price() -> None:
    free = replace(ATTEMPT, offer=replace(OFFER, rate=HourlyRate()), nodes=1)
    look = after_look(NEW, gang(node(0, 5)), at(50))
    assert accrue(free, look, ()) == ((), look)
    (charge,), known = accrue(free, look, (), divided=True)
    assert (charge.until, charge.amount) == (at(50), Money(0))
    assert known.accrued_at == at(50)


def test_a_list_that_is_older_than_its_poll_shows_no_node_alive_at_the_poll() -> None:
    older = replace(node(0, 5), seen_at=at(46)), node(1, 5)
    look = after_look(NEW, gang(*older, micros=3_600_000), at(50))
    charges, _ = accrue(ATTEMPT, look, ())
    assert [(each.rank, each.amount.micros / 1000) for each in charges] == [(0, 41), (1, 45)]
    assert seconds(close(look, stored=charges)) == ([(0, 41), (1, 45)], 54 + 50)
    earlier = after_look(look, gang(replace(node(0, 5), seen_at=at(40))), at(52))
    assert earlier.alive_at == {0: at(46), 1: at(50)}


def test_a_budget_counts_what_an_unseen_end_may_have_cost() -> None:
    task = TaskSpec(name="n", run="x")
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=T0, since=T0, attempt=1)
    unseen = UnsureBill(latest=at(100), more=Money(500))
    over = replace(ATTEMPT, phase=AttemptPhase.ENDED, unsure_bill=unseen)
    rows = JobRows(job=job, attempts={1: over}, nodes={})
    spent, rate = spending(rows, (charge(0, 0, 1),), {}, at(200))
    assert (spent, rate) == (Money(1500), HourlyRate(0))


def test_a_budget_counts_the_minimum_charge_from_the_start() -> None:
    """A node that is ended now would cost as much."""
    short = replace(OFFER, minimum_charge=timedelta(seconds=60))
    one = replace(ATTEMPT, nodes=1, phase=AttemptPhase.RUNNING, offer=short)
    task = TaskSpec(name="n", run="x")
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=T0, since=T0, attempt=1)
    rows = JobRows(job=job, attempts={1: one}, nodes={})
    looks = {"g": after_look(NEW, gang(node(0, 5)), at(10))}
    assert [spending(rows, (), looks, at(second))[0] for second in (10, 65, 75)] == [
        Money(60_000),
        Money(60_000),
        Money(70_000),
    ]


def test_the_charges_of_other_attempts_are_not_part_of_a_bill() -> None:
    look = after_look(NEW, gang(node(0, 5, 45), node(1, 6, 90), state=GangState.ENDED), at(99))
    earlier = (charge(0, 1, 3), replace(charge(1, 2, 4), kind=ChargeKind.DISK))
    others = tuple(replace(each, attempt_id="j-0") for each in earlier)
    assert close(look, stored=others) == close(look)


def test_later_charges_of_a_rank_replace_its_earlier_ones() -> None:
    old = [charge(0, 0, 1), charge(0, 1, 2), charge(1, 0, 9)]
    new = [replace(charge(0, 3, 4), kind=ChargeKind.KEPT)]
    assert replace_charges(old, new) == [old[2], *new]


def test_the_price_is_looked_at_more_often_as_the_budget_runs_out() -> None:
    assert paid_time(Money(7_200_000), HourlyRate(3_600_000)) == timedelta(hours=2)
    assert paid_time(Money(1 << 60), HourlyRate(1)) == timedelta(hours=100_000)
    rest = timedelta(seconds=200)
    assert watch_price(rest) * PRICE_RISE * 2 == rest
    assert watch_price(timedelta(0)) == timedelta(seconds=1)
    running = replace(ATTEMPT, phase=AttemptPhase.RUNNING)
    plain = look_interval(running, NEW, timedelta(0), at(100))
    assert look_interval(running, GangLook(pays=rest), timedelta(0), at(100)) == rest / 20 < plain
    rich = GangLook(pays=timedelta(days=9))
    assert look_interval(running, rich, timedelta(0), at(100)) == plain


@pytest.mark.parametrize(
    ("seen", "unseen", "billed_s", "verdict"),
    [
        (gang(node(0, 5, 45), state=GangState.ENDED), 0, 40, BillVerdict.AGREES),
        (gang(node(0, 5.00005, 45), state=GangState.ENDED), 0, 40, BillVerdict.AGREES),  # jitter
        (gang(node(0, 5, 60), state=GangState.ENDED), 0, 40, BillVerdict.DIFFERS),
        (gang(node(0, 5, 60), state=GangState.ENDED), 20, 40, BillVerdict.AGREES),  # in its range
        (gang(node(0, 5, 40), state=GangState.ENDED), 20, 40, BillVerdict.DIFFERS),
        (gang(node(0, 5)), 0, 40, BillVerdict.DIFFERS),  # it still lists the node as running
        (None, 0, 40, BillVerdict.FORGOTTEN),
    ],
)
def test_an_audit_compares_a_bill_with_the_providers_record(
    seen: GangSeen | None, unseen: float, billed_s: float, verdict: BillVerdict
) -> None:
    end = UnsureBill(latest=at(99), more=Money(int(1000 * unseen))) if unseen else None
    ended = replace(ATTEMPT, phase=AttemptPhase.ENDED, ended_at=at(90), unsure_bill=end)
    others = replace(charge(0, 0, 9), attempt_id="j-2")
    assert audit_bill(ended, seen, (charge(0, 5, 5 + billed_s), others)).verdict is verdict


def test_an_audit_of_a_gang_that_was_handed_on_ends_where_the_next_attempt_began() -> None:
    handed = replace(ATTEMPT, gang="g@j-1", phase=AttemptPhase.ENDED, ended_at=at(50))
    found = audit_bill(handed, gang(node(0, 5, 90), state=GangState.ENDED), (charge(0, 5, 50),))
    assert (handed.bought_as, found.verdict) == ("g", BillVerdict.AGREES)
    taken = replace(ATTEMPT, adopted_at=at(50), phase=AttemptPhase.ENDED, ended_at=at(90))
    found = audit_bill(taken, gang(node(0, 5, 90), state=GangState.ENDED), (charge(0, 50, 90),))
    assert found.verdict is BillVerdict.AGREES


EXTRAS = (
    ExtraPrice(kind=ChargeKind.DISK, name="ssd", price=Money(744_000)),  # January: 1000 an hour
    ExtraPrice(kind=ChargeKind.ADDRESS, price=Money(3_600_000)),  # 1000 a second
)
WITH_EXTRAS = replace(ATTEMPT, nodes=1, offer=replace(OFFER, extras=EXTRAS))
HAS = (
    NodeExtra(kind=ChargeKind.DISK, name="ssd", units=3600),  # 1000 a second
    NodeExtra(kind=ChargeKind.ADDRESS),
)


def kinds(charges: Iterable[Charge]) -> dict[ChargeKind, float]:
    """What is charged by kind, in seconds at 1000 micro-dollars a second."""
    found: Counter[ChargeKind] = Counter()
    for each in charges:
        found[each.kind] += each.amount.micros
    return {kind: micros / 1000 for kind, micros in found.items()}


def test_disks_and_addresses_are_billed_with_their_node() -> None:
    told = gang(replace(node(0, 5, 45), extras=HAS), state=GangState.ENDED)
    bill = close(after_look(NEW, told, at(99)), attempt=WITH_EXTRAS)
    assert kinds(bill.charges) == {
        ChargeKind.NODE: 40,
        ChargeKind.DISK: 40,
        ChargeKind.ADDRESS: 40,
    }
    verdict = audit_bill(WITH_EXTRAS, told, bill.charges)
    assert verdict.verdict is BillVerdict.AGREES
    missing = audit_bill(WITH_EXTRAS, told, bill.charges[:1])
    assert missing.verdict is BillVerdict.DIFFERS


def sender(rank: int, sent: int, phase: NodePhase = NodePhase.EXITED) -> Node:
    nine_cents = Money(90_000)  # per GB
    data = SentData(kind=SentKind.CHECKPOINTS, bytes=sent, egress=nine_cents)
    return replace(agent(rank, 6, 40), phase=phase, sent=(data,))


def test_uploads_are_billed_by_their_bytes_at_the_price_of_the_cloud() -> None:
    told = gang(node(0, 5, 45), node(1, 5, 45), state=GangState.ENDED)
    unpriced = SentData(kind=SentKind.CHECKPOINTS, bytes=10**9)
    nodes = [sender(0, 2_000_000_000), replace(sender(1, 10**9), sent=(unpriced,))]
    bill = close(after_look(NEW, told, at(99)), nodes=nodes)
    [traffic] = [each for each in bill.charges if each.kind is ChargeKind.TRAFFIC]
    assert (traffic.rank, traffic.amount) == (0, Money(180_000))
    assert (traffic.since, traffic.until) == (at(6), at(40))
    assert bill.unsure_bill is None
    assert audit_bill(ATTEMPT, told, bill.charges).verdict is BillVerdict.AGREES
    again = close(after_look(NEW, told, at(99)), nodes=nodes, stored=bill.charges)
    assert again.charges == bill.charges


def test_outputs_and_logs_are_billed_at_the_price_of_their_own_target() -> None:
    told = gang(node(0, 5, 45), state=GangState.ENDED)
    nodes = [sender(0, 10**9)]
    output = SentData(kind=SentKind.OUTPUT, bytes=3 * 10**9, egress=Money(20_000))
    log = SentData(kind=SentKind.LOG, bytes=5 * 10**8, egress=Money(0))
    nodes = [replace(nodes[0], sent=(*nodes[0].sent, output, log))]
    bill = close(after_look(NEW, told, at(99)), attempt=replace(ATTEMPT, nodes=1), nodes=nodes)
    [traffic] = [each for each in bill.charges if each.kind is ChargeKind.TRAFFIC]
    assert traffic.amount == Money(90_000 + 60_000)


def test_an_upload_that_a_loss_cut_off_is_billed_as_a_range() -> None:
    told = gang(node(0, 5, 45), state=GangState.ENDED)
    attempt = replace(ATTEMPT, nodes=1, checkpoint_bytes=10**9)
    lost = sender(0, 2_000_000_000, NodePhase.RUNNING)
    bill = close(after_look(NEW, told, at(99)), attempt=attempt, nodes=[lost])
    assert bill.unsure_bill == UnsureBill(latest=None, more=Money(90_000), traffic=Money(90_000))
    ended = replace(attempt, unsure_bill=bill.unsure_bill)
    missing = [each for each in bill.charges if each.kind is ChargeKind.TRAFFIC]
    assert audit_bill(ended, told, missing).verdict is BillVerdict.DIFFERS  # not by its range
    just = replace(lost, heard_at=at(99))  # it was lost a second before the end
    lied = replace(attempt, checkpoint_bytes=1 << 50)
    bill = close(after_look(NEW, told, at(99)), attempt=lied, nodes=[just])
    assert bill.unsure_bill is not None
    assert bill.unsure_bill.traffic == Money(1_125_000)  # 12.5 GB
    silent = replace(lost, sent=())
    assert close(after_look(NEW, told, at(99)), attempt=attempt, nodes=[silent]).unsure_bill is None


def test_the_uploads_of_a_running_node_count_and_stay_when_its_gang_is_taken_over() -> None:
    look, nodes = after_look(NEW, gang(node(0, 5), node(1, 5)), at(30)), [sender(0, 10**9)]
    running = replace(ATTEMPT, phase=AttemptPhase.RUNNING)
    charges, _ = accrue(running, look, (), nodes)
    assert kinds(charges)[ChargeKind.TRAFFIC] == 90
    job = make_job_record(T0, name="j", task=TaskSpec(name="j", run="true"))
    rows = JobRows(job=job, attempts={1: running}, nodes={running.id: nodes})
    spent, _ = spending(rows, charges, {running.gang: look}, at(35))
    assert spent == Money(2 * 30_000 + 90_000)
    closed = closing_charges(replace(running, kept_since=at(30)), charges, at(35))
    assert closed is not None
    assert kinds(closed)[ChargeKind.TRAFFIC] == 90


def test_disks_and_addresses_count_for_the_budget() -> None:
    look = after_look(NEW, gang(replace(node(0, 5), extras=HAS)), at(30))
    running = replace(WITH_EXTRAS, phase=AttemptPhase.RUNNING)
    job = make_job_record(T0, name="j", task=TaskSpec(name="j", run="true"))
    rows = JobRows(job=job, attempts={1: running}, nodes={})
    spent, rate = spending(rows, (), {running.gang: look}, at(35))
    assert (spent, rate) == (Money(3 * 30_000), HourlyRate(3 * 3_600_000))


def test_disks_and_addresses_of_a_forgotten_gang_are_billed_at_their_earlier_rates() -> None:
    look = after_look(NEW, gang(replace(node(0, 5), extras=HAS)), at(30))
    stored, _ = accrue(WITH_EXTRAS, look, ())
    bill = close(NEW, attempt=WITH_EXTRAS, stored=stored)
    assert kinds(bill.charges) == {
        ChargeKind.NODE: 25,
        ChargeKind.DISK: 25,
        ChargeKind.ADDRESS: 25,
    }
    assert bill.unsure_bill is not None
    assert bill.unsure_bill.more == Money(3 * 75_000)  # until now, and from the launch on


@pytest.mark.parametrize("ended", [False, True])
def test_a_provider_that_lost_its_record_takes_nothing_off_the_bill(ended: bool) -> None:
    """Such a provider reports no disks, and a start that is the time of its next poll."""
    look = after_look(NEW, gang(replace(node(0, 5), extras=HAS)), at(30))
    stored, _ = accrue(WITH_EXTRAS, look, ())
    lost = after_look(NEW, gang(node(0, 40)), at(100))
    charges, _ = accrue(WITH_EXTRAS, lost, stored)
    if ended:
        told = gang(node(0, 40, 100), state=GangState.ENDED)
        look = after_look(NEW, told, at(120))
        charges = close(look, attempt=WITH_EXTRAS, stored=stored).charges
    assert kinds(charges) == {
        ChargeKind.NODE: 95,
        ChargeKind.DISK: 95,
        ChargeKind.ADDRESS: 95,
    }


def test_a_takeover_ends_the_charges_of_disks_and_addresses() -> None:
    kept = replace(WITH_EXTRAS, phase=AttemptPhase.KEPT, kept_since=at(20))
    look = after_look(NEW, gang(replace(node(0, 5), extras=HAS)), at(30))
    stored, _ = accrue(kept, look, ())
    closed = closing_charges(kept, stored, at(40))
    assert closed is not None
    assert kinds(closed) == {
        ChargeKind.NODE: 15,
        ChargeKind.KEPT: 20,
        ChargeKind.DISK: 35,
        ChargeKind.ADDRESS: 35,
    }
    taken = replace(WITH_EXTRAS, id="k-1", adopted_at=at(40))
    told = gang(replace(node(0, 5, 60), extras=HAS), state=GangState.ENDED)
    bill = close(after_look(NEW, told, at(70)), attempt=taken)
    assert kinds(bill.charges)[ChargeKind.DISK] == 20
    assert closing_charges(kept, [each for each in stored if each.kind.is_extra], at(40)) is None


def test_a_takeover_bills_what_was_sent_after_the_last_poll() -> None:
    """Outputs and the log are complete when the work ends, just before another job may follow."""
    kept = replace(WITH_EXTRAS, phase=AttemptPhase.KEPT, kept_since=at(35))
    look = after_look(NEW, gang(node(0, 5)), at(30))
    stored, _ = accrue(kept, look, (), [sender(0, 10**9)])
    closed = closing_charges(kept, stored, at(40), [sender(0, 3 * 10**9)])
    assert closed is not None
    [traffic] = [each for each in closed if each.kind is ChargeKind.TRAFFIC]
    assert traffic.amount == Money(270_000)
    assert closing_charges(kept, [traffic], at(40), [sender(0, 10**9)]) is None


def lost(seen: NodeSeen, started_by: float) -> NodeSeen:
    """The node, whose bill began at `started_by` at the latest."""
    return replace(seen, started_by=at(started_by))


@pytest.mark.parametrize(
    ("seen", "agents", "least", "more"),
    [
        (lost(node(0, 5, 45), 15), (), 30, 10),
        (lost(node(0, 5, 45), 15), (agent(0, 10, 40),), 30, 10),
        (lost(node(0, 5, 45), 45), (), 0, 40),  # it was perhaps never billed
        (lost(node(0, 5, 45), 45), (agent(0, 10, 40),), 35, 5),  # its agent ran
        (lost(node(0, 5, 45, unseen=True), 15), (agent(0, 20, 30),), 15, 25),
    ],
)
def test_a_start_that_was_not_reported_is_billed_as_a_range(
    seen: NodeSeen, agents: tuple[Node, ...], least: float, more: float
) -> None:
    look = after_look(NEW, gang(seen, state=GangState.ENDED), at(50))
    bill = close(look, attempt=replace(ATTEMPT, nodes=1), nodes=agents)
    charged, missing = seconds(bill)
    assert (sum(each for _, each in charged), missing) == (least, more)
    assert bill.unsure_bill is not None
    assert (bill.unsure_bill.latest is None) == (not seen.unseen)
    assert audit_bill(replace(ATTEMPT, unsure_bill=bill.unsure_bill), look.told, bill.charges)


def test_the_charges_of_a_running_node_begin_where_its_bill_had_begun_for_certain() -> None:
    one, look = replace(ATTEMPT, nodes=1), after_look(NEW, gang(lost(node(0, 5), 15)), at(50))
    charges, _ = accrue(one, look, ())
    assert [(each.since, each.until) for each in charges] == [(at(15), at(50))]


def test_machines_that_were_rolled_back_are_billed_to_the_attempt() -> None:
    """Those that were perhaps never billed are a part of the range."""
    short = replace(OFFER, minimum_charge=timedelta(seconds=20))
    attempt = replace(ATTEMPT, offer=short, launched_at=None)
    others = (node(0, 5, 45), node(0, 5, 50), lost(node(1, 10, 12), 12), node(1, None))
    told = replace(gang(state=GangState.ENDED), rolled_back=others)
    look = replace(after_look(NEW, told, at(50)), denied=True)
    bill = close(look, attempt=attempt)
    assert seconds(bill) == ([(0, 85)], 20)
    assert {each.kind for each in bill.charges} == {ChargeKind.ROLLED_BACK}
    keys = [(each.rank, each.kind, each.since) for each in bill.charges]
    assert len(set(keys)) == len(keys)
    ended = replace(attempt, phase=AttemptPhase.ENDED, unsure_bill=bill.unsure_bill)
    assert audit_bill(ended, told, bill.charges).verdict is BillVerdict.AGREES
    assert audit_bill(ended, told, ()).verdict is BillVerdict.DIFFERS


def test_a_machine_that_was_rolled_back_is_no_sighting_of_the_node() -> None:
    back = replace(charge(0, 5, 90), kind=ChargeKind.ROLLED_BACK)
    look = after_look(NEW, gang(node(0, 40)), at(50))
    bill = close(look, attempt=replace(ATTEMPT, nodes=1), stored=(back,))
    assert seconds(bill)[0] == [(0, 10), (0, 85)]


@pytest.mark.parametrize("ended", [False, True])
def test_machines_that_were_rolled_back_stay_on_the_bill_if_the_record_is_lost(ended: bool) -> None:
    one, back = replace(ATTEMPT, nodes=1), replace(node(0, 1, 21), extras=HAS)
    known = replace(gang(node(0, 30)), rolled_back=(back,))
    stored, _ = accrue(one, after_look(NEW, known, at(50)), ())
    lost = gang(node(0, 30, 90 if ended else None))
    if ended:
        look = after_look(NEW, replace(lost, state=GangState.ENDED), at(100))
        charges = close(look, attempt=one, stored=stored).charges
        verdict = audit_bill(replace(one, phase=AttemptPhase.ENDED), look.told, charges)
        assert verdict.verdict is BillVerdict.AGREES
    else:
        charges, _ = accrue(one, after_look(NEW, lost, at(90)), stored)
    assert kinds(charges) == {ChargeKind.NODE: 60, ChargeKind.ROLLED_BACK: 20}
    bill = close(NEW, attempt=one, stored=stored)  # no poll has found the gang since a restart
    assert kinds(bill.charges)[ChargeKind.ROLLED_BACK] == 20


def test_no_two_charges_of_a_rank_have_the_same_kind_and_start() -> None:
    """The store keeps one of them only. A new month divides the charges of all disks."""
    began = at(-3600)  # in the month before
    alike = NodeSeen(rank=0, engine_id="e", started_at=began, extras=HAS)
    told = replace(gang(alike), rolled_back=(replace(alike, ended_at=at(40)), alike))
    charges, _ = accrue(WITH_EXTRAS, after_look(NEW, told, at(60)), ())
    keys = [(each.rank, each.kind, each.since) for each in charges]
    assert len(set(keys)) == len(keys)
    assert sum(each.amount.micros for each in charges) == sum(
        each.amount.micros
        for end in (at(60), at(40), at(60))
        for each in accrue(
            WITH_EXTRAS, after_look(NEW, gang(replace(alike, ended_at=end)), at(60)), ()
        )[0]
    )


def test_a_takeover_extends_no_charge_of_a_machine_that_was_rolled_back() -> None:
    kept = replace(WITH_EXTRAS, phase=AttemptPhase.KEPT, kept_since=at(40))
    seen, back = replace(node(0, 5), extras=HAS), replace(node(0, 8, 20), extras=HAS)
    look = after_look(NEW, replace(gang(seen), rolled_back=(back,)), at(50))
    stored, _ = accrue(kept, look, ())
    closed = closing_charges(kept, stored, at(60))
    assert closed is not None
    assert kinds(closed)[ChargeKind.DISK] == 55
    assert kinds(closed)[ChargeKind.ROLLED_BACK] == kinds(stored)[ChargeKind.ROLLED_BACK]


def test_the_end_of_a_machine_that_was_rolled_back_may_be_unknown() -> None:
    """It ended at some time after the last poll that found the gang."""
    told = replace(gang(state=GangState.STARTING), rolled_back=(node(0, 5),))
    look = replace(after_look(NEW, told, at(30)), denied=True)
    bill = close(look, attempt=replace(ATTEMPT, nodes=1))
    assert seconds(bill) == ([(0, 25)], 70)
    assert bill.unsure_bill is not None
    assert bill.unsure_bill.latest == at(100)


def test_the_time_of_a_machine_that_was_rolled_back_may_not_have_been_seen_at_all() -> None:
    told = replace(gang(state=GangState.ENDED), rolled_back=(node(0, 5, 45, unseen=True),))
    bill = close(after_look(NEW, told, at(50)), attempt=replace(ATTEMPT, nodes=1))
    assert (sum(each.amount.micros for each in bill.charges), seconds(bill)[1]) == (0, 40)


def test_all_ends_are_known_if_that_of_a_machine_that_was_rolled_back_is() -> None:
    """Its start is not known."""
    told = replace(gang(state=GangState.ENDED), rolled_back=(lost(node(0, 10, 40), 20),))
    bill = close(after_look(NEW, told, at(50)), attempt=replace(ATTEMPT, nodes=1))
    assert seconds(bill) == ([(0, 20)], 10)
    assert bill.unsure_bill is not None
    assert bill.unsure_bill.latest is None


def test_a_node_may_have_started_though_another_machine_was_rolled_back() -> None:
    told = replace(gang(node(0, None)), rolled_back=(node(0, 5, 15),))
    look = after_look(NEW, told, at(30))
    bill = close(look, attempt=replace(ATTEMPT, nodes=1), nodes=(agent(0, 10, 14),))
    assert seconds(bill) == ([(0, 10)], 70)


def test_a_rank_whose_only_machine_was_rolled_back_costs_no_more_than_this_machine() -> None:
    told = replace(gang(), rolled_back=(node(0, 5, 45),))
    bill = close(after_look(NEW, told, at(50)), attempt=replace(ATTEMPT, nodes=1))
    assert seconds(bill) == ([(0, 40)], 0)


def test_the_charges_of_a_poll_are_computed_once() -> None:
    look = after_look(NEW, gang(node(0, 5), node(1, None)), at(30))
    assert not is_accrual_due(ATTEMPT, after_look(NEW, gang(node(0, None)), at(30)))
    free = replace(ATTEMPT, offer=replace(OFFER, rate=HourlyRate(0)))
    assert not is_accrual_due(free, look)
    assert is_accrual_due(free, after_look(NEW, gang(node(0, 5), micros=1), at(30)))
    charges, look = accrue(ATTEMPT, look, ())
    assert [each.rank for each in charges] == [0]
    assert not is_accrual_due(ATTEMPT, look)
    assert is_accrual_due(ATTEMPT, after_look(look, gang(node(0, 5), node(1, None)), at(33)))


def test_a_rank_with_only_a_machine_that_was_rolled_back_is_missing() -> None:
    told = replace(gang(node(0, 5), node(1, None)), rolled_back=(node(1, 1, 4),))
    _, look = accrue(ATTEMPT, after_look(NEW, told, at(30)), ())
    assert look.accrued_at is None


def test_an_attempt_that_took_a_gang_over_does_not_pay_for_its_launch() -> None:
    taken = replace(ATTEMPT, nodes=1, adopted_at=at(60))
    told = gang(node(0, 20, 80), state=GangState.ENDED)
    look = after_look(NEW, replace(told, rolled_back=(node(0, 1, 19),)), at(90))
    assert seconds(close(look, attempt=taken)) == ([(0, 20)], 0)


def test_the_agent_of_a_machine_that_was_rolled_back_is_no_node() -> None:
    told = replace(gang(state=GangState.ENDED), rolled_back=(node(0, 5, 45),))
    look = replace(after_look(NEW, told, at(50)), denied=True)
    bill = close(look, attempt=replace(ATTEMPT, nodes=1), nodes=(agent(0, 20, 44),))
    assert seconds(bill) == ([(0, 40)], 0)


def test_the_bill_of_a_node_begins_with_the_first_of_its_charges() -> None:
    earlier = (charge(0, 10, 20), charge(0, 20, 40, 7_200_000))
    late = after_look(NEW, gang(node(0, 15, 50), state=GangState.ENDED), at(60))
    for stored in (earlier, earlier[::-1]):
        bill = close(late, attempt=replace(ATTEMPT, nodes=1), stored=stored)
        assert seconds(bill) == ([(0, 10), (0, 60)], 0)


@pytest.mark.parametrize(
    ("off", "verdict"), [(100, BillVerdict.AGREES), (101, BillVerdict.DIFFERS)]
)
def test_a_bill_may_differ_by_a_hundred_micro_dollars(off: int, verdict: BillVerdict) -> None:
    ended = replace(ATTEMPT, phase=AttemptPhase.ENDED, ended_at=at(90))
    seen = gang(node(0, 5, 45), state=GangState.ENDED)
    for sign in (1, -1):
        billed = replace(charge(0, 5, 45), amount=Money(40_000 + sign * off))
        assert audit_bill(ended, seen, (billed,)).verdict is verdict


def test_nodes_that_pay_one_machine_together_pay_until_the_last_one_ends() -> None:
    offer = replace(OFFER, payers=2, rate=HourlyRate(1_800_000))  # 1000 a second together
    shared = replace(ATTEMPT, offer=offer)
    ended = gang(node(0, 0, 10), node(1, 0, 50), state=GangState.ENDED)
    bill = close(after_look(NEW, ended, at(99)), attempt=shared)
    assert [(each.rank, each.amount.micros) for each in bill.charges] == [(0, 25_000), (1, 25_000)]
    looks = {shared.gang: after_look(NEW, gang(node(0, 0, 10), node(1, 0)), at(30))}
    running = replace(shared, phase=AttemptPhase.RUNNING)
    job = make_job_record(T0)
    rows = JobRows(job=job, attempts={1: running}, nodes={})
    assert spending(rows, (), looks, at(40)) == (Money(40_000), HourlyRate(3_600_000))


@pytest.mark.parametrize("lost_at", [20, 40])  # before the gang was taken over, and after
def test_a_machine_is_paid_once_while_a_rank_of_it_is_replaced(lost_at: float) -> None:
    """The nodes pay for the machine also between the loss of a rank and its new start."""
    offer = replace(OFFER, payers=2, rate=HourlyRate(1_800_000))  # 1000 a second together
    first = replace(ATTEMPT, offer=offer)
    told = gang(node(0, 0), node(1, 0, lost_at if lost_at < 30 else None))
    before = close_part(first, after_look(NEW, told, at(30)), (), (), at(30))
    second = replace(first, id="j-2", number=2, adopted_at=at(30), repairs=(1,))
    ended = gang(node(0, 0, 90), node(1, 50, 90), state=GangState.ENDED)
    ended = replace(ended, replaced=(node(1, 0, lost_at),))
    after = close(after_look(NEW, ended, at(99)), attempt=second)
    assert [each.amount.micros for each in before.charges] == [15_000, 15_000]
    assert [each.amount.micros for each in after.charges] == [30_000, 30_000]


def test_a_lost_node_is_billed_until_its_end_by_the_attempt_that_replaces_it() -> None:
    second = replace(ATTEMPT, id="j-2", number=2, adopted_at=at(30), repairs=(1,))
    ended = gang(node(0, 0, 90), node(1, 50, 90), state=GangState.ENDED)
    for lost_at, amounts in ((20, [60_000, 40_000]), (40, [60_000, 40_000, 10_000])):
        seen = replace(ended, replaced=(node(1, 0, lost_at),))
        bill = close(after_look(NEW, seen, at(99)), attempt=second)
        assert [each.amount.micros for each in bill.charges] == amounts
