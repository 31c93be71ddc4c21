"""Rejects offers of machines with several hosts if the task's nodes do not fill whole machines."""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec


def explain_slice(task: TaskSpec, offer: Offer) -> Objection | None:
    """Why the task's nodes cannot be the hosts of whole machines of this offer, such as slices of
    TPUs; None if they can.
    """
    if task.nodes % offer.hosts == 0:
        return None
    return Objection(
        "nodes",
        f"{offer.instance_type} has {offer.hosts} hosts, which are rented together; set `nodes` to "
        f"{offer.hosts}, or to a multiple of it",
    )
