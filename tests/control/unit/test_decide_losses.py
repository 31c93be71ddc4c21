"""Which gangs are repaired after a loss, and how long the other nodes wait."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide.attempt import AdvanceAttempt, OrderRanks, RecheckAttempt, decide_attempt
from cavvy.control.decide.attempt_snapshot import AttemptSnapshot, GangAbsence
from cavvy.control.decide.looks import GangLook
from cavvy.control.decide.losses import RepairGang, can_repair, wait_for_capacity
from cavvy.control.decide.repair import repair_gang
from cavvy.control.decide.rows import JobRows, RowChanges
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import (
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    Node,
    NodePhase,
    Order,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import JobGroup, LossPolicy, RetryPolicy, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen

T0 = datetime(2030, 1, 1, tzinfo=UTC)
NOW = T0 + timedelta(hours=1)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
STOPPED, EXIT = AttemptOutcome.STOPPED, AttemptOutcome.EXIT
NODE, PREEMPTED = AttemptOutcome.NODE, AttemptOutcome.PREEMPTED
TASK = TaskSpec(name="j", run="true", nodes=4)


def exited(rank: int, outcome: AttemptOutcome, after_s: float = 5) -> Node:
    return Node(
        attempt_id="j-1",
        project="p",
        rank=rank,
        phase=NodePhase.EXITED,
        claim="n",
        claimed_at=T0,
        heard_at=NOW,
        running_at=T0,
        exited_at=NOW + timedelta(seconds=after_s),
        exit_outcome=outcome,
        exit_code=1,
    )


def view(
    nodes: Sequence[Node],
    *,
    gone: Sequence[int] = (),
    task: TaskSpec = TASK,
    offer: Offer = OFFER,
    replaces: bool = True,
    **job: object,
) -> AttemptSnapshot:
    seen = [
        NodeSeen(
            rank=x.rank, engine_id="m", started_at=T0, ended_at=NOW if x.rank in gone else None
        )
        for x in nodes
    ]
    record = replace(make_job_record(T0, phase=JobPhase.RUNNING, attempt=1), task=task)
    attempt = make_attempt_record(T0, offer, nodes=len(nodes), phase=AttemptPhase.RUNNING)
    return AttemptSnapshot(
        job=replace(record, **job),  # type: ignore[arg-type]
        attempt=replace(attempt, launched_at=T0, running_at=T0 + timedelta(minutes=4)),
        nodes=tuple(nodes),
        seen=GangSeen(name=attempt.gang, state=GangState.RUNNING, nodes=seen),
        visibility_delay=timedelta(minutes=2),
        listening_since=T0,
        replaces=replaces,
    )


def four(*outcomes: AttemptOutcome) -> list[Node]:
    return [exited(rank, outcome) for rank, outcome in enumerate(outcomes)]


LOST_ONE = four(STOPPED, NODE, EXIT, STOPPED)
LOST_ONE[1] = replace(LOST_ONE[1], exited_at=NOW)
LATER = NOW + timedelta(minutes=1)


def test_the_others_are_kept_when_all_have_ended() -> None:
    action = decide_attempt(view(LOST_ONE), LATER)
    assert isinstance(action, RepairGang)
    assert (action.ranks, action.outcome, action.kind, action.anew) == ((1,), NODE, "node", False)


def test_the_others_are_stopped_first() -> None:
    running = [replace(x, phase=NodePhase.RUNNING, exit_outcome=None) for x in LOST_ONE]
    action = decide_attempt(view([running[0], LOST_ONE[1], *running[2:]]), NOW)
    assert isinstance(action, OrderRanks)
    assert (action.ranks, action.kind) == ((0, 2, 3), "stop")


def leaving(after_s: float) -> Node:
    """Return rank 1, whose node is reclaimed then, and which works."""
    order = Order(seq=1, kind="notice", seconds=after_s, reason="", at=NOW)
    until = NOW + timedelta(seconds=after_s)
    heard = NOW + timedelta(hours=1)
    working = exited(1, STOPPED)
    return replace(
        working,
        phase=NodePhase.RUNNING,
        exit_outcome=None,
        exited_at=None,
        notice_until=until,
        order=order,
        heard_at=heard,
    )


def test_a_node_that_is_reclaimed_has_its_time_though_the_others_have_ended() -> None:
    nodes = [*four(STOPPED, STOPPED, STOPPED, STOPPED)]
    nodes[1] = leaving(120)
    for at in (NOW + timedelta(seconds=6), NOW + timedelta(seconds=110)):
        assert isinstance(decide_attempt(view(nodes), at), RecheckAttempt)
    nodes[1] = exited(1, PREEMPTED, 115)
    action = decide_attempt(view(nodes), NOW + timedelta(seconds=116))
    assert isinstance(action, RepairGang)
    assert action.ranks == (1,)


@pytest.mark.parametrize("told_at_s", [None, 8])
def test_a_node_that_is_reclaimed_is_stopped_when_another_has_failed(
    told_at_s: float | None,
) -> None:
    nodes = [*four(EXIT, STOPPED, STOPPED, STOPPED)]
    nodes[1] = leaving(15 * 60)
    if told_at_s is not None:  # it had failed before it was told
        at = NOW + timedelta(seconds=told_at_s)
        stop = Order(seq=1, kind="stop", seconds=10, reason="", at=at)
        nodes[0] = replace(nodes[0], order=stop)
    action = decide_attempt(view(nodes), LATER)
    assert isinstance(action, OrderRanks)
    assert (action.ranks, action.kind, action.seconds) == ((1,), "stop", 10)
    assert action.reason == "rank 0 failed"


def test_a_node_that_is_reclaimed_has_its_time_when_another_failed_upon_the_order_to_stop() -> None:
    stop = Order(seq=1, kind="stop", seconds=10, reason="", at=NOW)
    nodes = [*four(EXIT, STOPPED, STOPPED, STOPPED)]
    nodes[:2] = replace(nodes[0], order=stop), leaving(15 * 60)
    assert isinstance(decide_attempt(view(nodes), LATER), RecheckAttempt)


def test_a_node_that_is_reclaimed_has_its_time_when_others_lost_their_connection_to_it() -> None:
    nodes = [*four(EXIT, STOPPED, EXIT, EXIT)]
    nodes = [replace(each, exit_failure=FailureKind.NETWORK) for each in nodes]
    nodes[1] = leaving(120)
    assert isinstance(decide_attempt(view(nodes), LATER), RecheckAttempt)


def test_a_node_that_is_reclaimed_in_days_is_not_awaited() -> None:
    nodes = [*four(STOPPED, STOPPED, STOPPED, STOPPED)]
    nodes[1] = leaving(3 * 86400)
    action = decide_attempt(view(nodes), NOW + timedelta(minutes=14))
    assert isinstance(action, RecheckAttempt)
    assert action.after <= timedelta(minutes=2)
    action = decide_attempt(view(nodes), NOW + timedelta(minutes=16))
    assert isinstance(action, OrderRanks)
    assert (action.ranks, action.kind) == ((1,), "stop")


@pytest.mark.parametrize(
    "lost",
    [
        view(LOST_ONE, replaces=False),
        view(LOST_ONE, task=replace(TASK, on_loss=LossPolicy.RESTART)),
        view(LOST_ONE, task=replace(TASK, group=JobGroup(name="g"))),
        view(LOST_ONE, task=replace(TASK, retry=RetryPolicy(node=0))),
        view(four(NODE, NODE, NODE, NODE)),
        view(four(STOPPED, NODE, AttemptOutcome.SUCCEEDED, STOPPED)),
        view(LOST_ONE, gone=(0, 1, 2, 3)),
        view(
            [replace(x, exit_failure=FailureKind.GPU) for x in LOST_ONE],
            offer=replace(OFFER, shared=True),
        ),
    ],
)
def test_these_gangs_are_released(lost: AttemptSnapshot) -> None:
    action = decide_attempt(lost, LATER)
    assert isinstance(action, AdvanceAttempt)
    assert action.phase is AttemptPhase.ENDING


@pytest.mark.parametrize("outcome", [NODE, EXIT])
def test_a_rank_that_was_cut_off_did_not_fail_first(outcome: AttemptOutcome) -> None:
    """It notices the loss of another rank before this is reported."""
    cut = replace(exited(0, EXIT, after_s=-9), exit_failure=FailureKind.NETWORK)
    nodes = [cut, exited(1, outcome), *(replace(cut, rank=rank) for rank in (2, 3))]
    action = decide_attempt(view(nodes), LATER)
    assert isinstance(action, RepairGang if outcome is NODE else AdvanceAttempt)
    assert (action.rank, action.outcome) == (1, outcome)


def test_a_failed_program_is_no_loss() -> None:
    action = decide_attempt(view(four(EXIT, STOPPED, STOPPED, STOPPED)), LATER)
    assert isinstance(action, AdvanceAttempt)
    assert action.outcome is EXIT


def test_the_provider_is_asked_before_a_gang_with_failed_ranks_ends() -> None:
    """Its last answer was lost, and the next one may name the lost node."""
    silent = replace(view(four(EXIT, STOPPED, STOPPED, STOPPED)), seen=GangAbsence.UNKNOWN)
    assert isinstance(decide_attempt(silent, LATER), RecheckAttempt)
    assert isinstance(decide_attempt(silent, NOW + timedelta(minutes=9)), AdvanceAttempt)


@given(
    st.lists(st.sampled_from([STOPPED, EXIT, NODE, PREEMPTED]), min_size=2, max_size=8),
    st.sets(st.integers(0, 7), max_size=8),
)
def test_a_repair_keeps_only_nodes_that_run_and_whose_agents_wait(
    outcomes: list[AttemptOutcome], gone: set[int]
) -> None:
    nodes = four(*outcomes)
    task = replace(TASK, nodes=len(nodes))
    action = decide_attempt(view(nodes, gone=tuple(gone), task=task), LATER)
    if isinstance(action, RepairGang):
        kept = [x for x in nodes if x.rank not in action.ranks]
        assert kept
        assert action.ranks
        assert all(x.exit_outcome in (STOPPED, EXIT) and x.rank not in gone for x in kept)


def test_the_wait_costs_no_more_than_a_new_start_of_all_nodes() -> None:
    attempt = view(LOST_ONE).attempt  # which took four minutes to start
    assert wait_for_capacity(attempt, 1) == timedelta(minutes=4) * 4 / 3 + timedelta(seconds=5)
    quick = replace(attempt, running_at=T0 + timedelta(seconds=1))
    assert wait_for_capacity(quick, 1) == timedelta(minutes=1, seconds=5)
    slow = replace(attempt, running_at=T0 + timedelta(hours=2))
    assert wait_for_capacity(slow, 3) == timedelta(minutes=15, seconds=5)


def test_a_single_node_is_never_repaired() -> None:
    assert not can_repair(replace(TASK, nodes=1))
    assert can_repair(TASK)


SEEN_AT = NOW + timedelta(seconds=30)


def repair(lost: AttemptSnapshot, **action: object) -> RowChanges:
    """Repair a gang whose rank 1 was lost; the provider has told so before the repair."""
    assert isinstance(lost.seen, GangSeen)
    found = RepairGang(ranks=(1,), outcome=NODE, reason="rank 1 is lost", kind="node", anew=False)
    rows = JobRows(job=lost.job, attempts={1: lost.attempt}, nodes={lost.attempt.id: lost.nodes})
    look = GangLook(told=lost.seen, told_at=SEEN_AT)
    return repair_gang(rows, lost.attempt, replace(found, **action), look, (), LATER)  # type: ignore[arg-type]


def test_a_repaired_gang_belongs_to_the_next_attempt_from_when_it_was_seen() -> None:
    lost = view(LOST_ONE)
    ended, fresh = repair(lost).attempts
    assert (ended.phase, ended.ended_at, fresh.adopted_at) == (AttemptPhase.ENDED, SEEN_AT, SEEN_AT)
    assert fresh.gang == lost.attempt.gang != ended.gang
    assert (fresh.repairs, fresh.launched_at) == ((1,), LATER)
    assert fresh.repair_until == LATER + wait_for_capacity(lost.attempt, 1)


@pytest.mark.parametrize(("least", "waits"), [(3, False), (4, True)])
def test_an_elastic_job_waits_for_capacity_only_if_fewer_nodes_are_too_few(
    least: int, waits: bool
) -> None:
    lost = view(LOST_ONE, task=replace(TASK, elastic=NodeRange(least=least, most=4)))
    _, fresh = repair(lost).attempts
    assert fresh.repair_until == LATER + (
        wait_for_capacity(lost.attempt, 1) if waits else timedelta(0)
    )


@pytest.mark.parametrize(("anew", "count"), [(False, 3), (True, 1)])
def test_a_repair_counts_as_a_retry(anew: bool, count: int) -> None:
    job = repair(view(LOST_ONE, retries={"node": 2}), anew=anew).job
    assert job is not None
    assert job.retries == {"node": count}


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STARTING])
def test_a_repair_of_a_job_that_starts_does_not_begin_its_start_anew(phase: JobPhase) -> None:
    job = repair(view(LOST_ONE, phase=phase, since=T0)).job
    assert job is not None
    assert (job.phase, job.since) == (
        JobPhase.STARTING,
        T0 if phase is JobPhase.STARTING else LATER,
    )


def test_kept_ranks_without_a_token_of_their_own_keep_that_of_the_gang() -> None:
    """Rank 0 has got one with its work, and rank 2 before the attempt, whose rank 3 has none."""
    nodes = [replace(LOST_ONE[0], sealed=True, running_at=None), *LOST_ONE[1:]]
    first = view(nodes)
    assert repair(first).attempts[1].open_ranks == (2, 3)
    again = replace(first, attempt=replace(first.attempt, repairs=(1,), open_ranks=(3,)))
    assert repair(again).attempts[1].open_ranks == (3,)
