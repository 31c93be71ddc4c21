"""What an action changes in the rows of a job, and what follows from a write."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide import attempt as gangs
from cavvy.control.decide.attempt_snapshot import GangAbsence
from cavvy.control.decide.bills import ClosedBill, budget_left, spending
from cavvy.control.decide.job import AdvanceJob, RequeueJob, StopAtLimit
from cavvy.control.decide.looks import GangLook, after_look, after_move, is_look_due
from cavvy.control.decide.rows import JobRows, RowChanges, make_event
from cavvy.control.decide.transitions import (
    _close,
    adjust_attempt,
    advance_attempt,
    advance_job,
    find_undelivered,
    is_freed,
    requeue_job,
    stop_at_limit,
    wakes_queue,
    wanted_deliveries,
)
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    AttemptWait,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    Order,
    StopCause,
    UnsureBill,
    WaitKind,
)
from cavvy.domain.machines import NamedMachine
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Delivery, JobLimits, WebhookTarget
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(3_600_000))
JOB = make_job_record(NOW, phase=JobPhase.RUNNING, since=NOW - MINUTE, attempt=1)
ATTEMPT = make_attempt_record(
    NOW - 9 * MINUTE,
    OFFER,
    gang="g1",
    nodes=2,
    phase=AttemptPhase.RUNNING,
    reason="the work runs",
    launched_at=NOW - 9 * MINUTE,
    expected_at=NOW,
    wait=AttemptWait(kind=WaitKind.AT_RISK),
    missed_looks=1,
    missed_since=NOW - MINUTE,
)
NODES = [Node(attempt_id="j-1", project="p", rank=rank, claim="c") for rank in range(2)]


def rows(attempt: Attempt = ATTEMPT, *nodes: Node, job: JobRecord = JOB) -> JobRows:
    return JobRows(job=job, attempts={1: attempt}, nodes={"j-1": nodes or NODES})


# Jobs


@pytest.mark.parametrize(
    ("phase", "ended", "code", "notices"),
    [
        (JobPhase.STOPPING, None, None, ()),
        (JobPhase.DONE, NOW, 7, (Delivery.FINISH,)),
        (JobPhase.FAILED, NOW, 7, (Delivery.FAILURE,)),
    ],
)
def test_only_an_end_has_a_time_a_code_and_a_notice(
    phase: JobPhase, ended: datetime | None, code: int | None, notices: tuple[Delivery, ...]
) -> None:
    changes = advance_job(JOB, AdvanceJob(phase=phase, reason="because", exit_code=7), NOW)
    job = changes.job
    assert job is not None
    assert (job.phase, job.reason, job.since) == (phase, "because", NOW)
    assert (job.ended_at, job.exit_code, changes.notices) == (ended, code, notices)
    assert [event.kind for event in changes.events] == [phase]


@pytest.mark.parametrize(
    ("phase", "cause", "after", "notices"),
    [
        (JobPhase.RUNNING, StopCause.DURATION, JobPhase.STOPPING, ()),
        (JobPhase.RUNNING, StopCause.BUDGET, JobPhase.STOPPING, (Delivery.BUDGET,)),
        (JobPhase.QUEUED, StopCause.DEADLINE, JobPhase.FAILED, (Delivery.FAILURE,)),
    ],
)
def test_a_limit_stops_a_job_at_once_only_where_it_waits(
    phase: JobPhase, cause: StopCause, after: JobPhase, notices: tuple[Delivery, ...]
) -> None:
    changes = stop_at_limit(replace(JOB, phase=phase), StopAtLimit(reason="x", cause=cause), NOW)
    assert changes.job is not None
    assert (changes.job.phase, changes.job.stop_reason, changes.job.stop_cause) == (
        after,
        "x",
        cause,
    )
    assert changes.notices == notices


def test_a_job_that_waits_again_avoids_what_failed_and_forgets_cooldowns_that_are_over() -> None:
    job = replace(
        JOB, avoid={"old": NOW, "later": NOW + SECOND}, retries={"node": 1}, standbys=(2,)
    )
    lost = replace(ATTEMPT, outcome=AttemptOutcome.NODE)
    again = RequeueJob(kind="node", reason="lost", delay=SECOND, avoid=MINUTE)
    changes = requeue_job(job, lost, again, "p/r/t", NOW)
    assert changes.job is not None
    assert changes.job.avoid == {"later": NOW + SECOND, "p/r/t": NOW + MINUTE}
    assert (changes.job.retries, changes.job.standbys) == ({"node": 2}, ())
    assert (changes.job.phase, changes.job.not_before) == (JobPhase.QUEUED, NOW + SECOND)
    assert [event.kind for event in changes.events] == ["queued", "avoided"]
    assert changes.stale_market
    bare = requeue_job(job, None, RequeueJob(kind="move", reason="moved"), "", NOW)
    assert bare.job is not None
    assert (bare.job.not_before, [event.kind for event in bare.events]) == (None, ["queued"])
    assert not bare.stale_market
    denied = replace(lost, outcome=AttemptOutcome.CAPACITY)
    assert not requeue_job(job, denied, again, "", NOW).stale_market


def test_a_webhook_is_owed_what_it_wants_and_has_not_heard() -> None:
    hooks = tuple(
        WebhookTarget(url=f"http://{name}", on=on)
        for name, on in (("a", (Delivery.BUDGET, Delivery.FAILURE)), ("b", (Delivery.FAILURE,)))
    )
    failed = replace(
        JOB,
        task=replace(JOB.task, webhooks=hooks),
        phase=JobPhase.FAILED,
        stop_cause=StopCause.BUDGET,
    )
    assert wanted_deliveries(failed) == [Delivery.BUDGET, Delivery.FAILURE]
    assert wanted_deliveries(replace(failed, phase=JobPhase.STOPPING)) == [Delivery.BUDGET]
    assert wanted_deliveries(replace(failed, phase=JobPhase.DONE, stop_cause=None)) == []
    heard = [make_event(failed, NOW, "webhook", "", fact=fact) for fact in ("budget", "failure")]
    other = make_event(failed, NOW, "note", "", fact=Delivery.FAILURE)
    wanted = wanted_deliveries(failed)
    assert find_undelivered(failed, wanted, [*heard, other]) == [Delivery.FAILURE]
    assert find_undelivered(failed, wanted, [*heard, heard[1]]) == []


# Attempts


def advance(
    attempt: Attempt, phase: AttemptPhase, *nodes: Node, job: JobRecord = JOB, **fields: Any
) -> RowChanges:
    action = gangs.AdvanceAttempt(phase=phase, reason="next", **fields)
    look = GangLook(
        told=GangSeen(
            name="g1",
            state=GangState.RUNNING,
            nodes=[NodeSeen(rank=0, engine_id="0", started_at=NOW - MINUTE)],
        ),
        told_at=NOW,
    )
    return advance_attempt(rows(attempt, *nodes, job=job), attempt, action, look, NOW)


def test_a_gang_that_was_found_is_missed_no_more() -> None:
    changed = advance(replace(ATTEMPT, phase=AttemptPhase.LAUNCHING), AttemptPhase.BOOTING)
    [attempt] = changed.attempts
    assert (attempt.launched_at, attempt.missed_looks, attempt.missed_since) == (NOW, 0, None)
    assert (attempt.reason, attempt.expected_at, attempt.wait) == ("next", None, None)


def test_work_runs_since_its_last_rank_does() -> None:
    began = [replace(NODES[0], running_at=NOW - MINUTE), replace(NODES[1], running_at=NOW - SECOND)]
    booting = replace(ATTEMPT, phase=AttemptPhase.BOOTING)
    assert advance(booting, AttemptPhase.RUNNING, *began).attempts[0].running_at == NOW - SECOND
    assert advance(booting, AttemptPhase.RUNNING).attempts[0].running_at == NOW


def test_work_ends_with_its_last_exit_where_all_are_known() -> None:
    out = [replace(node, exited_at=NOW - (1 + node.rank) * SECOND) for node in NODES]
    ended: dict[str, Any] = {"outcome": AttemptOutcome.EXIT, "exit_code": 3, "rank": 1}
    [attempt] = advance(ATTEMPT, AttemptPhase.ENDING, *out, **ended).attempts
    assert (attempt.outcome, attempt.exit_code, attempt.first_failed_rank) == ("exit", 3, 1)
    assert attempt.finished_at == NOW - SECOND
    [attempt] = advance(ATTEMPT, AttemptPhase.ENDING, out[0], NODES[1], **ended).attempts
    assert attempt.finished_at == NOW


def test_work_that_was_over_before_its_start_was_noticed_did_run() -> None:
    ran = [replace(node, running_at=NOW - (1 + node.rank) * MINUTE) for node in NODES]
    for nodes, began in ((ran, NOW - MINUTE), ([ran[0], NODES[1]], None)):
        [attempt] = advance(ATTEMPT, AttemptPhase.ENDING, *nodes).attempts
        assert attempt.running_at == began
    known = replace(ATTEMPT, running_at=NOW - 5 * MINUTE)
    assert advance(known, AttemptPhase.ENDING, *ran).attempts[0].running_at == NOW - 5 * MINUTE


def test_an_end_is_an_event_of_the_attempt_where_the_job_does_not_say_it() -> None:
    told = advance(ATTEMPT, AttemptPhase.ENDING, outcome=AttemptOutcome.NODE)
    assert [(event.kind, event.fact) for event in told.events] == [("node", "node-fault")]
    assert not told.charges
    silent = advance(ATTEMPT, AttemptPhase.ENDING, outcome=AttemptOutcome.SUCCEEDED)
    assert silent.events == ()


def test_a_kept_gang_is_billed_until_now_and_gives_its_end() -> None:
    until = NOW + MINUTE
    kept = advance(ATTEMPT, AttemptPhase.KEPT, outcome=AttemptOutcome.SUCCEEDED, until=until)
    assert (kept.attempts[0].kept_since, kept.attempts[0].kept_until) == (NOW, until)
    assert [event.kind for event in kept.events] == ["kept"]
    assert sum(charge.amount.micros for charge in kept.charges) == 60_000
    over = advance(replace(ATTEMPT, phase=AttemptPhase.KEPT), AttemptPhase.ENDING)
    assert (over.attempts[0].reason, over.attempts[0].outcome) == ("the work runs", None)
    assert [event.text for event in over.events] == ["next"]


def test_a_gang_that_was_never_requested_costs_nothing_and_says_nothing() -> None:
    attempt = replace(ATTEMPT, phase=AttemptPhase.ENDING, finished_at=NOW - SECOND)
    attempt = replace(attempt, launched_at=None)
    action = gangs.AdvanceAttempt(phase=AttemptPhase.ENDED, reason="gone")
    changes = advance_attempt(rows(attempt), attempt, action, GangLook(), NOW)
    assert (changes.events, changes.charges, changes.release) == ((), (), ("g1",))
    assert changes.attempts[0].ended_at == NOW - SECOND


@pytest.mark.parametrize("look", [GangLook(), GangLook(doubt=True), GangLook(denied=True)])
@pytest.mark.parametrize("accepted", [True, False])
def test_a_gang_that_its_provider_never_showed_may_have_cost_something(
    accepted: bool, look: GangLook
) -> None:
    began = NOW - 60 * SECOND
    attempt = replace(ATTEMPT, phase=AttemptPhase.ENDING, finished_at=NOW, created_at=began)
    attempt = replace(attempt, launched_at=began if accepted else None)
    action = gangs.AdvanceAttempt(phase=AttemptPhase.ENDED, reason="gone")
    changes = advance_attempt(rows(attempt), attempt, action, look, NOW)
    unseen = changes.attempts[0].unsure_bill
    assert changes.charges == ()
    assert (unseen is not None) == ((accepted or look.doubt) and not look.denied)
    if unseen is not None:
        price = attempt.offer.rate.times(attempt.nodes)
        assert (unseen.latest, unseen.more) == (NOW, price.over(60 * SECOND))
        assert [event.kind for event in changes.events] == ["unsure"]


def test_orders_are_numbered_and_looks_are_counted() -> None:
    old = Order(seq=4, kind="notice", seconds=1, reason="x")
    nodes = [NODES[0], replace(NODES[1], order=old)]
    order = gangs.OrderRanks(ranks=(0, 1), kind="stop", seconds=30, reason="enough")
    changes = adjust_attempt(rows(ATTEMPT, *nodes), ATTEMPT, order, NOW)
    assert [node.order.seq for node in changes.nodes if node.order] == [1, 5]
    assert changes.events[0].text == "enough: ranks 0, 1 must stop within 30 s"
    one = replace(order, ranks=(0,), kind="notice", reason="a fire drill reclaims the node")
    text = adjust_attempt(rows(ATTEMPT, NODES[0]), ATTEMPT, one, NOW).events[0].text
    assert text == "a fire drill reclaims the node: the node has 30 s left"
    gang = replace(one, reason="rank 1 is being reclaimed")
    text = adjust_attempt(rows(ATTEMPT, *nodes), ATTEMPT, gang, NOW).events[0].text
    assert text == "rank 1 is being reclaimed: rank 0 has 30 s left"
    [missed] = adjust_attempt(rows(), ATTEMPT, gangs.CountMiss(), NOW).attempts
    assert (missed.missed_looks, missed.missed_since) == (2, NOW - MINUTE)
    [found] = adjust_attempt(rows(), ATTEMPT, gangs.ClearMisses(), NOW).attempts
    assert (found.missed_looks, found.missed_since) == (0, None)
    [first] = adjust_attempt(rows(), found, gangs.CountMiss(), NOW).attempts
    assert (first.missed_looks, first.missed_since) == (1, NOW)


def test_capacity_is_free_once_a_gang_is_gone_or_will_not_be_bought() -> None:
    for phase, launched, freed in (
        (AttemptPhase.ENDED, NOW, True),
        (AttemptPhase.ENDING, None, True),
        (AttemptPhase.ENDING, NOW, False),
        (AttemptPhase.RUNNING, None, False),
    ):
        assert is_freed(replace(ATTEMPT, phase=phase, launched_at=launched)) is freed


def test_the_queue_looks_again_when_something_may_be_placed() -> None:
    assert wakes_queue(RowChanges(release=("g",)))
    assert wakes_queue(RowChanges(job=replace(JOB, phase=JobPhase.QUEUED)))
    assert wakes_queue(RowChanges(attempts=(replace(ATTEMPT, phase=AttemptPhase.KEPT),)))
    assert not wakes_queue(RowChanges(job=JOB, attempts=(ATTEMPT,)))


# Bills and looks


def test_what_a_job_spends_is_known_before_the_first_look() -> None:
    looks = {"g1": GangLook()}
    spent, rate = spending(rows(), [], looks, NOW)
    assert (spent, rate) == (Money(1_080_000), HourlyRate(7_200_000))
    booting = replace(ATTEMPT, phase=AttemptPhase.BOOTING)
    assert spending(rows(booting), [], {}, NOW) == (Money(0), HourlyRate(0))
    nodes = [NodeSeen(rank=0, engine_id="0", started_at=NOW - MINUTE)]
    nodes += [NodeSeen(rank=1, engine_id="1", started_at=NOW - MINUTE, ended_at=NOW - 30 * SECOND)]
    told = GangSeen(name="g1", state=GangState.RUNNING, nodes=nodes)
    seen = {"g1": GangLook(told=told, told_at=NOW)}
    assert spending(rows(), [], seen, NOW) == (Money(90_000), HourlyRate(3_600_000))
    dear = replace(told, rates=((NOW - MINUTE, HourlyRate(7_200_000)),))
    seen = {"g1": GangLook(told=dear, told_at=NOW)}
    assert spending(rows(), [], seen, NOW) == (Money(180_000), HourlyRate(7_200_000))
    over = replace(ATTEMPT, phase=AttemptPhase.ENDED)
    assert spending(rows(over), [], seen, NOW) == (Money(0), HourlyRate(0))


def test_no_more_is_left_than_the_budget() -> None:
    capped = replace(JOB, task=replace(JOB.task, limits=JobLimits(budget=Money(10))))
    assert budget_left(capped, Money(4)) == Money(6)
    assert budget_left(capped, Money(40)) == Money(0)
    assert budget_left(JOB, Money(4)) is None


@pytest.mark.parametrize(
    ("phase", "look", "due"),
    [
        (AttemptPhase.LAUNCHING, GangLook(), False),
        (AttemptPhase.LAUNCHING, GangLook(doubt=True), True),
        (AttemptPhase.ENDING, GangLook(), False),
        (AttemptPhase.ENDING, GangLook(removed_at=NOW), True),
        (AttemptPhase.ENDING, GangLook(removed_at=NOW, fresh=True, looked_at=NOW), False),
        (AttemptPhase.RUNNING, GangLook(), True),
        (AttemptPhase.RUNNING, GangLook(looked_at=NOW - 29 * SECOND), False),
        (AttemptPhase.RUNNING, GangLook(looked_at=NOW - 30 * SECOND), True),
        (AttemptPhase.BOOTING, GangLook(looked_at=NOW - 15 * SECOND), True),
        (
            AttemptPhase.RUNNING,
            GangLook(looked_at=NOW - SECOND, seen=GangAbsence.ABSENT),
            True,
        ),
    ],
)
def test_a_gang_is_looked_at_when_it_is_time(
    phase: AttemptPhase, look: GangLook, due: bool
) -> None:
    assert is_look_due(replace(ATTEMPT, phase=phase), look, 8 * SECOND, NOW) is due


def test_a_look_that_does_not_find_the_gang_leaves_what_was_seen_before() -> None:
    seen = GangSeen(name="g1", state=GangState.RUNNING)
    found = after_look(GangLook(), seen, NOW)
    assert (found.told, found.told_at, found.fresh) == (seen, NOW, True)
    missed = after_look(found, GangAbsence.ABSENT, NOW + SECOND)
    assert (missed.seen, missed.told, missed.told_at) == ("absent", seen, NOW)


def test_a_gang_that_ends_is_removed_anew() -> None:
    look = GangLook(removed_at=NOW, looked_at=NOW, accrued_at=NOW)
    assert after_move(look, AttemptPhase.ENDING) == replace(look, removed_at=None)
    assert after_move(look, AttemptPhase.KEPT) == GangLook()
    assert after_move(look, AttemptPhase.ENDED) == look


def test_changes_leave_other_rows_as_they_are() -> None:
    node = replace(NODES[1], phase=NodePhase.EXITED)
    after = rows().after(RowChanges(nodes=(node,)))
    assert (after.job, after.attempts, list(after.nodes["j-1"])) == (
        JOB,
        {1: ATTEMPT},
        [NODES[0], node],
    )


def test_a_machine_is_written_with_the_changes_before_and_after_it() -> None:
    machine = NamedMachine(project="p", name="dev", task=JOB.task)
    none, some = RowChanges(), RowChanges(machine=machine)
    assert none.then(some).machine == some.then(none).machine == machine
    assert some.then(RowChanges(machine=replace(machine, job_id="j"))).machine != machine


@pytest.mark.parametrize(
    ("nodes", "state", "expected"),
    [
        (
            [(0, 60)],
            GangState.ENDED,
            [("billed", "the gang has ended; it cost $0.06 for 1m00s of use")],
        ),
        (
            [(0, None)],
            GangState.RUNNING,
            [
                ("billed", "the gang has ended; it cost $0.06 for 1m00s of use"),
                (
                    "unsure",
                    "p did not report when the gang ended: it cost between $0.06 (until it was "
                    "last seen) and $0.12 (until 2030-01-01 00:02:00 UTC)",
                ),
            ],
        ),
    ],
)
def test_the_end_of_a_gang_states_its_cost(
    nodes: list[tuple[float, float | None]], state: GangState, expected: list[tuple[str, str]]
) -> None:
    attempt = replace(
        ATTEMPT, phase=AttemptPhase.ENDING, nodes=1, created_at=NOW, since=NOW, launched_at=NOW
    )
    seen = [
        NodeSeen(
            rank=0,
            engine_id="e",
            started_at=NOW + since * SECOND,
            ended_at=None if until is None else NOW + until * SECOND,
        )
        for since, until in nodes
    ]
    look = after_look(GangLook(), GangSeen(name="g1", state=state, nodes=seen), NOW + MINUTE)
    action = gangs.AdvanceAttempt(phase=AttemptPhase.ENDED, reason="gone")
    changes = advance_attempt(rows(attempt), attempt, action, look, NOW + 2 * MINUTE)
    assert [(each.kind, each.text) for each in changes.events] == expected


@pytest.mark.parametrize(
    ("unsure", "text"),
    [
        (
            UnsureBill(latest=None, more=Money(60_000), traffic=Money(60_000)),
            "a node was lost and may have been sending a checkpoint: including the traffic, the "
            "gang cost between $0.04 and $0.10",
        ),
        (
            UnsureBill(latest=None, more=Money(60_000), traffic=Money(50_000)),
            "p did not report when the bill of each node began: the gang cost between $0.04 and "
            "$0.10",
        ),
    ],
)
def test_an_unsure_bill_states_its_cause_and_its_bounds(unsure: UnsureBill, text: str) -> None:
    charge = Charge(
        project="p",
        job_id="j",
        attempt_id="j-1",
        rank=0,
        kind=ChargeKind.TRAFFIC,
        since=NOW,
        until=NOW,
        rate=HourlyRate(0),
        amount=Money(40_000),
    )
    bill = ClosedBill(charges=(charge,), ended_at=NOW, unsure_bill=unsure)
    billed, told = _close(rows(), ATTEMPT, bill, NOW).events
    assert billed.text == (
        "the gang has ended; it cost $0.04 for 0s of use, of which $0.04 is for traffic"
    )
    assert told.text == text
