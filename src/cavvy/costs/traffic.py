"""Computes the cost of checkpoints that nodes send out of their clouds.

The agent reports the bytes of each upload when it is complete. The bytes of an upload that the loss
of the node cut off are unknown, so their cost is known only as a range.
"""

from collections.abc import Iterable

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, Node, NodePhase
from cavvy.domain.units import HourlyRate, Money

_GB = 10**9  # bytes; clouds publish prices of egress per GB


def bill_traffic(attempt: Attempt, nodes: Iterable[Node]) -> list[Charge]:
    """A charge for each node that has uploaded checkpoints, from the start of its work until its
    last message. The price is that of the first upload. An upload without a known price is not
    charged.
    """
    charges = []
    for node in nodes:
        amount = _price(node.egress, node.sent_bytes)
        if node.attempt_id != attempt.id or not amount.micros:
            continue
        since = node.claimed_at or attempt.created_at
        charge = Charge(
            project=attempt.project,
            job_id=attempt.job_id,
            attempt_id=attempt.id,
            rank=node.rank,
            kind=ChargeKind.TRAFFIC,
            since=since,
            until=max(since, node.heard_at or since),
            rate=HourlyRate(),
            amount=amount,
        )
        charges.append(charge)
    return charges


def bound_lost_traffic(attempt: Attempt, nodes: Iterable[Node]) -> Money:
    """What uploads that were cut off when nodes were lost may have cost: for each such node, at
    most a checkpoint of the size of the newest complete one.
    """
    lost = [node for node in nodes if node.phase is not NodePhase.EXITED and node.sent_bytes]
    return Money(sum(_price(node.egress, attempt.checkpoint_bytes).micros for node in lost))


def _price(per_gb: Money | None, size: int) -> Money:
    return Money((2 * per_gb.micros * size + _GB) // (2 * _GB)) if per_gb else Money(0)
