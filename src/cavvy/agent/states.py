"""The states of the agent of one rank, and every legal move between two of them with its reason."""

from __future__ import annotations

from enum import Enum


class AgentState(Enum):
    """Exactly one holds at any time; `RankRunner` moves along MOVES and ignores other moves."""

    WAITING = "waiting"  # for its claim
    WORKING = "working"
    ENDING = "ending"  # the work was asked to end; a signal of ours may have reached it
    RECLAIMED = "reclaimed"  # ... and the provider may have signalled the work itself
    OVER = "over"  # the outcome is known; what is left is to deliver
    EXITED = "exited"  # ... and the exit itself is in the outbox
    DISMISSED = "dismissed"  # the claim is another agent's: nothing is left to report


_GOING = (AgentState.WORKING, AgentState.ENDING, AgentState.RECLAIMED)
DONE = (AgentState.OVER, AgentState.EXITED, AgentState.DISMISSED)
REPORTED = (AgentState.EXITED, AgentState.DISMISSED)

MOVES: dict[tuple[AgentState, AgentState], str] = {
    (AgentState.WAITING, AgentState.WORKING): "the claim was granted",
    (
        AgentState.WAITING,
        AgentState.OVER,
    ): "an earlier agent began the work, or this one cannot",
    (AgentState.WAITING, AgentState.EXITED): "an agent before this one put the exit in the outbox",
    (AgentState.WORKING, AgentState.ENDING): "a stop, a notice, a limit or the end of the lease",
    (AgentState.WORKING, AgentState.RECLAIMED): "the provider signalled the node",
    (AgentState.ENDING, AgentState.RECLAIMED): "the provider signalled the node as well",
    **{(state, AgentState.OVER): "the work and its processes have ended" for state in _GOING},
    (AgentState.OVER, AgentState.EXITED): "the whole log was delivered",
    **{
        (state, AgentState.DISMISSED): "the control plane gave the rank to another agent"
        for state in AgentState
        if state is not AgentState.DISMISSED
    },
}
