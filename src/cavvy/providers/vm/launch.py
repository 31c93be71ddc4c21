"""Launches all nodes of a gang or none, although in most clouds each request starts only one
machine.

If a launch cannot be completed now, `launch` raises TryAgain. The control plane repeats the call of
`launch` within 15 seconds, and the repeated call continues the launch. If a launch cannot succeed,
the machines that the launch has started are deleted.

Some clouds create a machine in several calls (`finish_or_delete`), or need several requests to
start a gang's machines although they have the trait `atomic_count` (`start_together`).
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.domain.gangs import list_extras
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.vm import records
from cavvy.providers.vm.cloud import (
    UNREADABLE,
    CloudFault,
    MachineRequest,
    MachineState,
    read_fault,
)
from cavvy.providers.vm.machines import GangMachines, VmMachines

# The control plane repeats a launch every 15 seconds for at most 10 minutes. The calls of one
# launch take about 3 seconds, so a node is requested every 18 seconds.
_REPEATED = timedelta(seconds=18)
_LONGEST = timedelta(minutes=9)
# a launch counts as ended if the control plane has not repeated it for this long
_LATELY = timedelta(seconds=45)

# A launch repeats its request for a machine in one of these states, until the state changes or the
# cloud refuses the machine.
_NOT_YET_OR_ENDED = (MachineState.REQUESTED, MachineState.ENDED)

MakeUserData = Callable[[GangSpec, int], Awaitable[str]]

Step = Callable[[], Awaitable[object]]


class VmLauncher:
    """Launches gangs of one installation. The caller holds the gang's lock in the ledger."""

    def __init__(
        self,
        machines: VmMachines,
        ledger: LaunchLedger[records.VmGangRecord],
        make_user_data: MakeUserData,
        now: Callable[[], datetime],
    ) -> None:
        self._machines, self._ledger, self._now = machines, ledger, now
        self._traits = machines.traits
        self._make_user_data = make_user_data
        self.public_key = ""  # see `MachineRequest.public_key`
        self._next: datetime | None = None  # the earliest time of the next request for a machine
        self._called: dict[str, datetime] = {}  # gang -> when its launch was last called

    @property
    def most_nodes(self) -> int | None:
        """The maximum number of nodes that can be started before the control plane's call times
        out, or None if there is no limit.
        """
        if self._traits.atomic_count or not self._traits.launch_every:
            return None
        return int(_LONGEST / max(self._traits.launch_every, _REPEATED))

    async def launch(self, gang: GangSpec) -> None:
        """See `Provider.launch`."""
        if self.most_nodes is not None and gang.nodes > self.most_nodes:
            raise Refused(f"this cloud starts at most {self.most_nodes} nodes for one gang")
        self._called[gang.name] = self._now()
        record, shown = self._ledger.get(gang.name), await self._machines.list()
        if record is None:
            record = records.recall(gang.name, shown.begun(gang.name), self._now())
        if record is not None and record.started:
            return await self._ledger.put(record)
        # without the region's machines, an existing node could look missing
        shown.require(gang.offer.region)
        if record is None or record.given_up_at is not None:
            record = self._begin(gang, record)
        record = replace(record, region=gang.offer.region)
        record = adopt(record, shown, self._machines)
        await self._ledger.put(record)  # the record must be stored before the first purchase
        try:
            await self._start_missing(gang, record, shown.at)
        except (NoCapacity, Refused):
            await self.give_up(self._ledger.get(gang.name) or record)
            raise

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        """See `ReplacesNodes.replace`. A node that gets no machine now stays without one until the
        call is repeated.
        """
        record, shown = self._ledger.get(gang.name), await self._machines.list()
        if record is None:
            record = records.recall(gang.name, shown.begun(gang.name), self._now())
        if record is None or record.removed or record.ended_at or record.given_up_at:
            return
        shown.require(gang.offer.region)
        record = records.take_out(record, ranks, gang.round)
        record = adopt(replace(record, region=gang.offer.region), shown, self._machines)
        await self._ledger.put(record)  # the record must be stored before the purchase
        with suppress(TryAgain, Refused):  # later polls delete what is left
            record = await self.clear(record)
        await self._start_missing(gang, record, shown.at)

    async def _start_missing(
        self, gang: GangSpec, record: records.VmGangRecord, listed_at: datetime
    ) -> None:
        """Request machines for all nodes that have none. Raises TryAgain, NoCapacity, Refused."""
        missing = [node for node in record.nodes if not node.id]
        groups = [missing] if self._traits.atomic_count else [[node] for node in missing]
        for group in groups:
            if group:
                record = await self._start(gang, record, group, listed_at)
        await self._ledger.put(replace(record, launched=True))

    def _begin(self, gang: GangSpec, before: records.VmGangRecord | None) -> records.VmGangRecord:
        """Return the record of a new launch. Raises NoCapacity."""
        self._check_queue(gang)
        left, billed = (before.leftovers, before.rolled_back) if before else ((), ())
        extras = list_extras(gang.offer, gang.disk_gib, gang.disk_type)
        record = records.make_record(gang.name, gang.nodes, self._now())
        return replace(record, leftovers=left, rolled_back=billed, extras=extras)

    async def give_up(self, record: records.VmGangRecord) -> None:
        """Roll back a launch. Machines that cannot be deleted now are deleted by a later poll."""
        made = [node for node in record.nodes if node.id]
        record = replace(
            record,
            nodes=tuple(records.VmNode(rank=node.rank) for node in record.nodes),
            leftovers=(*record.leftovers, *(node.id for node in made)),
            rolled_back=(*record.rolled_back, *made),
            given_up_at=self._now(),
        )
        await self._ledger.put(record)
        with suppress(TryAgain, Refused):
            await self.clear(record)

    async def clear(self, record: records.VmGangRecord) -> records.VmGangRecord:
        """Delete the machines that a failed launch left behind. Raises TryAgain, Refused."""
        await self._machines.delete(record.leftovers)
        record = replace(record, leftovers=())
        await self._ledger.put(record)
        return record

    async def _start(
        self,
        gang: GangSpec,
        record: records.VmGangRecord,
        group: Sequence[records.VmNode],
        listed_at: datetime,
    ) -> records.VmGangRecord:
        """Request the machines of these nodes. Raises TryAgain, NoCapacity, Refused."""
        self._await_listing(record, group, listed_at)
        data = [await self._make_user_data(gang, node.rank) for node in group]
        for each in data:
            self._check_size(each)
        names = [self._machines.names.make(record, node) for node in group]
        tries = [f"{node.round} {node.refused}" for node in group if node.round]
        request = MachineRequest(
            gang=gang,
            offer=gang.offer,
            names=names,
            user_data=data,
            tags={records.INSTALLATION: self._machines.names.mark, records.GANG: gang.name},
            token=hashlib.sha256(" ".join([*names, *tries]).encode()).hexdigest()[:32],
            public_key=self.public_key,
        )
        self._pace(record)
        asked = [replace(node, asked_at=self._now()) for node in group]
        record = records.with_nodes(record, asked)
        await self._ledger.put(record)
        try:
            ids = await self._machines.create(request)
        except (CloudFault, Refused) as error:
            raise await self._fail(record, group, error) from error
        record = records.with_nodes(record, records.make_nodes(asked, ids, self._now()))
        await self._ledger.put(record)
        return record

    async def _fail(
        self,
        record: records.VmGangRecord,
        group: Sequence[records.VmNode],
        error: CloudFault | Refused,
    ) -> ProviderError:
        """Record that a request failed, and return the error to raise."""
        if not isinstance(error, CloudFault) or not error.uncertain:
            asked = [replace(node, asked_at=None, refused=node.refused + 1) for node in group]
            await self._ledger.put(records.with_nodes(record, asked))
        if isinstance(error, Refused):
            return error
        what = f"the launch of {record.name}"
        return read_fault(self._machines.cloud, error, what, making=True)

    def _await_listing(
        self, record: records.VmGangRecord, group: Sequence[records.VmNode], listed_at: datetime
    ) -> None:
        """If the reply to a request was lost, raise TryAgain until the list of machines is recent
        enough to contain a machine that the request created. If the cloud accepts idempotency
        tokens, nothing is raised, because the request can be repeated immediately.
        """
        asked = [node.asked_at for node in group if node.asked_at is not None]
        if asked and not self._traits.tokens and listed_at - max(asked) < self._traits.list_lag:
            ranks = ", ".join(str(node.rank) for node in group)
            raise TryAgain(
                f"{record.name}: the cloud did not answer the request for rank {ranks}, and does "
                "not list its machine yet"
            )

    def _unfinished(self, name: str) -> Sequence[records.VmGangRecord]:
        """Return the unfinished launches of other gangs."""
        since = self._now() - _LATELY
        self._called = {each: at for each, at in self._called.items() if at > since}
        others = (self._ledger.get(each) for each in self._called if each != name)
        return [each for each in others if each and not each.started and not each.given_up_at]

    def _check_queue(self, gang: GangSpec) -> None:
        """Raise NoCapacity if so many nodes are waiting to be started that this launch would time
        out."""
        if self.most_nodes is None:
            return
        others = self._unfinished(gang.name)
        nodes = gang.nodes + sum(1 for each in others for node in each.nodes if not node.id)
        if nodes > self.most_nodes:
            raise NoCapacity(
                f"{nodes} nodes are waiting to be started, including nodes of other gangs; this "
                f"cloud accepts at most {self.most_nodes} requests before a launch times out"
            )

    def _pace(self, record: records.VmGangRecord) -> None:
        """Raise TryAgain if the pause between two requests has not passed, or if another gang has
        priority. Gangs that have already requested nodes have priority over other gangs, and the
        oldest of these gangs comes first.
        """
        now, mine = self._now(), (not _has_asked(record), record.intended_at)
        first = self._traits.launch_every and any(
            _has_asked(each) and (False, each.intended_at) < mine
            for each in self._unfinished(record.name)
        )
        if first or (self._next is not None and now < self._next):
            done = sum(1 for node in record.nodes if node.id)
            raise TryAgain(
                f"{record.name}: {done} of {len(record.nodes)} nodes have been started; this cloud "
                f"accepts one request every {self._traits.launch_every.total_seconds():g} s"
            )
        self._next = now + self._traits.launch_every

    def _check_size(self, user_data: str) -> None:
        size, limit = len(user_data.encode()), self._traits.user_data_limit
        if size > limit:
            raise Refused(f"the user data has {size} bytes, but this cloud accepts at most {limit}")


def _has_asked(record: records.VmGangRecord) -> bool:
    """Return whether a machine of the gang was requested."""
    return any(node.asked_at is not None for node in record.nodes)


def adopt(
    record: records.VmGangRecord, shown: GangMachines, machines: VmMachines
) -> records.VmGangRecord:
    """Find the machines of the nodes without a known machine id, and update all nodes from the
    cloud's list of machines. The list may be out of date: a machine that the list shows as booting
    may already be running.
    """
    found: dict[str, list[str]] = {}
    unfit = (*_NOT_YET_OR_ENDED, *([MachineState.STOPPED] if machines.traits.created_off else []))
    for _, machine in shown.of(record.name):
        if machine.state not in unfit and machine.id not in record.past_ids:
            found.setdefault(machine.name, []).append(machine.id)
    nodes = []
    for node in record.nodes:
        ids = sorted(found.get(machines.names.make(record, node), []))
        node = node if node.id or not ids else replace(node, id=ids[0])
        seen = shown.by_id.get(node.id)
        nodes.append(node if seen is None else machines.sight(node, seen, shown.at))
    return replace(record, nodes=tuple(nodes))


def add_strays(
    record: records.VmGangRecord, shown: GangMachines, doomed: Collection[str]
) -> records.VmGangRecord:
    """Add machines that will be deleted (`doomed`) to the machines that the record lists as rolled
    back, so that they are billed. Nodes of the record are not added. The record does not
    contain the time at which such a machine was requested, so the start of the launch is recorded.
    """
    known = {node.id for node in (*record.nodes, *record.rolled_back, *record.replaced)}
    strays = [
        records.VmNode(rank=part.rank, id=machine.id, asked_at=record.intended_at)
        for part, machine in shown.alive(record.name)
        if machine.id in doomed and machine.id not in known
    ]
    return replace(record, rolled_back=(*record.rolled_back, *strays))


async def finish_or_delete(
    machine: str, steps: Sequence[Step], delete: Callable[[str], Awaitable[None]]
) -> str:
    """Make the remaining calls for the machine that the first call created, and return its id. If a
    call fails, or if the launch is cancelled, delete the machine and raise the error. After a lost
    reply to the last call, the machine may run and is kept; the layer then finds it by its name.

    Set the trait `created_off`: if the deletion fails too, or if the reply to the first call is
    lost, the layer deletes the machine that is off, and requests another one.
    """
    for number, step in enumerate(steps, 1):
        try:
            await step()
        except BaseException as error:
            lost = isinstance(error, CloudFault) and error.uncertain
            if number < len(steps) or not lost:
                with suppress(CloudFault, Refused, *UNREADABLE):
                    await delete(machine)
            raise
    return machine


async def start_together(
    starts: Mapping[str, Awaitable[None]], undo: Callable[[str], Awaitable[None]]
) -> None:
    """Await all requests in `starts`, whose keys are names. If some requests fail, raise one of the
    errors. If a request can never succeed, first call `undo` with each name, and then raise that
    request's error. `undo` raises nothing.
    """
    results = await asyncio.gather(*starts.values(), return_exceptions=True)
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, CloudFault | ProviderError):
            raise error
    if final := [each for each in errors if _is_final(each)]:
        await asyncio.gather(*map(undo, starts))
        raise final[0]
    if errors:
        raise errors[0]


def _is_final(error: BaseException) -> bool:
    """Return whether the request would also fail if it were repeated."""
    if not isinstance(error, CloudFault):
        return True
    return not error.uncertain and error.status not in (409, 425, 429)
