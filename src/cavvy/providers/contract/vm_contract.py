"""Runs the contract suite for `providers.vm`, the code that clouds share, on an in-memory cloud.
Further rules compare what a provider reports and leaves behind with the simulated account: bills,
machines of other owners, and things that are billed apart from machines. These rules need the
in-memory cloud, because only the cloud itself knows what it bills.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cavvy.domain.values import replace
from cavvy.providers.base import (
    Feature,
    GangSpec,
    GangState,
    NoCapacity,
    NodeSeen,
    Provider,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import FaultTests, ProviderContract, RepairFaultTests, RepairTests
from cavvy.providers.contract.harness import (
    FOREIGN,
    OURS,
    ContractHarness,
    LaunchFault,
    ProviderUnderTest,
    ScenarioSuite,
    in_scenario,
)
from cavvy.providers.contract.memory_cloud import MemoryPlace, Rented
from cavvy.providers.vm.cloud import BillEnd, BillStart, CloudTraits
from cavvy.providers.vm.records import make_mark

# A time whose day cannot be mistaken for its month, and whose hour is not one of a 12-hour clock.
# East or west of Greenwich, it is on another day.
_NOON = datetime(2031, 11, 5, 21, 7, 33, tzinfo=UTC)
_ZONES = ("EAST-14", "WEST+11")  # as in the variable TZ: 14 hours before and 11 hours after UTC
_EXACT = timedelta(seconds=1)  # APIs report whole seconds
_LATE = timedelta(hours=3)  # by then, everything that Cavvy left behind must be deleted
_POLL = timedelta(minutes=10)


class AccountTests(ScenarioSuite):
    """Tests of bills, and of what remains in the account."""

    has_others = True  # the account may contain machines with other names than Cavvy's

    @pytest.mark.parametrize("zone", _ZONES)
    @in_scenario
    async def test_bills_cover_the_time_that_the_cloud_bills(
        self, harness: ContractHarness, zone: str
    ) -> None:
        """The test runs in time zones far from UTC, in which a local time that is read as UTC, or
        the other way around, is wrong by many hours.
        """
        harness.needs_memory()
        place = find_place(harness)
        place.cloud.time = _NOON
        with _time_zone(zone):
            gang = await harness.running("billed")
            await place.wait(timedelta(minutes=47))
            looked_at = place.cloud.time
            (running,) = (await harness.one(gang.name)).nodes
            (machine,) = place.cloud.billed()
            boots_free = place.cloud.traits.bill_starts is BillStart.RUNNING
            latest = machine.at + (place.cloud.boot_time if boots_free else timedelta(0))
            _check_start(running, machine.at, latest)
            await harness.remove(gang.name)
            await _poll(harness, timedelta(minutes=30))
            (ended,) = (await harness.one(gang.name)).nodes
            _check_start(ended, machine.at, latest)
            # an end that only the API knows may be before the deletion, but not before this poll
            reported = place.cloud.traits.bill_ends is BillEnd.REPORTED
            _check_end(ended, _find(place, machine.id).ended, looked_at if reported else None)

    @in_scenario
    async def test_machines_of_other_owners_stay(self, harness: ContractHarness) -> None:
        """The account has other machines, whose names may begin like those of Cavvy's machines."""
        place = find_place(harness)
        names = ("web-1", "cv-images", f"cv-{make_mark(OURS)}", f"cv-{make_mark(FOREIGN)}-a-b-0-1")
        if not self.has_others:
            pytest.skip("the service runs nothing but what has the names of Cavvy's jobs")
        others = [place.cloud.add(name, {}) for name in names]
        await harness.place.settle()
        gang = await harness.running("ours")
        await _poll(harness, _POLL)
        assert [seen.name for seen in await harness.ours.gangs()] == [gang.name]
        await harness.remove(gang.name)
        await _poll(harness, _LATE)
        left = [each.id for each in place.cloud.billed()]
        for each in others:
            place.cloud.change(each, ended=place.cloud.time)
        assert left == others, "Cavvy may delete only its own installation's machines"

    @in_scenario
    async def test_two_installations_may_use_the_same_name(self, harness: ContractHarness) -> None:
        foreign = harness.make(FOREIGN)
        ours = await harness.spec("same")
        theirs = await harness.spec("same", installation=FOREIGN)
        await harness.start(ours)
        await harness.launch(theirs, foreign)
        await harness.place.settle()
        assert len(find_place(harness).cloud.billed()) == 2
        await harness.remove(ours.name)
        await harness.expect(GangState.ENDED, ours)
        (seen,) = await foreign.gangs(theirs.name)
        assert seen.state is GangState.RUNNING
        assert len(find_place(harness).cloud.billed()) == 1

    @pytest.mark.parametrize("fault", [None, *LaunchFault])
    @in_scenario
    async def test_nothing_that_is_billed_apart_survives(
        self, harness: ContractHarness, fault: LaunchFault | None
    ) -> None:
        """Disks, addresses and the like are deleted with their machine, and after a launch that
        failed.
        """
        place = find_place(harness)
        if place.remains() is None:
            pytest.skip("the simulated account has nothing but machines (`remains`)")
        alone = Feature.GANG in harness.ours.manifest.unsupported
        gang = await harness.spec("left", nodes=1 if alone else 2)
        if fault is not None:
            place.fail(gang.nodes - 1, fault)
        with suppress(TryAgain, NoCapacity, Refused):
            await harness.launch(gang)
        await harness.place.settle()
        await harness.remove(gang.name)
        await _poll(harness, _LATE)
        assert place.remains() == [], "these remain in the account, and may be billed"

    @in_scenario
    async def test_a_machine_runs_the_script_that_it_was_given(
        self, harness: ContractHarness
    ) -> None:
        place = find_place(harness)
        gang = await harness.running("script")
        (machine,) = place.cloud.billed()
        scripts = [
            script
            for request in place.cloud.requests
            for name, script in zip(request.names, request.user_data, strict=True)
            if name == machine.name
        ]
        made = await place.user_data(harness.ours, gang)
        if made is None or scripts == ["#!/bin/sh\n"]:
            pytest.skip("the service, not a script on the machine, starts the agent")
        (script,) = map(_unquoted, scripts)
        lost = [line for line in made.splitlines() if _unquoted(line) not in script]
        assert lost == [], "these lines of the user data are missing on the machine"


class VmContract(ProviderContract, FaultTests, RepairTests, RepairFaultTests, AccountTests):
    """After a scenario, no resource that is billed may remain."""

    traits: CloudTraits

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        place = MemoryPlace(self.traits, tmp_path)
        yield place
        assert place.cloud.billed() == []

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        assert isinstance(place, MemoryPlace)
        place.fail(0, LaunchFault.LOST)
        with suppress(TryAgain):
            await provider.launch(gang)
        assert place.cloud.fault is None

    @in_scenario
    async def test_a_machine_prepares_an_engine_for_an_image(
        self, harness: ContractHarness
    ) -> None:
        """A machine installs a container engine if, and only if, its gang has an image. The scripts
        of all clouds are valid, with what the cloud's provider adds to them.
        """
        harness.needs(Feature.IMAGE)
        assert isinstance(harness.place, MemoryPlace)
        cloud = harness.place.cloud
        for word, image in (("plain", None), ("imaged", "docker.io/library/busybox:1")):
            begun = len(cloud.requests)
            gang = replace(await harness.spec(word), image=image)
            await harness.start(gang)
            await harness.remove(gang.name)
            scripts = [each for request in cloud.requests[begun:] for each in request.user_data]
            if set(scripts) == {"#!/bin/sh\n"}:  # the service has no user data for a script
                pytest.skip("the service, not a script on the machine, starts the container image")
            assert scripts
            assert all(("command -v podman" in each) == bool(image) for each in scripts)
            for each in scripts:
                assert find_mistakes(each) == ""


def find_mistakes(script: str) -> str:
    """Return what a shell finds wrong in a script that it only reads."""
    return subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True).stderr


def find_place(harness: ContractHarness) -> MemoryPlace:
    assert isinstance(harness.place, MemoryPlace), "the test needs the in-memory cloud"
    return harness.place


def _unquoted(text: str) -> str:
    """Return the text without quotation marks, since a cloud may need a script within a script."""
    return re.sub(r"""["'\\\\]""", "", text)


def _check_start(node: NodeSeen, earliest: datetime, latest: datetime) -> None:
    """Check that the bill starts when the cloud's bill does, between these times. If the bill
    starts within a range, the range must contain such a time."""
    assert node.started_at is not None
    first, last = node.started_at, node.started_by or node.started_at
    assert first - _EXACT <= latest, f"the cloud bills from {latest} on, the bill starts at {first}"
    assert earliest <= last + _EXACT, f"the cloud bills from {earliest} on, not from {last} on"


def _check_end(node: NodeSeen, end: datetime | None, earliest: datetime | None) -> None:
    assert end is not None, "the cloud still bills the machine"
    assert node.ended_at is not None
    least, most = (earliest or end) - _EXACT, end + _EXACT
    assert least <= node.ended_at, f"the cloud bills until {end}, the bill ends at {node.ended_at}"
    if not node.unseen:
        assert node.ended_at <= most, f"the cloud bills until {end}, not until {node.ended_at}"


def _find(place: MemoryPlace, machine: str) -> Rented:
    return next(each for each in place.cloud.machines if each.id == machine)


async def _poll(harness: ContractHarness, length: timedelta) -> None:
    """Let the control plane poll the provider for this long."""
    for _ in range(length // _POLL):
        await harness.place.wait(_POLL)
        with suppress(TryAgain, Refused):
            await harness.ours.gangs()
    await harness.place.settle()


@contextmanager
def _time_zone(zone: str) -> Iterator[None]:
    """Use this local time in the process."""
    before: str | None = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()
