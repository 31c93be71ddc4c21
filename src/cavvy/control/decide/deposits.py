"""Finds the ranks whose results could be in a bucket."""

from datetime import datetime

from cavvy.control.decide.attempt_snapshot import (
    AttemptSnapshot,
    GangAbsence,
    is_heard_lately,
    is_surely_absent,
    lease_end,
)
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import AttemptPhase, NodePhase


def list_unreported(view: AttemptSnapshot, now: datetime) -> list[int]:
    """Return the ranks that have ended without a report of their exit: the node has ended, or the
    agent was silent for longer than its lease. Before the server counts a rank as lost, it looks
    for the rank's results in the bucket.

    An agent stores results in the bucket if no response of the server reaches it. The server's
    responses can be lost although the agent's requests arrive. Therefore the server looks for
    results even if the agent sent requests until its node ended.
    """
    if view.attempt.phase not in (AttemptPhase.BOOTING, AttemptPhase.RUNNING):
        return []
    ended: set[int] = set()
    if isinstance(view.seen, GangSeen):
        ended = {node.rank for node in view.seen.nodes if node.ended_at}
    gone = is_gone(view, now)
    return [
        node.rank
        for node in view.nodes
        if node.claim and node.phase is not NodePhase.EXITED
        if gone or node.rank in ended or now >= lease_end(view, node)
    ]


def is_gone(view: AttemptSnapshot, now: datetime) -> bool:
    """Return whether all nodes of the gang have ended; if so, waiting for results costs nothing."""
    if isinstance(view.seen, GangSeen):
        return view.seen.state is GangState.ENDED
    absent = view.seen is GangAbsence.ABSENT and is_surely_absent(view)
    return absent and not is_heard_lately(view, now)
