"""The Shadeform provider keeps the contract, on a stand-in that checks every request against
Shadeform's documentation.
"""

import asyncio
from datetime import UTC, datetime

from tests.contract.shadeform_stand_in import ShadeformStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.providers import shadeform
from cavvy.providers.base import GangState
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.shadeform import ShadeformCloud, _read
from cavvy.providers.vm.cloud import (
    CloudMachine,
    MachineState,
    SshTarget,
)

PROOF = Proof("shadeform", False, "a strict stand-in for Shadeform's API")
# The example "Active Response" of https://docs.shadeform.ai/getting-started/quickstart.
EXAMPLE = {
    "id": "1dc915dd-8899-4b4f-862a-f63fb2b3dc3d",
    "cloud": "massedcompute",
    "region": "us-central-1",
    "shade_instance_type": "A6000_plus",
    "cloud_instance_type": "gpu_1x_A6000_high_perf",
    "cloud_assigned_id": "eca4defe-32f3-4f96-ab23-dc67220c8510",
    "shade_cloud": True,
    "name": "quickstart",
    "configuration": {
        "memory_in_gb": 64,
        "storage_in_gb": 256,
        "vcpus": 12,
        "num_gpus": 1,
        "gpu_type": "A6000",
        "interconnect": "pcie",
        "os": "ubuntu22.04_cuda12.2_shade_os",
        "vram_per_gpu_in_gb": 48,
    },
    "ip": "123.12.24.32",
    "ssh_user": "shadeform",
    "ssh_port": 22,
    "status": "active",
    "status_details": "",
    "cost_estimate": "0.0008306021",
    "hourly_price": 57,
    "created_at": "2024-04-02T01:58:24.118626Z",
    "deleted_at": None,
}


class TestShadeform(RestContract):
    package, traits, stand_in = shadeform, ShadeformCloud.traits, ShadeformStandIn
    launch_faults = read_replies("""
    NoCapacity  409  conflict      The instance is out of capacity.
    NoCapacity  400  bad_request   This type does not offer spot here
    Refused     400  bad_request   name is invalid
    Refused     401  unauthorized  The API key is not available
    TryAgain    500  internal      Out of capacity
    """)

    def test_the_setting_selects_clouds_and_only_free_places_are_offered(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours", clouds="hyperstack, massedcompute")
        found = {
            (each.instance_type, each.region)
            for each in asyncio.run(provider.offers())
            if each.purchase is Purchase.ON_DEMAND
        }
        assert found == {
            ("massedcompute.A6000_plus", "us-central-1"),
            ("massedcompute.A6000_plus", "canada-1"),
            ("hyperstack.A100_80Gx8", "us-central-1"),
        }

    async def test_a_spot_instance_that_shadeform_reclaims_is_preempted(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("spot", purchase=Purchase.SPOT)
        assert account.api.asked[0]["rental_type"] == "spot"
        taken = account.cloud.billed()[0]
        account.cloud.change(taken.id, ended=account.cloud.time)
        account.api.preempted.add(taken.id)
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)

    async def test_the_setting_selects_the_operating_system(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one")
        provider = account.provider("ours", os="ubuntu20.04_cuda12.0_shade_os")
        await provider.launch(gang)
        await provider.remove(gang.name)
        assert account.api.asked[0]["os"] == "ubuntu20.04_cuda12.0_shade_os"


def test_the_documented_example_is_read() -> None:
    assert _read(EXAMPLE) == CloudMachine(
        id="1dc915dd-8899-4b4f-862a-f63fb2b3dc3d",
        name="quickstart",
        state=MachineState.RUNNING,
        address="123.12.24.32",
        ssh=SshTarget(address="123.12.24.32"),
        created_at=datetime(2024, 4, 2, 1, 58, 24, 118626, tzinfo=UTC),
    )


def test_the_documented_example_of_a_pending_instance_is_read() -> None:
    told = EXAMPLE | {"ip": None, "ssh_port": None, "status": "pending"}
    machine = _read(told)
    assert (machine.state, machine.ssh) == (MachineState.STARTING, None)
