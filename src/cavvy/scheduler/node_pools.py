"""Decides how many nodes an elastic pool has: when a waiting job gets new nodes, from which market,
and when idle nodes are removed. No I/O.

The rules are those of node groups in the cluster autoscaler of Kubernetes: a group grows by the
nodes of the pods that fit nowhere, up to its maximum, and shrinks to its minimum by nodes that have
been unneeded for a while. As in Karpenter, reserved nodes come before spot nodes, and spot nodes
before on-demand nodes. The share of spot nodes is rounded as in Auto Scaling groups of AWS: the
part that is not spot is rounded up.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.node_pools import NodePool
from cavvy.domain.offers import Purchase
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct

# For how long at a time the nodes of a pool's minimum are kept.
HELD = timedelta(minutes=30)
# The markets in the order in which a pool uses them.
MARKETS = (Purchase.RESERVED, Purchase.SPOT, Purchase.ON_DEMAND)


class PoolGang(Struct, frozen=True, kw_only=True):
    """A gang of a pool. `idle_since` is None while the gang starts or works. The nodes of a leaving
    gang still exist and may cost money, but get no more work."""

    id: str
    nodes: int
    purchase: Purchase
    idle_since: datetime | None = None
    leaving: bool = False


class GrowPool(Struct, frozen=True, kw_only=True):
    """The job gets new nodes from the first of these markets that has some."""

    markets: tuple[Purchase, ...]


class WaitForPool(Struct, frozen=True, kw_only=True):
    """The job waits. `release` are idle gangs that are removed to make room for the job."""

    reason: str
    release: tuple[str, ...] = ()
    again_at: datetime | None = None


class KeepIdle(Struct, frozen=True, kw_only=True):
    """How long an idle gang is kept, and why not longer. `until` in the past removes the gang."""

    until: datetime
    reason: str


def decide_growth(
    pool: NodePool, gangs: Sequence[PoolGang], nodes: int, opens_at: datetime | None
) -> GrowPool | WaitForPool:
    """Decide about a waiting job that fits on no idle gang of the pool. The job needs `nodes`
    nodes. `opens_at` is None while the pool is open.
    """
    if closed := explain_closed(pool, opens_at):
        return WaitForPool(reason=closed, again_at=opens_at)
    if nodes > pool.max_nodes:
        most = format_count(pool.max_nodes, "node")
        return WaitForPool(reason=f"pool {pool.name} has at most {most}; the job needs {nodes}")
    if count_nodes(gangs) + nodes <= pool.max_nodes:
        return GrowPool(markets=_list_markets(pool, gangs, nodes))
    release, room = [], pool.max_nodes - count_nodes(_list_staying(gangs))
    for gang in _list_idle(gangs):
        if room >= nodes:
            break
        release.append(gang.id)
        room += gang.nodes
    if room >= nodes:
        reason = f"waits until idle nodes of pool {pool.name} that do not fit are removed"
        return WaitForPool(reason=reason, release=tuple(release))
    return WaitForPool(reason=f"pool {pool.name} uses {_say_used(pool, gangs)}")


def decide_idle(
    pool: NodePool | None,
    gangs: Sequence[PoolGang],
    mine: PoolGang,
    opens_at: datetime | None,
    now: datetime,
) -> KeepIdle:
    """Decide how long the idle gang `mine` of the pool is kept. `pool` is None if it was removed.

    All jobs of the pool that run would run without an idle gang, and a job that waits takes one
    over at once. So an idle gang is only kept for the next job, or for the pool's minimum.
    """
    assert mine.idle_since is not None
    if pool is None:
        return KeepIdle(until=now, reason="its pool was removed")
    if closed := explain_closed(pool, opens_at):
        return KeepIdle(until=now, reason=closed)
    staying = _list_staying(gangs)
    spare, above = (count_nodes(staying) - most for most in (pool.min_nodes, pool.max_nodes))
    for gang in _list_idle(staying):
        if gang.nodes > spare:
            continue
        if gang.id == mine.id:
            idle = timedelta(0) if above > 0 else pool.idle
            reason = f"pool {pool.name} has more than {format_count(pool.max_nodes, 'node')}"
            if above <= 0:
                reason = "no job used the gang in time"
            return KeepIdle(until=mine.idle_since + idle, reason=reason)
        spare, above = spare - gang.nodes, above - gang.nodes
    return KeepIdle(until=now + HELD, reason=f"kept for the minimum of pool {pool.name}")


def count_missing(
    pool: NodePool, gangs: Sequence[PoolGang], starting: int, opens_at: datetime | None
) -> int:
    """Return how many nodes the pool lacks until its minimum. `starting` is the number of nodes
    that have been ordered for the minimum and do not exist yet. A negative number means that some
    of these are no longer needed.
    """
    if explain_closed(pool, opens_at):
        return -starting
    return pool.min_nodes - count_nodes(_list_staying(gangs)) - starting


def explain_closed(pool: NodePool, opens_at: datetime | None) -> str:
    """Return why the pool starts nothing now, or ""."""
    if pool.stopped:
        return f"pool {pool.name} is stopped; `cavvy pool apply` starts it again"
    if opens_at is not None and pool.hours is not None:
        opens = f"{opens_at:%Y-%m-%d %H:%M} UTC"
        return f"pool {pool.name} is closed until {opens} (hours: {pool.hours.text})"
    return ""


def count_nodes(gangs: Sequence[PoolGang]) -> int:
    return sum(gang.nodes for gang in gangs)


def _list_markets(pool: NodePool, gangs: Sequence[PoolGang], nodes: int) -> tuple[Purchase, ...]:
    """Return the markets that may be used now. Spot is left out if it would exceed its share."""
    rented = [gang for gang in gangs if gang.purchase is not Purchase.RESERVED]
    spot = count_nodes([gang for gang in rented if gang.purchase is Purchase.SPOT])
    most = pool.spot_share * (count_nodes(rented) + nodes)
    fits = spot + nodes <= most + 1e-9  # 0.1 * 30 is slightly less than 3 in floating point
    return tuple(each for each in MARKETS if each is not Purchase.SPOT or fits)


def _list_staying(gangs: Sequence[PoolGang]) -> Sequence[PoolGang]:
    return [gang for gang in gangs if not gang.leaving]


def _list_idle(gangs: Sequence[PoolGang]) -> Sequence[PoolGang]:
    """Return the idle gangs in the order in which they are removed: those of the dearest market
    first, of these the one that has been idle longest."""
    idle = [(gang.idle_since, gang) for gang in gangs if gang.idle_since and not gang.leaving]
    found = sorted(idle, key=lambda each: (-MARKETS.index(each[1].purchase), each[0], each[1].id))
    return [gang for _, gang in found]


def _say_used(pool: NodePool, gangs: Sequence[PoolGang]) -> str:
    """Say how many of the pool's nodes are in use, such as `all of its 4 nodes`."""
    used = count_nodes(gangs)
    if used >= pool.max_nodes:
        return f"all of its {format_count(pool.max_nodes, 'node')}"
    return f"{used} of its {format_count(pool.max_nodes, 'node')}"
