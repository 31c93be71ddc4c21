"""Rejects offers if the account's quotas are too small for the task's nodes, even if no other nodes
use the quotas.
"""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec


def explain_quota(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return why the quotas are too small for the task's nodes on this offer even if nothing else
    runs, or None if the quotas are large enough. An offer whose quota is too small only because of
    current use is not rejected.
    """
    if offer.quota_nodes is None or task.nodes <= offer.quota_nodes:
        return None
    nodes = "a node needs" if task.nodes == 1 else f"{task.nodes} nodes need"
    return Objection(
        "nodes" if offer.quota_nodes else "resources",
        f"{nodes} more {offer.instance_type} than {offer.quota_text or 'the quota'} allows; "
        f"`cavvy quota {offer.provider} --request` prints the command that requests more",
    )
