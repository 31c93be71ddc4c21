"""Whether an agent may still speak for the rank that it says it is."""

from cavvy.domain.jobs import Attempt, AttemptPhase, Node
from cavvy.domain.messages import ClaimLost


def find_objection(attempt: Attempt, node: Node, nonce: str) -> ClaimLost | None:
    """Why the agent that claimed with this nonce is not heard any more; None: it is."""
    if node.claim != nonce:
        return ClaimLost(reason=f"rank {node.rank} is claimed by another agent")
    if attempt.phase is AttemptPhase.ENDED:
        return ClaimLost(reason=f"attempt {attempt.number} is over: {attempt.reason}")
    return None
