"""Derives the state of gangs from the answers of polled hosts. No I/O."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.values import Struct, replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen
from cavvy.providers.hosts.fleet.launch_ledger import FleetGangEnd, FleetIntent
from cavvy.providers.hosts.records import AgentExit


class RankState(StrEnum):
    RUNS = "runs"
    ENDS = "ends"  # the agent is dead, but processes or reports of the rank remain
    OVER = "over"


class RankSeen(Struct, frozen=True, kw_only=True):
    """One rank, as its supervisor reports it. `at` is in seconds since the epoch, on the host's
    clock.
    """

    rank: int
    state: RankState
    round: int = 0  # the round that replaced a lost rank by this one; 0 if it did not
    pid: int | None = None
    why: str = ""
    at: float = 0
    in_order: bool = False
    exit: AgentExit | None = None
    rebooted: bool = False
    complaint: str = ""


class GangOnHost(Struct, frozen=True, kw_only=True):
    """The part of a gang that is on one host."""

    name: str
    ranks: Sequence[RankSeen]
    intent: FleetIntent | None = None
    removing: bool = False


class HostLook(Struct, frozen=True, kw_only=True):
    """A supervisor's report of all gangs of this installation on its host. `now` is the time on the
    host's clock.
    """

    now: float
    gangs: Sequence[GangOnHost]
    # the names of its named volumes, by project; None if the host could not read them
    volumes: Mapping[str, Sequence[str]] | None = None


class SilentHost(Struct, frozen=True, kw_only=True):
    """A host that did not answer a poll. `dead` is True if Cavvy assumes that the host is dead."""

    problem: str
    dead: bool = False


class RankStatus(Struct, frozen=True, kw_only=True):
    """The status of one rank. If `known` is False, the rank's host did not answer."""

    number: int
    host: str
    address: str
    known: bool = True
    pid: int | None = None
    ended_at: datetime | None = None
    # True: the end was not observed, and `ended_at` is the latest possible time of it
    unseen: bool = False
    waits_for: str = ""
    seen: RankSeen | None = None
    dead_host: bool = False

    @property
    def engine_id(self) -> str:
        return f"{self.host}:{self.pid}" if self.pid is not None else self.host


def view_ranks(
    intent: FleetIntent, looks: Mapping[str, HostLook | SilentHost], now: datetime
) -> Sequence[RankStatus] | None:
    """Return the status of every rank. Return None if a host that answers never received the
    request to launch the gang.
    """
    views = [_view(intent, rank, looks[host], now) for rank, host in enumerate(intent.hosts)]
    return (
        None
        if any(view is None for view in views)
        else [view for view in views if view is not None]
    )


def _view(
    intent: FleetIntent, number: int, look: HostLook | SilentHost, now: datetime
) -> RankStatus | None:
    place = RankStatus(number=number, host=intent.hosts[number], address=intent.addresses[number])
    if isinstance(look, SilentHost):
        if not look.dead:
            return replace(place, known=False, waits_for=look.problem)
        return replace(place, ended_at=now, unseen=True, dead_host=True)
    there = next((gang for gang in look.gangs if gang.name == intent.name), None)
    seen = (
        next((rank for rank in there.ranks if rank.rank == number), None)
        if there is not None
        else None
    )
    wanted = intent.rounds.get(str(number))
    if wanted is not None and (seen is None or seen.round != wanted):
        if intent.removing:
            return replace(place, ended_at=now, unseen=True)
        return replace(place, waits_for=f"the lost rank {number} is being replaced")
    if seen is None:
        if not intent.launched and not intent.removing:
            return None
        if not intent.launched:
            return replace(place, ended_at=intent.launched_at)
        return replace(place, ended_at=now, unseen=True)
    if seen.state is not RankState.OVER:
        return replace(place, pid=seen.pid, waits_for=seen.why, seen=seen)
    at = now - timedelta(seconds=max(0.0, look.now - seen.at))
    return replace(place, pid=seen.pid, ended_at=max(at, intent.start_of(number) or at), seen=seen)


def close_gang(intent: FleetIntent, ranks: Sequence[RankStatus], now: datetime) -> FleetGangEnd:
    """Return the record of a gang whose ranks have all ended."""
    exits = [
        rank.seen.exit for rank in ranks if rank.seen is not None and rank.seen.exit is not None
    ]
    first = next((left for left in exits if left.exit_code), exits[0] if exits else None)
    return FleetGangEnd(
        name=intent.name,
        installation=intent.installation,
        reason="removed" if intent.removing else _say_end(ranks, first),
        exit_code=first.exit_code if first is not None else None,
        ranks=[make_node(intent, rank) for rank in ranks],
        replaced=intent.replaced,
        seen_at=now,
        owing=[rank.host for rank in ranks if rank.dead_host],
    )


def _say_end(ranks: Sequence[RankStatus], first: AgentExit | None) -> str:
    for rank in ranks:
        if rank.dead_host:
            return f"{rank.host} counts as dead: it has been unreachable for too long"
        if rank.seen is None:
            return f"{rank.host} has lost rank {rank.number}: its folder was deleted"
        if rank.seen.rebooted:
            return f"{rank.host} was rebooted"
        if not rank.seen.in_order:
            complaint = f": {rank.seen.complaint}" if rank.seen.complaint else ""
            return f"the agent of rank {rank.number} on {rank.host} was killed or failed{complaint}"
    return first.reason if first is not None and first.reason else "the agents exited"


def see_living(intent: FleetIntent, ranks: Sequence[RankStatus]) -> GangSeen:
    """Describe a gang that has not ended, for the control plane."""
    waits = next(
        (rank.waits_for for rank in ranks if rank.waits_for),
        "being removed" if intent.removing else "",
    )
    lost = [rank for rank in ranks if rank.ended_at is not None]
    reason = waits or (_say_end(lost, None) if lost else "")
    nodes = [make_node(intent, rank) for rank in ranks]
    return GangSeen(
        name=intent.name,
        state=GangState.RUNNING,
        reason=reason,
        nodes=nodes,
        replaced=intent.replaced,
    )


def make_node(intent: FleetIntent, rank: RankStatus) -> NodeSeen:
    return NodeSeen(
        rank=rank.number,
        engine_id=rank.engine_id,
        started_at=intent.start_of(rank.number),
        ended_at=rank.ended_at,
        unseen=rank.unseen,
        address=rank.address,
    )


def see_ended(ended: FleetGangEnd) -> GangSeen:
    seen = GangSeen.make_ended(ended.name, ended.reason, ended.exit_code, ended.ranks)
    return replace(seen, replaced=ended.replaced)
