"""Cordons and drains the installation's own hosts for operators, and lists who holds what on them.

The order is stored before it has an effect, and each gang that must leave is marked in its own row,
so that a server that was killed goes on where it stopped. The decisions are in
`scheduler.maintenance`.

Errors, which are subclasses of JobServiceError:

* UnknownNode: no host has this name
* ForeignNode: the node belongs to a cloud or a cluster, which maintains it
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from difflib import get_close_matches

from cavvy.control.clock import ControlClock
from cavvy.control.decide.maintenance import leave_host, make_work, release_host
from cavvy.control.job_service import JobServiceError
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.unit_of_work import make_write
from cavvy.control.worklist import QUEUE
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.maintenance import NodeState
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct, replace
from cavvy.providers.registry import list_known
from cavvy.scheduler.maintenance import DrainStep, decide_drain, find_sick
from cavvy.store.base import RowNotFound, StaleVersion
from cavvy.store.sql import Store

_PREFIX = "node:"
_LOOK_AGAIN = timedelta(seconds=5)  # interval between two checks of a host that is drained
_LOOK_AGAIN_AT_SICK = timedelta(minutes=1)
_NEVER = timedelta(days=3650)
_AT_ONCE = timedelta(0)
_TRIES = 10  # tries of a write that fails because a row was changed meanwhile
_TOLD = 4  # hosts that a message names
# what drains a node of a cluster that has commands of its own
_CLUSTERS = {
    "kubernetes": "drain it there: kubectl drain NODE",
    "slurm": "drain it there: scontrol update NodeName=NODE State=DRAIN Reason=…",
    "pbs": "take it offline there: pbsnodes -o NODE",
    "ray": "remove it from the Ray cluster",
}
_CLOUD = (
    "its nodes end with their jobs; `cavvy nodes drill preempt JOB` moves a job to another node, "
    "and "
    "`cavvy project policy` keeps jobs away from a provider"
)


class UnknownNode(JobServiceError):
    """Raised if no host has the name."""


class ForeignNode(JobServiceError):
    """Raised if the node is no host of the installation."""


class NodeHolder(Struct, frozen=True, kw_only=True):
    """A rank that holds a part of a host."""

    allocation: Allocation
    attempt: Attempt
    job: JobRecord


class HostStatus(Struct, frozen=True, kw_only=True):
    """A host as its provider reports it, what was ordered for it, and who holds its parts."""

    host: Host
    state: NodeState
    holders: Sequence[NodeHolder]

    @property
    def sick(self) -> Mapping[str, str]:
        """The devices on which no work is placed, with the reasons."""
        return find_sick(self.host, self.state)

    @property
    def phase(self) -> str:
        """Return "ready", "cordoned", "draining", "drained" or "unreachable"."""
        if self.state.drain_by is not None:
            return "draining" if self.holders else "drained"
        if self.state.cordoned_at is not None:
            return "cordoned"
        return "ready" if self.host.ready else "unreachable"


def _pick_device(host: Host, number: int) -> str:
    if not 0 <= number < len(host.devices):
        count = format_count(len(host.devices), "GPU")
        raise UnknownNode(f"{host.name} has no GPU {number}", f"it has {count}, counted from 0")
    return host.devices[number]


def node_key(name: str) -> str:
    """Return the worklist's key of a host that is drained."""
    return f"{_PREFIX}{name}"


def is_node_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class MaintenanceService:
    """Handles operators' requests about hosts, and drains hosts. `hint` adds a key to the
    worklist."""

    def __init__(
        self, store: Store, pool: ProviderPool, clock: ControlClock, hint: Callable[[str], None]
    ) -> None:
        self._store, self._pool, self._clock, self._hint = store, pool, clock, hint

    # Reading

    async def list(self) -> Sequence[HostStatus]:
        """Return the status of all hosts, sorted by name."""
        states = await self._store.maintenance.states()
        holders: defaultdict[str, list[NodeHolder]] = defaultdict(list)
        for each in await self._find_holders(await self._store.allocations()):
            holders[each.allocation.host].append(each)
        return [
            HostStatus(
                host=host,
                state=states.get(host.name, NodeState(name=host.name)),
                holders=holders[host.name],
            )
            for host in sorted(await self._pool.reported_hosts(), key=lambda host: host.name)
        ]

    async def get(self, name: str) -> HostStatus:
        """Return the status of one host. Raises UnknownNode, ForeignNode."""
        host = await self.find(name)
        return next(each for each in await self.list() if each.host.name == host.name)

    # Operators' requests

    async def cordon(
        self,
        name: str,
        *,
        user: str = "",
        reason: str = "",
        within: timedelta | None = None,
        gpus: Sequence[int] = (),
    ) -> HostStatus:
        """Place no new work on the host. If `within` is given, also let its work leave within this
        time. If `gpus` are given, close only these GPUs, counted from 0: work that saves
        checkpoints leaves them. Raises UnknownNode, ForeignNode.
        """
        host, now = await self.find(name), self._clock.now()
        if gpus:
            devices = [_pick_device(host, number) for number in gpus]
            why = NodeState(name=name, cordoned_at=now, user=user, reason=reason).describe()
            closed = dict.fromkeys(devices, why)
            await self._change(host.name, lambda old: replace(old, sick={**old.sick, **closed}))
            self._hint(node_key(host.name))
            return await self.get(host.name)
        by = None if within is None else now + within
        fresh = NodeState(name=host.name, cordoned_at=now, user=user, reason=reason, drain_by=by)
        await self._change(host.name, lambda old: replace(fresh, sick=old.sick))
        if by is not None:
            self._hint(node_key(host.name))
        return await self.get(host.name)

    async def uncordon(self, name: str) -> HostStatus:
        """Place work on the host, and on its GPUs that an operator has closed, again. Gangs that
        were told to leave leave. Raises UnknownNode, ForeignNode.
        """
        host = await self.find(name)
        await self._change(host.name, lambda old: NodeState(name=host.name))
        return await self.get(host.name)

    async def _change(self, name: str, change: Callable[[NodeState], NodeState]) -> NodeState:
        for _ in range(_TRIES):
            old = (await self._store.maintenance.states()).get(name, NodeState(name=name))
            with suppress(StaleVersion):
                fresh = replace(change(old), version=old.version)
                stored = await self._store.maintenance.put_state(fresh)
                self._hint(QUEUE)
                return stored
        raise StaleVersion(f"node {name} kept changing during the request; try again")

    async def find(self, name: str) -> Host:
        """Return the host with this name, or with it at the only provider that has it. Raises
        UnknownNode, ForeignNode.
        """
        hosts = await self._pool.reported_hosts()
        found = [host for host in hosts if name in (host.name, host.name.partition("/")[2])]
        found = [host for host in found if host.name == name] or found
        if len(found) == 1:
            return found[0]
        if found:
            names = " and ".join(host.name for host in found)
            raise UnknownNode(f"{name} may be {names}", "name the node as it is listed")
        await self._check_foreign(name)
        known = [host.name for host in hosts]
        spelled = [*known, *(each.partition("/")[2] for each in known)]
        close = get_close_matches(name, spelled, n=1, cutoff=0.5)
        if close:
            raise UnknownNode(f"there is no node {name}", f"did you mean {close[0]}?")
        some = ", ".join(known[:_TOLD]) + (", …" if len(known) > _TOLD else "")
        hint = f"this server's own nodes are {some}" if some else "this server has no own nodes"
        raise UnknownNode(f"there is no node {name}", hint)

    async def _check_foreign(self, name: str) -> None:
        """Raise ForeignNode if the name is that of a gang, or begins with a provider without
        hosts."""
        with suppress(RowNotFound):
            attempt = await self._store.attempt_of_gang(name)
            job = await self._store.job(attempt.job_id)
            raise ForeignNode(
                f"node {name} belongs to job {job.name} only",
                f"`cavvy nodes drill preempt {job.name}` moves the job to another node, and "
                f"`cavvy stop {job.name}` stops it",
            )
        provider = name.partition("/")[0].partition("@")[0]
        known = provider in self._pool.providers or provider in list_known()
        if known and not self._pool.shares_hosts(provider):
            hint = _CLUSTERS.get(provider, _CLOUD)
            raise ForeignNode(f"{provider} maintains its own nodes, not this server", hint)

    async def _find_holders(self, allocations: Sequence[Allocation]) -> Sequence[NodeHolder]:
        """Return the attempts and the jobs that hold the allocations, whose gangs are read once."""
        known: dict[str, tuple[Attempt, JobRecord]] = {}
        for gang in dict.fromkeys(each.gang for each in allocations):
            with suppress(RowNotFound):
                attempt = await self._store.attempt_of_gang(gang)
                known[gang] = attempt, await self._store.job(attempt.job_id)
        return [
            NodeHolder(allocation=each, attempt=known[each.gang][0], job=known[each.gang][1])
            for each in allocations
            if each.gang in known
        ]

    # Draining

    async def list_on(self, hosts: Collection[str]) -> Sequence[NodeHolder]:
        """Return who holds parts of these hosts."""
        allocations = [each for name in hosts for each in await self._store.allocations(name)]
        return await self._find_holders(allocations)

    async def unfinished(self) -> Sequence[str]:
        """Return the keys of the hosts that are drained, or have devices that an operator has
        closed."""
        states = (await self._store.maintenance.states()).values()
        return [node_key(each.name) for each in states if each.drain_by is not None or each.sick]

    async def reconcile(self, key: str) -> timedelta | None:
        """Let the work leave that must leave the host, or its faulty devices, now. Return when to
        look again, or None if nothing is left to do."""
        name = key.removeprefix(_PREFIX)
        state = (await self._store.maintenance.states()).get(name, NodeState(name=name))
        host = next((each for each in await self._pool.reported_hosts() if each.name == name), None)
        sick = {} if host is None else find_sick(host, state)
        if state.drain_by is None and not sick:
            return None
        holders = await self.list_on((name,))
        if not holders:
            return None
        try:
            if state.drain_by is None:
                return await self._heal(name, sick, holders, self._clock.now())
            gangs = {each.attempt.gang: each for each in holders}
            return await self._drain(state, list(gangs.values()), self._clock.now())
        except StaleVersion:
            return _AT_ONCE

    async def _drain(
        self, state: NodeState, holders: Sequence[NodeHolder], now: datetime
    ) -> timedelta:
        assert state.drain_by is not None
        work = [make_work(each.attempt, each.job) for each in holders]
        step = decide_drain(work, state.drain_by, now)
        return await self.leave(step, holders, f"node {state.name} is {state.describe()}", now)

    async def _heal(
        self, name: str, sick: Mapping[str, str], holders: Sequence[NodeHolder], now: datetime
    ) -> timedelta:
        """Let the work leave faulty devices that saves checkpoints. Other work would lose what it
        has done, so it may go on."""
        touching = {
            each.attempt.gang: each
            for each in holders
            if not sick.keys().isdisjoint(each.allocation.devices)
        }
        for each in touching.values():
            device = next(one for one in each.allocation.devices if one in sick)
            step = decide_drain([make_work(each.attempt, each.job)], now + _NEVER, now)
            await self.leave(
                step, [each], f"GPU {device} of {name} takes no work: {sick[device]}", now
            )
        return _LOOK_AGAIN_AT_SICK

    async def leave(
        self, step: DrainStep, holders: Sequence[NodeHolder], why: str, now: datetime
    ) -> timedelta:
        """Carry out a step, and return when to decide again. Raises StaleVersion."""
        for each in holders:
            gang = each.attempt.gang
            if gang in step.leave:
                changes = leave_host(each.attempt, each.job, why, step.leave[gang], now)
            elif gang in step.release:
                changes = release_host(each.attempt, each.job, why, now)
            else:
                continue
            await self._store.commit(make_write(changes))
            self._hint(each.job.id)
        return _LOOK_AGAIN if step.again_at is None else min(_LOOK_AGAIN, step.again_at - now)
