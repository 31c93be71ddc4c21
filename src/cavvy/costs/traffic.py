"""Computes the cost of checkpoints that nodes send out of their clouds.

The agent reports the bytes of each upload when it is complete. The bytes of an upload that the loss
of the node cut off are unknown, so their cost is known only as a range.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, Node, NodePhase
from cavvy.domain.units import HourlyRate, Money

_GB = 10**9  # bytes; clouds publish prices of egress per GB
# The most that a machine is assumed to send, 100 Gbit/s: the agent's uploads are far slower.
_BYTES_PER_S = 12_500_000_000


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


def bound_upload(length: timedelta) -> int:
    """The bytes that a node can have uploaded in this time. Nodes are not trusted, and what they
    report must not use up a budget that their network could not use up.
    """
    return max(0, length // timedelta(microseconds=1) * _BYTES_PER_S // 1_000_000)


def bound_lost_traffic(attempt: Attempt, nodes: Iterable[Node], now: datetime) -> Money:
    """What uploads that were cut off when nodes were lost may have cost: for each such node, at
    most a checkpoint of the size of the newest complete one, or what it can have sent since its
    last message.
    """
    lost = [node for node in nodes if node.phase is not NodePhase.EXITED and node.sent_bytes]
    silent = [now - (node.heard_at or attempt.created_at) for node in lost]
    sizes = [min(attempt.checkpoint_bytes, bound_upload(length)) for length in silent]
    prices = [_price(each.egress, size) for each, size in zip(lost, sizes, strict=True)]
    return Money(sum(price.micros for price in prices))


def _price(per_gb: Money | None, size: int) -> Money:
    return Money((2 * per_gb.micros * size + _GB) // (2 * _GB)) if per_gb else Money(0)
