"""Decides which ranks may have left their results in a bucket."""

from datetime import datetime, timedelta

from cavvy.control.decide.attempt import (
    AttemptSnapshot,
    GangAbsence,
    is_heard_lately,
    is_surely_absent,
)
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import AttemptPhase, NodePhase

# Agents store results after a longer silence; the rest is for differences between clocks.
_SILENCE = timedelta(seconds=30)


def list_unreported(view: AttemptSnapshot, now: datetime) -> list[int]:
    """The ranks whose node has ended after a silence of its agent, which has not reported the exit.
    Their results are looked for before the ranks count as lost.
    """
    if view.attempt.phase not in (AttemptPhase.BOOTING, AttemptPhase.RUNNING):
        return []
    ends: dict[int, datetime] = {}
    if isinstance(view.seen, GangSeen):
        ends = {node.rank: node.ended_at for node in view.seen.nodes if node.ended_at}
        gone = view.seen.state is GangState.ENDED
    else:
        absent = view.seen is GangAbsence.ABSENT and is_surely_absent(view)
        gone = absent and not is_heard_lately(view, now)
    return [
        node.rank
        for node in view.nodes
        if node.claim and node.phase is not NodePhase.EXITED and (gone or node.rank in ends)
        if ends.get(node.rank, now) - (node.heard_at or view.attempt.created_at) >= _SILENCE
    ]
