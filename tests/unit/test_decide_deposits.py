"""Results in a bucket are looked for once a rank's node has ended or was silent for its
lease, without the rank's exit."""

from dataclasses import replace
from datetime import timedelta

from tests.unit.test_decide_attempts import T0, at, view, with_exit

from cavvy.control.decide.attempt_snapshot import MARGIN, GangAbsence
from cavvy.control.decide.deposits import list_unreported
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import AttemptOutcome, AttemptPhase

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
