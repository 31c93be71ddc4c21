"""The states of one rank's agent, and every allowed change of state with its reason."""

from __future__ import annotations

from enum import Enum


class AgentState(Enum):
    """The state of one rank's agent. `RankRunner` performs only the state changes in MOVES, and
    ignores requests for any other state change.
    """

    WAITING = "waiting"  # waiting for its claim to be granted
    WORKING = "working"
    ENDING = "ending"  # something asked the work to end; the agent may have sent it a signal
    RECLAIMED = "reclaimed"  # like ENDING, but the provider may have sent the signal
    OVER = "over"  # the outcome is known; the log is being delivered
    EXITED = "exited"  # the log is delivered, and the exit is in the outbox
    DISMISSED = "dismissed"  # another agent has the claim: nothing is left to report


_GOING = (AgentState.WORKING, AgentState.ENDING, AgentState.RECLAIMED)
DONE = (AgentState.OVER, AgentState.EXITED, AgentState.DISMISSED)
REPORTED = (AgentState.EXITED, AgentState.DISMISSED)

MOVES: dict[tuple[AgentState, AgentState], str] = {
    (AgentState.WAITING, AgentState.WORKING): "the claim was granted",
    (
        AgentState.WAITING,
        AgentState.OVER,
    ): "an earlier agent began the work, or this agent cannot start it",
    (AgentState.WAITING, AgentState.EXITED): "an earlier agent queued the report of the exit",
    (
        AgentState.WORKING,
        AgentState.ENDING,
    ): "a stop or notice arrived, a limit was reached, or the lease expired",
    (AgentState.WORKING, AgentState.RECLAIMED): "the provider signalled the node",
    (AgentState.ENDING, AgentState.RECLAIMED): "the provider has also signalled the node",
    **{(state, AgentState.OVER): "the work and its processes have ended" for state in _GOING},
    (AgentState.OVER, AgentState.EXITED): "the whole log was delivered",
    **{
        (state, AgentState.DISMISSED): "the control plane assigned the rank to another agent"
        for state in AgentState
        if state is not AgentState.DISMISSED
    },
}
