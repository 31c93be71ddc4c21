"""The Crusoe provider keeps the contract, on a stand-in that checks the signature of every request
and compares the requests with the published description of Crusoe's API.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.crusoe_stand_in import LOCATION, CrusoeStandIn
from tests.proofs import Proof

from cavvy.domain.values import replace
from cavvy.providers import crusoe
from cavvy.providers.base import GangSpec, GangState, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.crusoe import CrusoeCloud, _read, sign
from cavvy.providers.vm.cloud import CloudMachine, MachineState, SshTarget

PROOF = Proof("crusoe", False, "a strict stand-in for Crusoe's API")


class TestCrusoe(RestContract):
    package, traits, stand_in = crusoe, CrusoeCloud.traits, CrusoeStandIn
    launch_faults = read_replies("""
    NoCapacity  400  out_of_stock  none left
    Refused     400  bad_request   invalid name
    Refused     403  forbidden     no capacity for you
    TryAgain    500  internal      no capacity
    """)

    def test_offers_have_the_prices_of_the_setting_and_the_free_machines(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours")
        found = {
            each.instance_type: (
                each.accelerator,
                each.accelerator_count,
                each.accelerator_memory_mib // 1024,
                each.rate.micros_per_hour,
                each.capacity,
            )
            for each in asyncio.run(provider.offers())
        }
        assert found == {
            "l40s-48gb.1x": ("L40S", 1, 48, 1_500_000, 16),
            "a100-80gb-sxm-ib.8x": ("A100", 8, 80, 15_600_000, 4),
        }
        assert dict(asyncio.run(provider.whoami()))["unknown accelerators"] == "Z9000"

    @pytest.mark.parametrize(
        ("prices", "told"),
        [
            ("", "set the prices of GPUs"),
            ("H100", "H100= is not a GPU"),
            ("Z9000=1", "Z9000=1 is not a GPU"),
        ],
    )
    def test_prices_must_be_set(self, account: RestPlace, prices: str, told: str) -> None:
        with pytest.raises(Refused, match=told):
            asyncio.run(account.provider("ours", prices=prices).offers())

    @pytest.mark.parametrize(
        ("kind", "image"),
        [
            ("l40s-48gb.1x", "ubuntu22.04-nvidia-pcie-docker:latest"),
            ("a100-80gb-sxm-ib.8x", "ubuntu22.04-nvidia-sxm-docker:latest"),
        ],
    )
    async def test_machines_boot_the_newest_image_for_their_gpu(
        self, account: RestPlace, kind: str, image: str
    ) -> None:
        harness, provider = account.harness(), account.provider("ours")
        gang = await harness.spec("one")
        offers = [each for each in await provider.offers() if each.instance_type == kind]
        await provider.launch(replace(gang, offer=offers[0]))
        await provider.remove(gang.name)
        (body,) = account.api.asked
        assert (body["image"], body["location"]) == (image, LOCATION)
        assert body["ssh_public_key"] == "ssh-ed25519 AAAA me"

    async def test_a_machine_needs_an_ssh_key_which_can_be_the_servers(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one")
        with pytest.raises(Refused, match="ssh_key: not set"):
            await account.provider("ours", ssh_key="").launch(gang)
        provider = account.provider("ours", ssh_key="", reach_by_ssh=True)
        gang = await harness.spec("two")
        await provider.launch(gang)
        await provider.remove(gang.name)
        (body,) = account.api.asked
        assert body["ssh_public_key"].startswith("ssh-ed25519 ")
        assert body["ssh_public_key"] in body["startup_script"]

    async def launch_what_fails_later(
        self, account: RestPlace, harness: ContractHarness
    ) -> GangSpec:
        gang = await harness.spec("late")
        await harness.ours.launch(gang)
        (lost,) = account.cloud.machines
        account.cloud.machines = []
        account.api.failed[lost.id] = "out_of_stock"
        return gang

    async def test_a_creation_that_fails_later_is_missing_capacity_without_a_bill(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await self.launch_what_fails_later(account, harness)
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)
        (node,) = seen.nodes
        assert node.started_at is None  # it was never billed

    @pytest.mark.parametrize("restarts", [True, False])
    async def test_a_creation_that_takes_long_is_not_lost(
        self, account: RestPlace, harness: ContractHarness, restarts: bool
    ) -> None:
        gang = await harness.spec("slow")
        await harness.ours.launch(gang)
        (made,) = account.cloud.machines
        account.api.pending = {made.id}
        if restarts:
            harness.restart()
        for _ in range(3):
            await account.settle()
            assert (await harness.one(gang.name)).state is GangState.STARTING
        account.api.pending = set()
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, len(account.cloud.machines)) == (GangState.RUNNING, 1)
        await harness.remove(gang.name)

    async def test_a_creation_of_an_earlier_process_that_failed_is_told(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await self.launch_what_fails_later(account, harness)
        harness.restart()
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, True)

    def test_an_account_with_several_projects_must_name_one(self, account: RestPlace) -> None:
        (project,) = account.api.projects
        account.api.projects.append("another")
        with pytest.raises(Refused, match="project: the account has 2 projects; set the id"):
            asyncio.run(account.provider("ours").gangs())
        assert asyncio.run(account.provider("ours", project=project).gangs()) == []


def test_a_signature_covers_the_sorted_query_and_the_time() -> None:
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    secret = CrusoeStandIn.key
    first = sign("id", secret, "GET", "/v1alpha5/capacities?b=2&a=1", now)
    assert first == sign("id", secret, "GET", "/v1alpha5/capacities?a=1&b=2", now)
    assert first["X-Crusoe-Timestamp"] == "2026-11-22T12:00:00+00:00"
    version, key_id, signature = first["Authorization"].removeprefix("Bearer ").split(":")
    assert (version, key_id, len(signature)) == ("1.0", "id", 43)
    assert first != sign("id", secret, "POST", "/v1alpha5/capacities?a=1&b=2", now)
    with pytest.raises(ValueError, match="URL-safe base 64"):
        sign("id", "not base 64!", "GET", "/", now)


def test_the_documented_values_of_an_instance_are_read() -> None:
    told = {
        "id": "ca39e669-47ee-456b-968d-303234fbf99f",
        "name": "my-first-vm",
        "state": "RUNNING",
        "created_at": "2021-12-03T19:58:34Z",
        "network_interfaces": [
            {
                "ips": [
                    {
                        "private_ipv4": {"address": "10.1.2.3"},
                        "public_ipv4": {"address": "121.0.0.0", "id": "x", "type": "dynamic"},
                    }
                ]
            }
        ],
    }
    assert _read(told) == CloudMachine(
        id="ca39e669-47ee-456b-968d-303234fbf99f",
        name="my-first-vm",
        state=MachineState.RUNNING,
        address="10.1.2.3",
        ssh=SshTarget(address="121.0.0.0"),
        created_at=datetime(2021, 12, 3, 19, 58, 34, tzinfo=UTC),
    )
