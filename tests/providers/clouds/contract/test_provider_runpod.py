"""The Runpod provider keeps the contract, on a stand-in that checks every request against Runpod's
published description.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract import runpod_stand_in
from tests.contract.runpod_stand_in import RunpodStandIn
from tests.proofs import Proof

from cavvy.domain.values import replace
from cavvy.providers import runpod
from cavvy.providers.base import NoCapacity
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.runpod import RunpodCloud, _read, _read_next
from cavvy.providers.vm.cloud import (
    CloudMachine,
    MachineState,
    SshTarget,
)

PROOF = Proof("runpod", False, "a strict stand-in for Runpod's API")
# The examples of the fields of a pod in https://api.runpod.io/v2/openapi.json (November 2026).
EXAMPLE = {
    "id": "pod_abc123",
    "name": "my-training-pod",
    "status": "RUNNING",
    "actions": ["stop", "restart", "terminate"],
    "ssh": {
        "proxy": {
            "host": "ssh.runpod.io",
            "port": 22,
            "username": "7h9k2m4n6p-64411eb2",
            "command": "ssh 7h9k2m4n6p-64411eb2@ssh.runpod.io",
        },
        "direct": {
            "host": "45.23.12.1",
            "port": 43210,
            "username": "root",
            "command": "ssh root@45.23.12.1 -p 43210",
        },
    },
    "cost": 0.35,
    "globalNetworking": {
        "enabled": True,
        "ip": "10.65.1.42",
        "internalDns": "gfj8b292vyg08g.runpod.internal",
    },
    "createdAt": "2026-03-13T20:00:00Z",
    "startedAt": "2026-03-13T20:00:00Z",
}


class TestRunpod(RestContract):
    package, traits, stand_in = runpod, RunpodCloud.traits, RunpodStandIn
    launch_faults = read_replies("""
    NoCapacity  400  title  There are no longer any instances available.
    Refused     401  title  this key has no capacity for the call
    TryAgain    429  title  over capacity, try again later
    TryAgain    500  title  create pod: There are no instances currently available
    """)

    def test_offers_have_live_prices_and_unknown_gpus_are_reported(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours", regions="EU-RO-1, community", community=True)
        offers = {each.key: each for each in asyncio.run(provider.offers())}
        found = {
            (each.region, each.instance_type): each.rate.micros_per_hour
            for each in offers.values()
            if each.accelerator in ("A40", "H100")
        }
        assert found == {
            **{("EU-RO-1", f"{n}x_NVIDIA_A40"): 350_000 * n for n in (1, 2, 4, 8)},
            **{("EU-RO-1", f"{n}x_NVIDIA_H100_80GB_HBM3"): 2_690_000 * n for n in (1, 2, 4, 8)},
            **{("community", f"{n}x_NVIDIA_H100_80GB_HBM3"): 2_590_000 * n for n in (1, 2, 4, 8)},
        }
        assert {each.accelerator for each in offers.values()} == {"A40", "H100", "RTX4090"}
        some = next(each for each in offers.values() if each.accelerator_count == 4)
        assert (some.vcpus, some.memory_mib, some.disk_gib) == (16, 64 * 1024, 50)
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["unknown accelerators"] == "NVIDIA Z9000"

    def test_the_community_cloud_is_used_on_request_only(self, account: RestPlace) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        assert {each.region for each in offers} == {"EU-RO-1", "US-TX-3"}

    def test_a_gpu_of_which_none_is_free_is_no_offer(
        self, account: RestPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runpod_stand_in, "TAKEN", {"NVIDIA A40"})
        offers = asyncio.run(account.provider("ours").offers())
        assert {each.accelerator for each in offers} == {"H100", "RTX4090"}

    async def test_a_pod_gets_the_servers_key_and_the_settings(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        provider = account.provider("ours", image="me/ssh:1", cuda="", registry="reg_abc")
        gang = await harness.spec("one")
        await provider.launch(gang)
        (body,) = account.api.pods.values()
        assert body["env"]["PUBLIC_KEY"].startswith("ssh-ed25519 ")
        assert (body["image"], body["registry"]) == ("me/ssh:1", "reg_abc")
        assert (body["ports"], body["globalNetworking"]) == (["22/tcp"], False)
        assert "minCudaVersion" not in body["gpu"]
        await provider.remove(gang.name)

    async def test_a_gang_needs_a_data_center_that_connects_its_pods(
        self, account: RestPlace
    ) -> None:
        harness, provider = account.harness(), account.provider("ours")
        gang = await harness.spec("two", nodes=2)
        with pytest.raises(NoCapacity, match="US-TX-3 cannot connect to each other"):
            await provider.launch(replace(gang, offer=replace(gang.offer, region="US-TX-3")))
        await provider.launch(gang)
        await account.settle()
        (seen,) = await provider.gangs(gang.name)
        assert {node.address for node in seen.nodes} == {"10.65.1.42"}
        await provider.remove(gang.name)

    def test_the_documented_example_of_a_pod_is_read(self) -> None:
        assert _read(EXAMPLE) == CloudMachine(
            id="pod_abc123",
            name="my-training-pod",
            state=MachineState.RUNNING,
            address="10.65.1.42",
            ssh=SshTarget(address="45.23.12.1", port=43210, user="root"),
            created_at=datetime(2026, 3, 13, 20, tzinfo=UTC),
        )

    @pytest.mark.parametrize(
        ("pagination", "path"),
        [
            ({}, None),  # the published description has no pages
            ({"pagination": {"nextCursor": None, "hasNextPage": False}}, None),
            ({"pagination": {"nextCursor": "last", "hasNextPage": False}}, None),
            (
                {"pagination": {"nextCursor": "a+/=", "hasNextPage": True}},
                "/pods?limit=1000&cursor=a%2B%2F%3D",
            ),
        ],
    )
    def test_all_pages_of_pods_are_read(
        self, pagination: dict[str, object], path: str | None
    ) -> None:
        assert _read_next({"pods": [], **pagination}) == path
