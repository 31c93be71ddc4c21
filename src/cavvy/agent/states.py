"""The states of the agent of one rank, and every legal move between two of them with its reason."""

from __future__ import annotations

from enum import Enum


class RankState(Enum):
    """Exactly one holds at any time; `RankRunner` moves along MOVES and ignores other moves."""

    WAITING = "waiting"  # for its claim
    WORKING = "working"
    ENDING = "ending"  # the work was asked to end; a signal of ours may have reached it
    RECLAIMED = "reclaimed"  # ... and the provider may have signalled the work itself
    OVER = "over"  # the outcome is known; what is left is to deliver
    EXITED = "exited"  # ... and the exit itself is in the outbox
    DISMISSED = "dismissed"  # the claim is another agent's: nothing is left to report


_GOING = (RankState.WORKING, RankState.ENDING, RankState.RECLAIMED)
DONE = (RankState.OVER, RankState.EXITED, RankState.DISMISSED)
REPORTED = (RankState.EXITED, RankState.DISMISSED)

MOVES: dict[tuple[RankState, RankState], str] = {
    (RankState.WAITING, RankState.WORKING): "the claim was granted",
    (
        RankState.WAITING,
        RankState.OVER,
    ): "an earlier agent began the work, or this one cannot",
    (RankState.WAITING, RankState.EXITED): "an agent before this one put the exit in the outbox",
    (RankState.WORKING, RankState.ENDING): "a stop, a notice, a limit or the end of the lease",
    (RankState.WORKING, RankState.RECLAIMED): "the provider signalled the node",
    (RankState.ENDING, RankState.RECLAIMED): "the provider signalled the node as well",
    **{(state, RankState.OVER): "the work and its processes have ended" for state in _GOING},
    (RankState.OVER, RankState.EXITED): "the whole log was delivered",
    **{
        (state, RankState.DISMISSED): "the control plane gave the rank to another agent"
        for state in RankState
        if state is not RankState.DISMISSED
    },
}
