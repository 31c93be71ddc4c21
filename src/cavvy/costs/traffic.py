"""Computes the cost of the data that nodes send out of their clouds: checkpoints, outputs and logs.

The agent reports the number of bytes when the bytes are sent. If a node is lost while it uploads a
checkpoint, the number of sent bytes is unknown, and only a lower and an upper limit of the upload's
cost can be computed.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, Node, NodePhase, SentKind
from cavvy.domain.units import HourlyRate, Money

_GB = 10**9  # bytes; clouds publish prices of egress per GB
# The most that a machine is assumed to send, 100 Gbit/s: the agent's uploads are far slower.
_BYTES_PER_S = 12_500_000_000


def bill_traffic(attempt: Attempt, nodes: Iterable[Node]) -> list[Charge]:
    """Return a charge for each node that has sent data. The charge covers the time from the start
    of the node's work until the node's last message. Each kind of data has the price that applied
    when the first bytes of this kind were sent. Data without a known price is not charged.
    """
    charges = []
    for node in nodes:
        amount = Money(sum(price_sent(each.egress, each.bytes).micros for each in node.sent))
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
            bytes=sum(each.bytes for each in node.sent if each.egress),
        )
        charges.append(charge)
    return charges


def bound_upload(length: timedelta) -> int:
    """Return the maximum number of bytes that a node can have sent in the time `length`. Nodes are
    not trusted, so no budget is charged for more bytes than a node's network can have sent.
    """
    return max(0, length // timedelta(microseconds=1) * _BYTES_PER_S // 1_000_000)


def bound_lost_traffic(attempt: Attempt, nodes: Iterable[Node], now: datetime) -> Money:
    """Return the maximum cost of checkpoint uploads that were interrupted when nodes were lost. For
    each lost node, the maximum is the smaller of two amounts: the size of the newest complete
    checkpoint, and the most that the node can have sent since the node's last message.
    """
    most = Money()
    for node in nodes:
        silent = now - (node.heard_at or attempt.created_at)
        size = min(attempt.checkpoint_bytes, bound_upload(silent))
        for each in node.sent if node.phase is not NodePhase.EXITED else ():
            if each.kind is SentKind.CHECKPOINTS:
                most += price_sent(each.egress, size)
    return most


def price_sent(per_gb: Money | None, size: int) -> Money:
    """Return the cost of `size` bytes at a price per GB, or 0 if the price is unknown."""
    return Money((2 * per_gb.micros * size + _GB) // (2 * _GB)) if per_gb else Money(0)
