"""The Prime Intellect provider keeps the contract, on a stand-in that checks every request against
the published description of its API.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.primeintellect_stand_in import OFFERS, PrimeIntellectStandIn
from tests.proofs import Proof

from cavvy.providers import primeintellect
from cavvy.providers.base import NoCapacity, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.primeintellect import PrimeIntellectCloud, _read
from cavvy.providers.vm.cloud import MachineState, SshTarget

PROOF = Proof("primeintellect", False, "a strict stand-in for Prime Intellect's API")


class TestPrimeIntellect(RestContract):
    package, traits, stand_in = (
        primeintellect,
        PrimeIntellectCloud.traits,
        PrimeIntellectStandIn,
    )
    launch_faults = read_replies("""
    NoCapacity  400  error  Hyperstack doesn't have n3-H100x1
    Refused     422  error  cloudId is invalid
    Refused     403  error  not available to this key
    TryAgain    503  error  Hyperstack doesn't have n3-H100x1
    """)

    def test_the_settings_select_clouds_images_and_the_community_cloud(
        self, account: RestPlace
    ) -> None:
        def list_types(**table: str | bool) -> set[str]:
            offers = asyncio.run(account.provider("ours", **table).offers())
            return {each.instance_type for each in offers}

        assert list_types(clouds="runpod, akash") == {"runpod.NVIDIA_H100_PCIe"}
        assert list_types(clouds="akash", community=True) == {"akash.a100"}
        assert list_types(image="another") == set()

    async def test_pods_accept_the_servers_key_which_is_stored_once(
        self, account: RestPlace
    ) -> None:
        harness, provider = account.harness(), account.provider("ours", team="crew")
        for name in ("one", "two"):
            gang = await harness.spec(name)
            await provider.launch(gang)
            await provider.remove(gang.name)
        assert [each["name"] for each in account.api.keys] == ["laptop", "cavvy"]
        assert {each["pod"]["sshKeyId"] for each in account.api.asked} == {"key-1"}
        assert {each["team"]["teamId"] for each in account.api.asked} == {"crew"}

    async def test_a_key_that_was_deleted_is_stored_again(self, account: RestPlace) -> None:
        harness, provider = account.harness(), account.provider("ours")
        first, gang = await harness.spec("one"), await harness.spec("two")
        await provider.launch(first)
        await provider.remove(first.name)
        del account.api.keys[1]
        with pytest.raises(Refused, match="no such SSH key"):
            await provider.launch(gang)
        await provider.launch(gang)
        await provider.remove(gang.name)
        assert [each["name"] for each in account.api.keys] == ["laptop", "cavvy"]

    async def test_a_configuration_that_is_gone_is_missing_capacity(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one")
        account.api.available = OFFERS[1:2]
        with pytest.raises(NoCapacity):
            await account.provider("ours").launch(gang)

    @pytest.mark.parametrize("known", [True, False])
    async def test_a_price_that_has_risen_is_missing_capacity(
        self, account: RestPlace, known: bool
    ) -> None:
        """The provider may have listed the offers again since the plan."""
        harness, provider = account.harness(), account.provider("ours")
        gang = await harness.spec("one")
        assert gang.offer.rate.micros_per_hour == 1_900_000
        await provider.offers()
        account.api.available = OFFERS[2:]
        if known:
            await provider.offers()
        with pytest.raises(NoCapacity, match=r"costs \$2\.5/h now" if known else "this price"):
            await provider.launch(gang)
        assert account.api.asked == []


@pytest.mark.parametrize(
    ("connection", "target"),
    [
        # the documented example of https://docs.primeintellect.ai/api-reference/managing-pods
        ("root@135.23.125.123 -p 22", SshTarget(address="135.23.125.123")),
        ("ubuntu@gpu.example", SshTarget(user="ubuntu", address="gpu.example")),
        (["root@135.23.125.123 -p 2201"], SshTarget(address="135.23.125.123", port=2201)),
        ([None], None),
        (None, None),
    ],
)
def test_the_ways_to_a_pod_are_read(connection: object, target: SshTarget | None) -> None:
    told = {
        "id": "my_first_pod_id",
        "name": "cv-one",
        "status": "ACTIVE",
        "createdAt": "2023-11-07T05:31:56Z",
        "sshConnection": connection,
        "ip": "135.23.125.123",
    }
    machine = _read(told)
    assert (machine.state, machine.ssh) == (MachineState.RUNNING, target)
    assert (machine.address, machine.reason) == ("135.23.125.123", "")
    assert machine.created_at == datetime(2023, 11, 7, 5, 31, 56, tzinfo=UTC)
