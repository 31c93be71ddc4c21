"""An in-memory cloud of virtual machines with a clock that tests advance. Tests can inject the
failures of real clouds.
"""

import asyncio
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import (
    Feature,
    GangSpec,
    Manifest,
    NodeEndpoint,
    Provider,
    ProviderContext,
)
from cavvy.providers.contract.harness import LaunchFault
from cavvy.providers.state import MemoryProviderState, ProviderState
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import ABILITIES
from cavvy.providers.vm.provider import VmProvider

MANIFEST = Manifest(
    name="memory-cloud",
    title="a cloud in memory",
    docs="this provider exists in tests only",
    abilities=ABILITIES,
    unsupported={
        feature: "this cloud is a test"
        for feature in (
            Feature.SPOT,
            Feature.NETWORK,
            Feature.DISK,
            Feature.VOLUMES,
            Feature.CAPACITY,
            Feature.RESULTS,
            Feature.NOTICE,
        )
    },
    visibility_delay=timedelta(minutes=1),
)
BOOT = timedelta(minutes=1)
_FAULTS = {
    LaunchFault.BUSY: vm.CloudFault(429, "too-many-requests"),
    LaunchFault.BROKEN: vm.CloudFault(500, "internal-error"),
    LaunchFault.BROKEN_LATE: vm.CloudFault(503, "unavailable"),
    LaunchFault.FULL: vm.CloudFault(400, "insufficient-capacity"),
    LaunchFault.REFUSED: vm.CloudFault(403, "forbidden"),
    LaunchFault.LOST: vm.CloudFault(0, "no reply"),
    LaunchFault.DROPPED: vm.CloudFault(0, "no reply"),
}
_AFTER = {LaunchFault.LOST, LaunchFault.BROKEN_LATE}


@dataclass(frozen=True, kw_only=True)
class Rented:
    """A machine that is billed from `at` until `ended`."""

    id: str
    name: str
    at: datetime
    tags: dict[str, str]
    off: bool = False
    ended: datetime | None = None


class MemoryCloud:
    """Implements `Cloud`. The machines are kept in a list, because two machines may have the same
    name.
    """

    def __init__(self, traits: vm.CloudTraits) -> None:
        self.traits = traits
        self.time = datetime(2030, 1, 1, tzinfo=UTC)
        self.machines: list[Rented] = []
        self.requests: list[vm.MachineRequest] = []
        self.fault: tuple[int, LaunchFault] | None = None
        self.fails_deletions = self.fails_lists = self.hides = False
        self.left = 250  # free machines
        self.boot_time = BOOT
        self.addresses: dict[str, str] = {}  # by machine id; others have a default
        self.targets: dict[str, vm.SshTarget] = {}  # by machine id: the address of its SSH server
        self._tokens: dict[str, list[str]] = {}
        self._ids = itertools.count(1)
        self._last: datetime | None = None

    def now(self) -> datetime:
        return self.time

    def billed(self) -> list[Rented]:
        return [each for each in self.machines if each.ended is None]

    async def offers(self) -> Sequence[Offer]:
        offer = Offer(
            provider="memory-cloud",
            region="here",
            instance_type="small",
            vcpus=4,
            memory_mib=16384,
            rate=HourlyRate(100_000),
        )
        gpu = replace(offer, instance_type="gpu", accelerator="T4", accelerator_count=1)
        return [offer, replace(gpu, accelerator_memory_mib=16384, rate=HourlyRate(500_000))]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        await asyncio.sleep(0)
        fault, traits = self._admit(request), self.traits
        if traits.tokens and request.token in self._tokens:
            return self._tokens[request.token]
        if len(self.billed()) + len(request.names) > self.left:
            raise _FAULTS[LaunchFault.FULL]
        ids = [self.add(name, dict(request.tags) if traits.tags else {}) for name in request.names]
        self._tokens[request.token] = ids
        await asyncio.sleep(0)
        if fault is not None:
            raise _FAULTS[fault]
        return ids

    async def turn_on(self, machine: str, request: vm.MachineRequest) -> None:
        """Start a machine that was added as switched off, with the faults of `create`."""
        fault = self._admit(request)
        if len(self.billed()) > self.left:
            raise _FAULTS[LaunchFault.FULL]
        self.change(machine, off=False)
        if fault is not None:
            raise _FAULTS[fault]

    def _admit(self, request: vm.MachineRequest) -> LaunchFault | None:
        """Check a request for machines. Raise the request's fault, or return the fault that occurs
        after the request has taken effect."""
        self.requests.append(request)
        self._check(request)
        traits, now = self.traits, self.time
        if self._last is not None and now - self._last < traits.launch_every:
            raise _FAULTS[LaunchFault.BUSY]
        self._last = now
        if request.offer.region != "here" or request.offer.instance_type not in ("small", "gpu"):
            raise vm.CloudFault(400, "unknown-type")
        fault = self._take_fault(len(request.names))
        if fault is not None and fault not in _AFTER:
            raise _FAULTS[fault]
        return fault

    def _check(self, request: vm.MachineRequest) -> None:
        """Fail the test if the request from `providers.vm` does not conform to the contract of
        `Cloud.create`.
        """
        traits = self.traits
        assert traits.atomic_count or len(request.names) == 1
        assert all(len(name) <= traits.name_limit for name in request.names)
        assert all(text.startswith("#!/bin/sh\n") for text in request.user_data)
        if traits.reach is vm.Reach.SSH:
            assert re.fullmatch(r"ssh-ed25519 \S+ cavvy", request.public_key)
            assert all(request.public_key in text for text in request.user_data)

    def add(self, name: str, tags: dict[str, str], *, off: bool = False) -> str:
        new = f"vm-{next(self._ids):06d}"
        self.machines.append(Rented(id=new, name=name, at=self.time, tags=tags, off=off))
        return new

    async def list(self) -> Sequence[vm.CloudMachine]:
        await asyncio.sleep(0)
        if self.fails_lists:
            raise _FAULTS[LaunchFault.BROKEN_LATE]
        shown = [self._show(each) for each in self.machines]
        return [] if self.hides else [each for each in shown if each is not None]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        await asyncio.sleep(0)
        return next((self._show(each) for each in self.machines if each.id == machine), None)

    async def delete(self, machine: str) -> None:
        await asyncio.sleep(0)
        if self.fails_deletions:
            raise vm.CloudFault(500, "internal-error")
        if machine not in [each.id for each in self.billed()]:
            raise vm.CloudFault(404, "not-found")
        self.change(machine, ended=self.time)

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == "insufficient-capacity"

    def change(self, machine: str, **values: object) -> None:
        self.machines = [
            replace(each, **values) if each.id == machine else each  # type: ignore[arg-type]
            for each in self.machines
        ]

    def _take_fault(self, machines: int) -> LaunchFault | None:
        if self.fault is None:
            return None
        number, what = self.fault
        self.fault = None if number < machines else (number - machines, what)
        return what if number < machines else None

    def _show(self, rented: Rented) -> vm.CloudMachine | None:
        """Return the machine as the cloud lists it. Return None if the list does not contain the
        machine yet, or no longer contains it because the machine ended some time ago.
        """
        if self.time - rented.at < self.traits.list_lag:
            return None
        if rented.ended and self.time - rented.ended > self.traits.ended_listed:
            return None
        booted = self.time - rented.at >= self.boot_time
        state = vm.MachineState.RUNNING if booted else vm.MachineState.STARTING
        if rented.off:
            state = vm.MachineState.STOPPED
        return vm.CloudMachine(
            id=rented.id,
            name=rented.name,
            state=vm.MachineState.ENDED if rented.ended else state,
            tags=rented.tags,
            address=self.addresses.get(rented.id, "10.0.0.1") if booted else None,
            ssh=self.targets.get(rented.id) if booted else None,
            created_at=rented.at,
            ended_at=rented.ended,
        )


class MemoryPlace:
    """One scenario's account; implements `ProviderUnderTest` and `FaultyPlace`."""

    make_cloud: type[MemoryCloud] = MemoryCloud

    def __init__(self, traits: vm.CloudTraits, home: Path) -> None:
        self.cloud, self.home = self.make_cloud(traits), home
        self.states: dict[str, ProviderState] = defaultdict(MemoryProviderState)

    def provider(self, installation: str) -> VmProvider:
        context = ProviderContext(
            installation=installation,
            home=self.home,
            state=self.states[installation],
            node_endpoint=None if self.cloud.traits.reach is vm.Reach.SSH else make_node_endpoint(),
            now=self.cloud.now,
        )
        return VmProvider(MANIFEST, context, self.cloud)

    async def settle(self) -> None:
        await self.wait(timedelta(minutes=3))

    async def wait(self, length: timedelta) -> None:
        self.cloud.time += length

    async def end(self, gang: str) -> None:
        """End the machines as their owner would, so that their bills end: shut the machines down
        or, if the cloud also bills machines that are shut down, delete the machines.
        """
        ends = self.cloud.traits.bill_ends
        for each in self.cloud.billed():
            if ends is vm.BillEnd.SHUTDOWN:
                self.cloud.change(each.id, off=True)
            else:
                self.cloud.change(each.id, ended=self.cloud.time)

    async def lose(self, rank: int) -> None:
        for each in self.cloud.billed():
            number, count = each.name.rsplit("-", 2)[1:]
            if int(number) % int(count) == rank:
                self.cloud.change(each.id, ended=self.cloud.time)

    def remains(self) -> Sequence[str] | None:
        """Return what Cavvy created in the account besides machines, and what still exists. Returns
        None if the account can contain only machines."""
        return None

    async def user_data(self, provider: Provider, gang: GangSpec) -> str | None:
        """Return the script that the layer made for the gang's first node, or None if the service
        starts the agent itself."""
        if self.cloud.traits.reach is not vm.Reach.USER_DATA:
            return None
        assert isinstance(provider, VmProvider)
        return await provider.make_user_data(gang, 0)

    def fail(self, number: int, fault: LaunchFault) -> None:
        self.cloud.fault = (number, fault)

    def failed(self) -> bool:
        return self.cloud.fault is None

    def fail_deletions(self, fails: bool) -> None:
        self.cloud.fails_deletions = fails

    def billed(self) -> int:
        return len(self.cloud.billed())

    def lose_records(self) -> None:
        self.states.clear()

    def double(self) -> None:
        newest = self.cloud.billed()[-1]
        self.cloud.add(newest.name, newest.tags)

    def hide(self, hidden: bool) -> None:
        self.cloud.hides = hidden


def make_node_endpoint() -> NodeEndpoint:
    return NodeEndpoint(
        address="https://192.0.2.1:7443",
        pin="0" * 64,
        key_pin="none",
        agent=lambda: "1" * 64,
        pythons=lambda: {"Linux x86_64": "2" * 64},
        publish=lambda content: "3" * 64,
        claim_token=lambda gang, rank: f"claim-{gang}-{rank}"[:43],
    )
