"""Reject offers of which the account's quotas can never hold enough nodes for the task."""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, Task


def explain_quota(task: Task, offer: Offer) -> Objection | None:
    """The reason why the quotas do not allow the task's nodes on this offer, even if nothing else
    runs; None if they allow them. An offer whose quota is in use may fit later.
    """
    if offer.quota_nodes is None or task.nodes <= offer.quota_nodes:
        return None
    nodes = "a node needs" if task.nodes == 1 else f"{task.nodes} nodes need"
    return Objection(
        "nodes" if offer.quota_nodes else "resources",
        f"{nodes} more {offer.instance_type} than {offer.quota_text or 'the quota'} allows; "
        f"`cavvy quota {offer.provider} --request` prints the command that requests more",
    )
