"""Checks whether an agent still holds its rank's claim."""

from cavvy.domain.jobs import Attempt, AttemptPhase, Node
from cavvy.domain.messages import ClaimLost


def find_objection(attempt: Attempt, node: Node, nonce: str) -> ClaimLost | None:
    """Return the reason why the agent with this nonce does not hold the claim, or None if the agent
    holds it."""
    if node.claim != nonce:
        return ClaimLost(reason=f"rank {node.rank} is claimed by another agent")
    if attempt.phase is AttemptPhase.ENDED:
        return ClaimLost(reason=f"attempt {attempt.number} is over: {attempt.reason}")
    return None
