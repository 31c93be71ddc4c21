"""The Vultr provider keeps the contract, on a stand-in that checks every request against Vultr's
published description.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.vultr_stand_in import VultrStandIn
from tests.proofs import Proof

from cavvy.providers import vultr
from cavvy.providers.base import Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.vm.cloud import CloudMachine, MachineState
from cavvy.providers.vultr import VultrCloud, _read

PROOF = Proof("vultr", False, "a strict stand-in for Vultr's API")
# The example of "Create Instance" in https://www.vultr.com/api (November 2026), shortened.
EXAMPLE = {
    "id": "4f0f12e5-1f84-404f-aa84-85f431ea5ec2",
    "os": "CentOS 8 Stream",
    "ram": 1024,
    "disk": 0,
    "main_ip": "0.0.0.0",
    "vcpu_count": 1,
    "region": "ewr",
    "plan": "vc2-1c-1gb",
    "date_created": "2021-09-14T13:22:20+00:00",
    "status": "pending",
    "power_status": "running",
    "server_status": "none",
    "internal_ip": "",
    "label": "Example Instance",
    "os_id": 215,
    "tags": ["a tag", "another"],
}


class TestVultr(RestContract):
    package, traits, stand_in = vultr, VultrCloud.traits, VultrStandIn
    launch_faults = read_replies("""
    NoCapacity     400  400  Plan is not available in the selected datacenter.
    NoCapacity     400  400  the location you have selected does not have any more capacity.
    QuotaTooSmall  400  400  You have reached the maximum number of active virtual machines for this account
    Refused        400  400  Invalid os_id.
    """)

    def test_a_region_may_have_a_price_of_its_own(self, account: RestPlace) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        assert {
            (each.region, each.rate.micros_per_hour)
            for each in offers
            if each.instance_type == "vc2-2c-4gb"
        } == {("ewr", 30_000), ("ams", 30_000), ("sao", 45_000)}

    async def test_instances_run_the_operating_system_of_the_setting(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang, provider = await harness.spec("one"), account.provider("ours", os="Debian 12 x64")
        await provider.launch(gang)
        await provider.remove(gang.name)
        await account.settle()
        with pytest.raises(Refused, match="os: Vultr has no operating system 'Plan 9'"):
            await account.provider("ours", os="Plan 9").launch(await harness.spec("two"))
        assert account.api.systems == [2136]


def test_the_documented_example_is_read() -> None:
    assert _read(EXAMPLE) == CloudMachine(
        id="4f0f12e5-1f84-404f-aa84-85f431ea5ec2",
        name="Example Instance",
        state=MachineState.STARTING,
        created_at=datetime(2021, 9, 14, 13, 22, 20, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    ("status", "power", "server", "state"),
    [
        ("pending", "stopped", "none", MachineState.STARTING),
        ("active", "stopped", "installingbooting", MachineState.RUNNING),
        ("active", "running", "ok", MachineState.RUNNING),
        ("active", "stopped", "ok", MachineState.STOPPED),
        ("suspended", "running", "ok", MachineState.RUNNING),
    ],
)
def test_only_an_installed_instance_that_is_off_counts_as_off(
    status: str, power: str, server: str, state: MachineState
) -> None:
    told = EXAMPLE | {"status": status, "power_status": power, "server_status": server}
    assert _read(told).state is state
