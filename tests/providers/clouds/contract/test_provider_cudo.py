"""The CUDO Compute provider keeps the contract, on a stand-in that checks every request against
CUDO's own Python package and its reference.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.cudo_stand_in import CudoStandIn
from tests.proofs import Proof

from cavvy.providers import cudo
from cavvy.providers.base import Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.cudo import CudoCloud, _read
from cavvy.providers.vm.cloud import CloudMachine, MachineState, SshTarget

PROOF = Proof("cudo", False, "a strict stand-in for CUDO Compute's API")


class TestCudo(RestContract):
    package, traits, stand_in = cudo, CudoCloud.traits, CudoStandIn
    launch_faults = read_replies("""
    NoCapacity  400  9   no host available
    Refused     400  3   invalid vmId
    TryAgain    409  6   the id is taken
    Refused     403  7   not available to this user
    TryAgain    503  14  not available
    """)

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("CUDO has no second machine of one id")

    async def test_machines_boot_the_newest_image_with_a_driver_or_that_of_the_setting(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        for name, table in (("one", {}), ("two", {"image": "debian-12"})):
            provider = account.provider("ours", **table)
            gang = await harness.spec(name)
            await provider.launch(gang)
            await provider.remove(gang.name)
        images = [each["bootDiskImageId"] for each in account.api.asked]
        assert images == ["ubuntu-2404-nvidia-550-docker-v20250301", "debian-12"]

    def test_an_account_with_several_projects_must_name_one(self, account: RestPlace) -> None:
        account.api.projects.append("another")
        with pytest.raises(Refused, match="project: the account has 2 projects; set the id"):
            asyncio.run(account.provider("ours").gangs())
        assert asyncio.run(account.provider("ours", project="my-project").gangs()) == []


def test_a_machine_in_the_form_of_cudos_reference_is_read() -> None:
    """The fields of https://www.cudocompute.com/docs/api/virtual-machines/get-a-virtual-machine."""
    told = {
        "id": "cv-one",
        "createTime": "2023-11-07T05:31:56Z",
        "datacenterId": "no-luster-1",
        "externalIpAddress": "192.0.2.4",
        "internalIpAddress": "10.0.0.1",
        "metadata": {},
        "nics": [{"externalIpAddress": "192.0.2.4", "internalIpAddress": "10.0.0.1"}],
        "state": "ACTIVE",
    }
    assert _read(told) == CloudMachine(
        id="cv-one",
        name="cv-one",
        state=MachineState.RUNNING,
        address="10.0.0.1",
        ssh=SshTarget(address="192.0.2.4"),
        created_at=datetime(2023, 11, 7, 5, 31, 56, tzinfo=UTC),
    )
