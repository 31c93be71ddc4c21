"""Accesses the machines of one installation in a cloud. Turns the cloud's faults into the errors of
the provider interface, and ignores machines whose names do not belong to the installation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TypeVar

from cavvy.domain.offers import Offer
from cavvy.providers.base import NotFound, ProviderError, Refused
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.records import MachineBill, MachineName, MachineNames, VmNode, sight

# Callers share a list up to this age, so that polls of many gangs stay below the rate limits of the
# clouds. DigitalOcean allows 5,000 requests an hour, and Lambda one request a second.
LIST_AGE = timedelta(seconds=5)
# deletions are remembered for this long; by then, polls have shown that the machine is gone
_DELETED_AGE = timedelta(days=1)

_T = TypeVar("_T")


class GangMachines:
    """The installation's machines by gang. `at` is the time when the list was requested. `silent`
    contains the errors of the regions that did not answer; machines in these regions are missing
    from the list.
    """

    def __init__(
        self,
        names: MachineNames,
        found: Sequence[tuple[MachineName, vm.CloudMachine]],
        at: datetime,
        silent: Mapping[str, ProviderError],
        *,
        created_off: bool = False,
    ) -> None:
        self._names, self._created_off = names, created_off
        self.found, self.at, self.silent = found, at, silent
        self.by_id = {machine.id: machine for _, machine in found}

    def of(self, gang: str) -> Sequence[tuple[MachineName, vm.CloudMachine]]:
        """Return the gang's machines, each with the parts of its name."""
        return [each for each in self.found if self._names.same(each[0].gang, gang)]

    def begun(self, gang: str) -> Sequence[tuple[MachineName, vm.CloudMachine]]:
        """Return the gang's machines without those that `create` has never switched on. If all are
        off, return all, since the gang may have run.
        """
        found = self.of(gang)
        if not self._created_off:
            return found
        return [each for each in found if each[1].state is not vm.MachineState.STOPPED] or found

    def alive(self, gang: str) -> Sequence[tuple[MachineName, vm.CloudMachine]]:
        """Return the gang's machines that have not ended."""
        return [each for each in self.of(gang) if each[1].state is not vm.MachineState.ENDED]

    def require(self, region: str) -> None:
        """If the region did not answer, raise the region's error, because the list of machines does
        not contain the region's machines. If `region` is "", all regions must have answered.
        """
        for silent, error in self.silent.items():
            if not silent or region in ("", silent):
                raise error

    def unknown(self, known: Iterable[str]) -> Sequence[str]:
        """Return the gangs that appear in machines' names but are not in `known`."""
        gangs = list(known)
        written = {part.gang for part, _ in self.found}
        return sorted(
            each for each in written if not any(self._names.same(each, gang) for gang in gangs)
        )


class VmMachines:
    """Calls the cloud. Methods raise TryAgain and Refused; `create` raises CloudFault."""

    def __init__(self, cloud: vm.Cloud, names: MachineNames, now: Callable[[], datetime]) -> None:
        self.cloud, self.traits, self.names, self._now = cloud, cloud.traits, names, now
        # the last request for a list, which may still be running
        self._listing: asyncio.Task[GangMachines] | None = None
        self._listed_at = now()
        # machine id -> when the cloud last accepted the deletion of the machine
        self._deleted: dict[str, datetime] = {}

    async def offers(self) -> Sequence[Offer]:
        return await self.ask_all(self.cloud.offers(), "the list of offers")

    async def list(self) -> GangMachines:
        """Return all machines of this installation that the cloud lists. Calls within LIST_AGE
        share one list, unless this process has created or deleted a machine since the list was
        requested.
        """
        task, now = self._listing, self._now()
        fresh = timedelta(0) <= now - self._listed_at < LIST_AGE
        if task is None or not fresh or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._list(now))
            task.add_done_callback(_take_error)
            self._listing, self._listed_at = task, now
        # shielded, so that a cancelled caller does not cancel the list for other callers
        return await asyncio.shield(task)

    async def _list(self, at: datetime) -> GangMachines:
        machines, silent = await self.ask_all(self._list_regions(), "the list of machines")
        found = [(part, each) for each in machines if (part := self.names.read(each)) is not None]
        off = self.traits.created_off
        return GangMachines(self.names, found, at, silent, created_off=off)

    async def _list_regions(
        self,
    ) -> tuple[Sequence[vm.CloudMachine], Mapping[str, ProviderError]]:
        """Return the machines of the regions that answer, and the errors of the other regions."""
        try:
            return await self.cloud.list(), {}
        except vm.SilentRegions as silent:
            return silent.machines, {
                region: self._read(fault, f"the list of machines in {region or 'a region'}")
                for region, fault in silent.faults.items()
            }

    def _read(self, fault: vm.CloudFault | Refused, what: str) -> ProviderError:
        """Convert the fault of a request that names no machine into a provider error; see
        `ask_all`.
        """
        if isinstance(fault, Refused):
            return fault
        error = vm.read_fault(self.cloud, fault, what)
        return _refuse(error) if isinstance(error, NotFound) else error

    async def get(self, machine: str) -> vm.CloudMachine | None:
        with suppress(NotFound):
            return await self._ask(self.cloud.get(machine), f"the state of machine {machine}")
        return None

    async def delete(self, machines: Iterable[str]) -> None:
        """Delete machines. If a deletion fails, the other machines are still deleted, and then the
        first error is raised.
        """
        errors: list[ProviderError] = []
        for each in sorted(set(machines)):
            try:
                await self._ask(self.cloud.delete(each), f"the deletion of machine {each}")
            except NotFound:
                continue
            except ProviderError as error:
                errors.append(error)
            else:
                self._deleted[each] = self._now()
            finally:
                self._listing = None
        since = self._now() - _DELETED_AGE
        self._deleted = {each: at for each, at in self._deleted.items() if at > since}
        if errors:
            raise errors[0]

    async def release(self, machine: str, call: Awaitable[None]) -> None:
        """Await `call`, a request to end a machine that the cloud keeps warm."""
        with suppress(NotFound):
            await self._ask(call, f"the release of machine {machine}")
        self._listing = None

    def is_deleted(self, machine: str) -> bool:
        """Return whether the cloud has accepted the deletion of a machine by this process."""
        return machine in self._deleted

    def deleted_at(self, machine: str) -> datetime | None:
        """Return the time when the cloud accepted the deletion of a machine. Returns None if this
        process did not delete the machine, or if a deletion does not end the bill in this cloud.
        """
        ends = self.traits.bill_ends is vm.BillEnd.DELETION
        return self._deleted.get(machine) if ends else None

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        """Request machines. Raises CloudFault."""
        try:
            ids = await self.cloud.create(request)
        except vm.UNREADABLE as error:
            raise vm.unreadable(error) from error
        finally:
            self._listing = None
        if len(ids) != len(request.names):
            raise vm.CloudFault(0, "unreadable reply", f"{len(ids)} ids for {len(request.names)}")
        return ids

    def sight(self, node: VmNode, machine: vm.CloudMachine, now: datetime) -> VmNode:
        """See `records.sight`."""
        ended = machine.state is vm.MachineState.ENDED
        off = machine.state is vm.MachineState.STOPPED
        over = ended or (off and self.traits.bill_ends is vm.BillEnd.SHUTDOWN)
        boots = machine.state in (vm.MachineState.REQUESTED, vm.MachineState.STARTING)
        bill = MachineBill(
            free=boots and self.boots_free,
            boots_free=self.boots_free,
            over=over,
            deleted_at=self.deleted_at(machine.id),
        )
        return sight(node, machine, now, bill)

    @property
    def boots_free(self) -> bool:
        """Whether the cloud starts to bill a machine only after the machine has booted."""
        return self.traits.bill_starts is vm.BillStart.RUNNING

    async def ask_all(self, call: Awaitable[_T], what: str) -> _T:
        """Send a request that names no machine. For a request that names no machine, the status 404
        means that the API's address is wrong, so Refused is raised. Faults with any other status
        are handled as in `_ask`.
        """
        try:
            return await self._ask(call, what)
        except NotFound as error:
            raise _refuse(error) from error

    async def _ask(self, call: Awaitable[_T], what: str) -> _T:
        try:
            return await call
        except vm.CloudFault as fault:
            raise vm.read_fault(self.cloud, fault, what) from fault
        except vm.UNREADABLE as error:
            raise vm.read_fault(self.cloud, vm.unreadable(error), what) from error


def _take_error(task: asyncio.Task[GangMachines]) -> None:
    """Retrieve the exception of a task that lists machines, so that asyncio does not log the
    exception if all callers were cancelled.
    """
    if not task.cancelled():
        task.exception()


def _refuse(error: NotFound) -> Refused:
    return Refused(f"{error}; check the address of the API (`endpoint`)")
