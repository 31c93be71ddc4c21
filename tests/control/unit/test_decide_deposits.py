"""Results in a bucket are looked for once a rank's node has ended or was silent for its
lease, without the rank's exit."""

from datetime import timedelta

from tests.control.unit.test_decide_attempts import T0, at, make_job, view, with_exit, with_order

from cavvy.control.decide.attempt import (
    AdvanceAttempt,
    OrderRanks,
    RecheckAttempt,
    decide_attempt,
)
from cavvy.control.decide.attempt_snapshot import MARGIN, GangAbsence, is_gone, list_unreported
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import AttemptOutcome, AttemptPhase, JobPhase
from cavvy.domain.values import replace

LATER = at(3600)


def seen(state: GangState, *ended: int) -> GangSeen:
    nodes = [
        NodeSeen(rank=rank, engine_id="", started_at=T0, ended_at=at(90) if rank in ended else None)
        for rank in range(2)
    ]
    return GangSeen(name="g", state=state, nodes=nodes)


def test_ranks_of_ended_nodes_are_unreported_until_they_exit() -> None:
    for gang, ranks in (
        (seen(GangState.RUNNING), []),
        (seen(GangState.RUNNING, 1), [1]),
        (seen(GangState.ENDED), [0, 1]),
        (GangAbsence.UNKNOWN, []),
        (GangAbsence.ABSENT, []),  # one poll may be wrong
    ):
        assert list_unreported(view(ranks=2, seen=gang), LATER) == ranks
    ended = view(ranks=2, seen=seen(GangState.ENDED))
    assert list_unreported(with_exit(ended, 0, AttemptOutcome.EXIT, 3), LATER) == [1]


def test_a_node_may_have_results_although_it_was_heard_just_before_its_end() -> None:
    gang = seen(GangState.RUNNING, 0)
    reported = view(ranks=2, seen=gang)
    nodes = [replace(reported.nodes[0], heard_at=at(90)), reported.nodes[1]]
    assert list_unreported(replace(reported, nodes=tuple(nodes)), LATER) == [0]


def test_a_silent_node_may_have_results_once_its_lease_is_over() -> None:
    running = view(ranks=2, seen=seen(GangState.RUNNING))
    limits = running.job.task.limits
    lease = limits.unattended + running.job.task.grace + MARGIN
    nodes = (running.nodes[0], replace(running.nodes[1], heard_at=at(60)))
    for unheard in (running, replace(running, seen=GangAbsence.UNKNOWN)):
        silent = replace(unheard, nodes=nodes)
        assert list_unreported(silent, T0 + lease - timedelta(seconds=1)) == []
        assert list_unreported(silent, T0 + lease) == [0]


def test_a_forgotten_gang_is_unreported_unless_its_agents_report() -> None:
    forgotten = view(seen=GangAbsence.ABSENT, missed_looks=2)
    assert list_unreported(forgotten, LATER) == [0]
    assert list_unreported(forgotten, at(1)) == []


def test_unclaimed_ranks_and_judged_attempts_have_no_results() -> None:
    gang = seen(GangState.ENDED)
    assert list_unreported(view(seen=gang, claimed=False), LATER) == []
    for phase in (AttemptPhase.ENDING, AttemptPhase.ENDED, AttemptPhase.KEPT):
        assert list_unreported(view(phase, seen=gang), LATER) == []


def test_no_rank_is_judged_while_its_results_are_read() -> None:
    for gang in (seen(GangState.ENDED), seen(GangState.RUNNING, 0, 1)):
        both = view(ranks=2, seen=gang)
        assert isinstance(decide_attempt(both, LATER), AdvanceAttempt | OrderRanks)
        reading = replace(both, collecting=frozenset({0, 1}))
        assert isinstance(decide_attempt(reading, LATER), RecheckAttempt)
    forgotten = view(seen=GangAbsence.ABSENT, missed_looks=2)
    assert isinstance(decide_attempt(forgotten, LATER), AdvanceAttempt)
    reading = replace(forgotten, collecting=frozenset({0}))
    assert isinstance(decide_attempt(reading, LATER), RecheckAttempt)


def test_the_first_failure_is_named_after_all_results_are_read() -> None:
    ended = with_exit(view(ranks=2, seen=seen(GangState.ENDED)), 0, AttemptOutcome.EXIT, 1, 90)
    reading = replace(ended, collecting=frozenset({1}))
    assert isinstance(decide_attempt(reading, LATER), RecheckAttempt)
    action = decide_attempt(with_exit(ended, 1, AttemptOutcome.EXIT, 9, 80), LATER)
    assert isinstance(action, AdvanceAttempt)
    assert (action.rank, action.exit_code) == (1, 9)


def test_other_ranks_are_told_of_a_failure_while_results_are_read() -> None:
    failed = with_exit(view(ranks=3, seen=seen(GangState.RUNNING, 1)), 0, AttemptOutcome.EXIT, 1)
    action = decide_attempt(replace(failed, collecting=frozenset({1})), at(100))
    assert isinstance(action, OrderRanks)
    assert action.ranks == (2,)


def test_a_stop_waits_for_results_no_longer_than_the_grace_period() -> None:
    stopping = make_job(JobPhase.STOPPING, stop_reason="enough", since=at(100))
    grace = stopping.task.grace + MARGIN
    stopped = view(ranks=2, seen=seen(GangState.RUNNING, 1), job=stopping)
    reading = replace(stopped, collecting=frozenset({1}))
    action = decide_attempt(reading, at(101))
    assert isinstance(action, OrderRanks)
    assert action.ranks == (0,)
    told = with_order(reading, 0, "stop", at(101))
    assert isinstance(decide_attempt(told, at(102)), RecheckAttempt)
    for late in (told, replace(told, collecting=frozenset({0, 1}))):
        action = decide_attempt(late, at(100) + grace)
        assert isinstance(action, AdvanceAttempt)
        assert action.outcome is AttemptOutcome.STOPPED
        assert ("bucket" in action.reason) is (late is not told)


def test_a_reclaimed_gang_is_removed_in_time_unless_all_of_its_nodes_have_ended() -> None:
    noticed = view(ranks=2, seen=seen(GangState.RUNNING, 1))
    nodes = (replace(noticed.nodes[0], notice_until=at(120)), noticed.nodes[1])
    noticed = with_order(replace(noticed, nodes=nodes), 0, "notice", at(60))
    action = decide_attempt(replace(noticed, collecting=frozenset({1})), LATER)
    assert isinstance(action, AdvanceAttempt)
    assert action.outcome is AttemptOutcome.PREEMPTED
    reading = replace(noticed, seen=seen(GangState.ENDED), collecting=frozenset({0, 1}))
    assert isinstance(decide_attempt(reading, LATER), RecheckAttempt)


def test_waiting_for_results_costs_nothing_once_all_nodes_have_ended() -> None:
    assert is_gone(view(ranks=2, seen=seen(GangState.ENDED)), LATER)
    assert is_gone(view(seen=GangAbsence.ABSENT, missed_looks=2), LATER)
    assert not is_gone(view(ranks=2, seen=seen(GangState.RUNNING, 0)), LATER)
    assert not is_gone(view(seen=GangAbsence.UNKNOWN), LATER)
