"""Reports gangs from the cloud's list of machines and the ledger, and deletes machines that belong
to no gang.

If a machine is missing from the list, the machine is queried by its id. The node counts as ended if
three conditions are met: the cloud does not know the id, the machine is older than `list_lag`, and
`ended_listed` has passed since the machine was last seen.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.domain.values import replace
from cavvy.providers.base import (
    GangSeen,
    GangState,
    NodeSeen,
    PartlyUnknown,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.vm.cloud import MachineState
from cavvy.providers.vm.launch import VmLauncher, add_strays, adopt
from cavvy.providers.vm.machines import GangMachines, VmMachines
from cavvy.providers.vm.records import (
    KEPT,
    VmGangRecord,
    VmNode,
    begin,
    end_node,
    is_awaited,
    recall,
    with_nodes,
)

# An incomplete launch is rolled back after this time. Normally the control plane gives up after 10
# minutes and removes the gang itself.
_ABANDONED = timedelta(minutes=20)


class VmStatus:
    """Polls the gangs of one installation."""

    def __init__(
        self,
        machines: VmMachines,
        ledger: LaunchLedger[VmGangRecord],
        launcher: VmLauncher,
        now: Callable[[], datetime],
    ) -> None:
        self._machines, self._ledger, self._launcher, self._now = machines, ledger, launcher, now
        # machine id -> when this process last saw the machine
        self._sighted: dict[str, datetime] = {}
        # the machines that this process has seen while they were young, and when it first did
        self._met: dict[str, datetime] = {}

    async def look(self, name: str | None) -> Sequence[GangSeen]:
        """Return all launched gangs, or only the launched gang `name` if a name is given. Raises
        TryAgain, Refused, or PartlyUnknown if the state of some gangs is unknown.
        """
        shown = await self._list()
        now = self._now()
        # machines that were last seen before this time are dropped
        since = now - self._machines.traits.ended_listed
        self._sighted = {each: at for each, at in self._sighted.items() if at > since}
        self._sighted |= dict.fromkeys(shown.by_id, shown.at)
        self._met = {each: at for each, at in self._met.items() if at > now - self._lag}
        self._met = dict.fromkeys(shown.by_id, shown.at) | self._met
        await self._recall(shown, name)
        errors = await self._update_all(name, shown)
        # an error about another gang must not prevent the report of this gang
        if name is not None and name in errors:
            raise errors[name]
        found = [
            record
            for record in self._ledger.records.values()
            if name in (None, record.name)
            and record.started
            and (record.rolled_back or any(node.id for node in record.nodes))
        ]
        seen = [
            make_seen(record, self._sighted)
            for record in sorted(found, key=lambda each: each.name)
            if record.name not in errors
        ]
        if name is None:
            _check_complete(seen, errors, shown)
        elif not seen:
            known = self._ledger.get(name)
            shown.require(known.region if known is not None else "")
        return seen

    async def _update_all(
        self, name: str | None, shown: GangMachines
    ) -> Mapping[str, ProviderError]:
        """Update the record of the gang, or all records if `name` is None, and the records of
        unfinished launches. Return the errors by gang.
        """
        errors: dict[str, ProviderError] = {}
        for record in list(self._ledger.records.values()):
            unfinished = record.leftovers or (record.given_up_at and not record.ended_at)
            if name in (None, record.name) or unfinished:
                try:
                    await self._update(record.name, shown)
                except ProviderError as error:
                    errors[record.name] = error
        return errors

    async def removal(self, name: str) -> None:
        """Mark a gang as removed and delete its machines. The machines in the record are deleted
        before the cloud's machines are listed, because listing fails if a region does not answer.
        The caller holds the gang's lock. Raises TryAgain, Refused.
        """
        known = self._ledger.get(name)
        if known is not None:
            known = replace(known, removed=True)
            await self._ledger.put(known)
        deleted = _unwanted(known) if known else set()
        failed: ProviderError | None = None
        try:
            await self._machines.delete(deleted)
        except ProviderError as error:
            failed = error
        record = await self._remove_listed(name, known, deleted)
        if failed is not None:
            raise failed
        if record is not None and record.leftovers:
            await self._ledger.put(replace(record, leftovers=()))

    async def _remove_listed(
        self, name: str, known: VmGangRecord | None, deleted: set[str]
    ) -> VmGangRecord | None:
        """Delete the gang's machines that are listed and were not deleted yet; return the updated
        record.
        """
        shown = await self._machines.list()
        record = known or recall(name, shown.begun(name), self._now())
        if record is None:
            shown.require("")
            return None
        seen = replace(record, removed=True)
        if record.given_up_at is None:
            seen = _without_blame(seen, adopt(seen, shown, self._machines))
        alive = {machine.id for _, machine in shown.alive(name)}
        record = add_strays(seen, shown, alive)
        await self._ledger.put(record)
        await self._machines.delete((alive | _unwanted(record)) - deleted)
        shown.require(record.region)  # otherwise, machines that are not recorded may be left
        return record

    async def fail(self, name: str, machine: str, reason: str) -> None:
        """Delete one machine of a gang, because the machine's agent cannot work or has ended.
        `reason` is recorded as the reason why the node ended. Raises TryAgain, Refused.
        """
        async with self._ledger.lock(name):
            record = self._ledger.get(name)
            if record is not None:
                nodes = [each for each in record.nodes if each.id == machine and not each.ended_at]
                failed = [replace(each, reason=reason, failed=True) for each in nodes]
                await self._ledger.put(with_nodes(record, failed))
            await self._machines.delete([machine])

    async def _list(self) -> GangMachines:
        """Return the cloud's list. If listing fails, the machines that are already known to be
        unwanted are deleted before the error is raised. Raises TryAgain, Refused.
        """
        try:
            return await self._machines.list()
        except ProviderError:
            for record in list(self._ledger.records.values()):
                if not self._ledger.lock(record.name).locked():
                    with suppress(ProviderError):
                        await self._machines.delete(_unwanted(record))
            raise

    @property
    def _lag(self) -> timedelta:
        return self._machines.traits.list_lag

    async def _recall(self, shown: GangMachines, name: str | None) -> None:
        """Create records for gangs that the cloud's list contains and the ledger lacks. If a
        machine's name contains only the hash of the gang's name, the record is stored under the
        hash until the control plane requests the gang by name.
        """
        names = shown.unknown(self._ledger.records) if name is None else [name]
        for each in names:
            if self._ledger.get(each) is not None or self._ledger.lock(each).locked():
                continue
            record = recall(each, shown.begun(each), self._now())
            if record is not None:
                await self._ledger.put(record)
                hashed = {part.gang for part, _ in shown.of(each)} - {each}
                for other in hashed & self._ledger.records.keys():
                    await self._ledger.drop(other)

    async def _update(self, name: str, shown: GangMachines) -> None:
        """Bring a record up to date, unless a launch or a removal in this process is changing the
        record.
        """
        if not self._ledger.lock(name).locked():
            async with self._ledger.lock(name):
                # read the record again, because it may have changed before the lock was acquired
                record = self._ledger.get(name)
                if record is not None:
                    await self._update_locked(record, shown)

    async def _update_locked(self, record: VmGangRecord, shown: GangMachines) -> None:
        """Bring a record up to date, and delete the gang's unwanted machines."""
        now = self._now()
        if record.ended_at is not None and now - record.ended_at >= KEPT:
            return await self._ledger.drop(record.name)
        try:
            shown.require(record.region)
        except ProviderError:  # the missing machines may still exist
            with suppress(ProviderError):
                await self._machines.delete(_unwanted(record))
            if record.ended_at is None or not record.cleared:
                raise
            return None
        partial = not record.started and record.given_up_at is None
        if partial and now - _asked_at(record) >= _ABANDONED:
            await self._launcher.give_up(adopt(record, shown, self._machines))
            record = self._ledger.get(record.name) or record
        if record.given_up_at is None:
            seen = await self._see(adopt(record, shown, self._machines), shown)
            record = _without_blame(record, seen)
            await self._ledger.put(record)
        if not record.cleared:
            rolled_back = await self._see_nodes(record.rolled_back, shown)
            replaced = await self._see_nodes(record.replaced, shown)
            record = replace(record, rolled_back=rolled_back, replaced=replaced)
            await self._ledger.put(record)
        await self._sweep(record, shown)

    async def _see(self, record: VmGangRecord, shown: GangMachines) -> VmGangRecord:
        """Update the record; machines that are missing from the list are queried by id."""
        nodes = await self._see_missing(record.nodes, shown)
        made = [node for node in nodes if node.id]
        complete = record.launched or len(made) == len(nodes)
        if made and (complete or record.removed):
            ended = all(node.ended_at is not None for node in made)
        else:
            ended = not made and record.removed and shown.at - _asked_at(record) >= self._lag
        over = (record.ended_at or self._now()) if ended else None
        return replace(record, nodes=tuple(nodes), launched=complete, ended_at=over)

    async def _see_nodes(self, nodes: Sequence[VmNode], shown: GangMachines) -> tuple[VmNode, ...]:
        """Return the nodes, updated with the nodes' current states. The state of a listed machine
        is read from the list; the state of any other machine is requested separately.
        """
        seen = [
            self._machines.sight(node, shown.by_id[node.id], shown.at)
            if node.id in shown.by_id
            else node
            for node in nodes
        ]
        return await self._see_missing(seen, shown)

    async def _see_missing(
        self, nodes: Sequence[VmNode], shown: GangMachines
    ) -> tuple[VmNode, ...]:
        """Update the nodes whose machines are missing from the list."""
        return tuple(
            [
                await self._look_again(node)
                if node.id and node.ended_at is None and node.id not in shown.by_id
                else node
                for node in nodes
            ]
        )

    async def _look_again(self, node: VmNode) -> VmNode:
        now = self._now()
        machine = await self._machines.get(node.id)
        known = [at for at in (node.asked_at or node.started_at, node.booting_at) if at]
        young = bool(known) and now - max(known) < self._lag
        if machine is not None:
            # a cloud may infer the end from a missing entry, which a young machine does not have
            if young and machine.preempted_or_deleted and machine.created_at is None:
                return node
            self._sighted[node.id] = now
            self._met.setdefault(node.id, now)
            return self._machines.sight(node, machine, now)
        deleted = self._machines.deleted_at(node.id)
        seen_at = self._sighted.get(node.id, datetime.min.replace(tzinfo=now.tzinfo))
        # one that was listed, and is missing after its deletion, is not missing because it is young
        if self._machines.is_deleted(node.id) and node.id in self._met:
            young = False
        if young or now - seen_at < self._machines.traits.ended_listed:
            return node
        self._sighted.pop(node.id, None)
        reason = node.reason or _add("the cloud no longer lists the machine", node.waits)
        free = self._machines.boots_free
        begun = begin(node, None, deleted or now, boots_free=free, over=True)
        return end_node(replace(begun, reason=reason), deleted, now)

    async def _note_deletion(
        self, record: VmGangRecord, shown: GangMachines, machines: set[str]
    ) -> VmGangRecord:
        """Before requesting the deletion, record the nodes that the deletion will end, and the
        additional machines that must be billed.
        """
        nodes = [each for each in record.nodes if each.id in machines and not each.ended_at]
        asked = [replace(each, deleted=True) for each in nodes]
        noted = add_strays(with_nodes(record, asked), shown, machines)
        if noted != record:
            await self._ledger.put(noted)
        return noted

    async def _sweep(self, record: VmGangRecord, shown: GangMachines) -> None:
        """Delete leftovers, duplicates, and machines that are off or belong to a removed gang.
        Machines that cannot be deleted now are deleted by the next poll.
        """
        alive = shown.alive(record.name)
        mine = record.ids if not record.removed else frozenset()
        if record.started or record.given_up_at is not None:
            late = {
                machine.id
                for part, machine in alive
                if machine.id not in mine and not is_awaited(record, part, machine.id)
            }
        else:  # the launch is in progress, so unknown machines may belong to its nodes
            late = {machine.id for part, machine in alive if part.launch != record.launch}
        late |= {machine.id for _, machine in alive if machine.state is MachineState.STOPPED}
        late |= record.ids if record.removed else set()
        record = await self._note_deletion(record, shown, late)
        try:
            await self._machines.delete(late | set(record.leftovers))
        except (TryAgain, Refused):
            return
        if record.leftovers:
            record = replace(record, leftovers=())
            await self._ledger.put(record)
        given_up = record.given_up_at
        if alive or given_up is None or shown.at - given_up < self._lag:
            return
        with suppress(ProviderError):
            await self._close(record, shown.at - given_up)

    async def _close(self, record: VmGangRecord, age: timedelta) -> None:
        """End the record of an abandoned launch, or delete a record that is no longer needed for
        billing.
        """
        if record.removed:
            if record.ended_at is None:  # prevents another launch from starting the gang
                await self._ledger.put(replace(record, ended_at=self._now()))
        elif not record.rolled_back or age >= KEPT:
            await self._ledger.drop(record.name)


def _check_complete(
    seen: Sequence[GangSeen], errors: Mapping[str, ProviderError], shown: GangMachines
) -> None:
    """Raise PartlyUnknown if the state of some gangs is unknown, or if a region did not answer,
    because gangs of this region could be missing.
    """
    problems = [*errors.values(), *shown.silent.values()]
    if problems:
        raise PartlyUnknown("; ".join(dict.fromkeys(map(str, problems))), seen) from problems[0]


def _unwanted(record: VmGangRecord) -> set[str]:
    """Return the ids of the recorded machines that must be deleted."""
    return set(record.leftovers) | (record.ids if record.removed else frozenset())


def _without_blame(before: VmGangRecord, after: VmGangRecord) -> VmGangRecord:
    """Mark nodes that ended after their gang was removed as not preempted, because Cavvy itself
    deleted these nodes.
    """
    if not before.removed:
        return after
    ended = {node.rank for node in before.nodes if node.ended_at is not None}
    nodes = [
        node if node.rank in ended else replace(node, preempted=False, no_capacity=False)
        for node in after.nodes
    ]
    return replace(after, nodes=tuple(nodes))


def _asked_at(record: VmGangRecord) -> datetime:
    """Return the time when a machine of the gang was last requested."""
    asked = [node.asked_at for node in record.nodes if node.asked_at is not None]
    return max([record.intended_at, *asked])


def make_seen(record: VmGangRecord, sighted: Mapping[str, datetime]) -> GangSeen:
    """Return the gang's state for the control plane, derived from the gang's record. `sighted` maps
    each machine's id to the time when the machine was last seen. A time in `sighted` can be earlier
    than the poll, because several polls share one list of machines.
    """
    nodes = [node for node in record.nodes if node.id]
    up = all(node.up or node.ended_at is not None for node in nodes)
    state = GangState.RUNNING if up else GangState.STARTING
    over = record.ended_at is not None and record.cleared
    return GangSeen(
        name=record.name,
        state=GangState.ENDED if over else state,
        engine_id=min((node.id for node in nodes), default=""),
        reason=_find_reason(nodes),
        preempted=any(node.preempted and node.ended_at is not None for node in nodes),
        no_capacity=any(node.no_capacity for node in nodes),
        nodes=tuple(_make_node(record, node, sighted) for node in nodes),
        rolled_back=tuple(_make_node(record, node, sighted) for node in record.rolled_back),
        replaced=tuple(_make_node(record, node, sighted) for node in record.replaced),
    )


def _add(text: str, waits: str) -> str:
    return f"{text}; its last state: {waits}" if waits else text


def _find_reason(nodes: Sequence[VmNode]) -> str:
    """Return why nodes stopped or ended or, if no node did, what the nodes that start wait for."""
    words = [node.reason for node in nodes]
    if not any(words) and all(node.ended_at is None for node in nodes):
        words = [node.waits for node in nodes]
    return "; ".join(dict.fromkeys(each for each in words if each))


def _make_node(record: VmGangRecord, node: VmNode, sighted: Mapping[str, datetime]) -> NodeSeen:
    return NodeSeen(
        rank=node.rank,
        engine_id=node.id,
        started_at=node.started_at,
        started_by=node.started_by,
        ended_at=node.ended_at,
        unseen=node.unseen,
        seen_at=sighted.get(node.id, node.started_by or node.started_at),
        address=node.address,
        extras=record.extras,
    )
