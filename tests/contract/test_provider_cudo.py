"""The CUDO Compute provider keeps the contract, on a stand-in that checks every request against
CUDO's own Python package and its reference.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.cudo_stand_in import CudoStandIn
from tests.proofs import Proof

from cavvy.providers import cudo
from cavvy.providers.base import NoCapacity, Refused, TryAgain
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.cudo import MANIFEST
from cavvy.providers.cudo.cloud import CudoCloud, _read
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    MachineState,
    SshTarget,
    read_fault,
)

PROOF = Proof("cudo", False, "a strict stand-in for CUDO Compute's API")


class TestCudo(RestContract):
    package, traits, stand_in = cudo, CudoCloud.traits, CudoStandIn

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("CUDO has no second machine of one id")

    def test_offers_have_the_price_of_the_whole_machine_and_fit_the_host(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours", regions="no-luster-1")
        offers = {offer.instance_type: offer for offer in asyncio.run(provider.offers())}
        found = {
            name: (each.accelerator, each.accelerator_count, each.accelerator_memory_mib // 1024)
            for name, each in offers.items()
        }
        assert found == {
            "1x8x32.epyc-milan-rtx-a6000": ("A6000", 1, 48),
            "2x16x64.epyc-milan-rtx-a6000": ("A6000", 2, 48),
            "4x32x128.epyc-milan-rtx-a6000": ("A6000", 4, 48),
            "1x8x32.cascade-lake-v100": ("V100", 1, 16),  # others have 32 GiB
            "2x16x64.cascade-lake-v100": ("V100", 2, 16),
            "4x32x128.cascade-lake-v100": ("V100", 4, 16),
            "1x12x120.sapphire-rapids-h100": ("H100", 1, 80),
            "2x24x240.sapphire-rapids-h100": ("H100", 2, 80),
            "4x48x480.sapphire-rapids-h100": ("H100", 4, 80),
            "8x96x960.sapphire-rapids-h100": ("H100", 8, 80),
        }
        one = offers["1x8x32.epyc-milan-rtx-a6000"]
        # 0.45 + 8 * 0.0025 + 32 * 0.0036 + 100 * 0.0001 + 0.0049 USD
        assert one.rate.micros_per_hour == 600_100
        assert (one.vcpus, one.memory_mib, one.disk_gib) == (8, 32 * 1024, 100)
        assert dict(asyncio.run(provider.whoami()))["unknown accelerators"] == "A100 PCIe, Z9000"

    def test_machines_boot_the_newest_image_with_a_driver_or_that_of_the_setting(
        self, account: RestPlace
    ) -> None:
        async def scenario() -> None:
            harness = account.harness()
            for name, table in (("one", {}), ("two", {"image": "debian-12"})):
                provider = account.provider("ours", **table)
                gang = await harness.spec(name)
                await provider.launch(gang)
                await provider.remove(gang.name)

        asyncio.run(scenario())
        images = [each["bootDiskImageId"] for each in account.api.asked]
        assert images == ["ubuntu-2404-nvidia-550-docker-v20250301", "debian-12"]

    def test_an_account_with_several_projects_must_name_one(self, account: RestPlace) -> None:
        account.api.projects.append("another")
        with pytest.raises(Refused, match="project: the account has 2 projects; set the id"):
            asyncio.run(account.provider("ours").gangs())
        assert asyncio.run(account.provider("ours", project="my-project").gangs()) == []

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (CloudFault(400, "9", "no host available"), NoCapacity),
            (CloudFault(400, "3", "invalid vmId"), Refused),
            (CloudFault(409, "6", "the id is taken"), TryAgain),
            (CloudFault(403, "7", "not available to this user"), Refused),
            (CloudFault(503, "14", "not available"), TryAgain),
        ],
    )
    def test_only_missing_capacity_lets_the_job_try_other_types(
        self, account: RestPlace, fault: CloudFault, error: type[Exception]
    ) -> None:
        cloud = CudoCloud(check_settings(MANIFEST, {}), account.cloud.now)
        assert type(read_fault(cloud, fault, "a launch", making=True)) is error
        cloud.account.close()


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
