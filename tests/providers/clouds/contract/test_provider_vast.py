"""The Vast.ai provider keeps the contract, on a stand-in that checks every request against
Vast.ai's published description.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import pytest
from tests.contract.vast_stand_in import EXAMPLE as OFFER
from tests.contract.vast_stand_in import VastStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers import vast
from cavvy.providers.base import GangState, NoCapacity, Provider, Refused, TryAgain
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.registry import check_settings
from cavvy.providers.vast import MANIFEST, VastCloud, _country, _read, _read_next
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    MachineState,
    SshTarget,
    read_fault,
)

PROOF = Proof("vast", False, "a strict stand-in for Vast.ai's API")
# The example of an instance in show_instances.yaml (November 2026), without the fields of its
# hardware.
EXAMPLE = {
    "id": 312,
    "actual_status": "running",
    "cur_state": "running",
    "next_state": "running",
    "intended_status": "running",
    "label": "ML Training Job 2025",
    "public_ipaddr": "192.0.2.45",
    "ssh_host": "ssh123.vast.ai",
    "ssh_port": 10600,
    "machine_dir_ssh_port": 21000,
    "start_date": 1668804745.1223178,
    "end_date": 1735689600.0,
    "ports": {
        "8888/tcp": [{"HostIp": "0.0.0.0", "HostPort": "8888"}],
        "22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "20000"}],
    },
    "is_bid": False,
}


class TestVast(RestContract):
    package, traits, stand_in = vast, VastCloud.traits, VastStandIn
    compares_requests = False
    errors = MappingProxyType({404: NoCapacity})  # somebody else has rented the machine

    def test_a_wrong_key_is_refused(self, account: RestPlace) -> None:
        """Searches need no key."""
        account.file.write_text("wrong")
        with pytest.raises(Refused, match="check the API key"):
            asyncio.run(account.provider("ours").gangs())

    def test_offers_are_the_cheapest_computers_of_each_country(self, account: RestPlace) -> None:
        provider = account.provider("ours")
        offers = {(each.instance_type, each.purchase): each for each in _offers(provider)}
        found = {key: each.rate.micros_per_hour for key, each in offers.items()}
        bid = 122_300 + 50_000  # 110 % of the lowest bid, and a disk of 50 GB
        assert found == {
            ("1x_RTX_4090_24GB", Purchase.ON_DEMAND): 450_000,
            ("2x_A100_PCIE_80GB", Purchase.ON_DEMAND): 2_050_000,
            ("2x_A100_PCIE_40GB", Purchase.ON_DEMAND): 1_050_000,
            ("1x_RTX_4090_24GB", Purchase.SPOT): bid,
            ("2x_A100_PCIE_80GB", Purchase.SPOT): bid,
            ("2x_A100_PCIE_40GB", Purchase.SPOT): bid,
        }
        some = offers["2x_A100_PCIE_80GB", Purchase.ON_DEMAND]
        assert (some.region, some.accelerator, some.accelerator_count) == ("US", "A100", 2)
        assert (some.accelerator_memory_mib, some.vcpus, some.memory_mib) == (81920, 32, 65536)
        facts = dict(asyncio.run(provider.whoami()))
        assert facts["unknown accelerators"] == "Imaginary RTX 9999"

    def test_computers_outside_of_data_centers_are_used_on_request_only(
        self, account: RestPlace
    ) -> None:
        assert {each.region for each in _offers(account.provider("ours"))} == {"US"}
        assert all(each["datacenter"] == {"eq": True} for each in account.api.searches)
        wide = account.provider("ours", community=True, regions="SE", cuda="12.4")
        assert {each.region for each in _offers(wide)} == {"SE"}
        assert account.api.searches[-1]["cuda_max_good"] == {"gte": 12.4}

    async def test_an_instance_gets_the_servers_key_and_the_settings(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        provider = account.provider("ours", image="me/gpu:1", disk_gib=80)
        gang = await harness.spec("one", purchase=Purchase.SPOT)
        (gang,) = [
            replace(gang, offer=each)
            for each in await provider.offers()
            if each.key == gang.offer.key
        ]
        await harness.launch(gang, provider)
        (body,) = account.api.bodies.values()
        assert "ssh-ed25519 " in body["onstart"]
        assert (body["image"], body["disk"], body["price"]) == ("me/gpu:1", 80, 0.1223)
        assert (body["runtype"], body["cancel_unavail"]) == ("ssh_direct", True)
        await account.settle()
        await provider.remove(gang.name)

    async def test_no_computer_is_rented_above_the_price_of_the_offer(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one", purchase=Purchase.ON_DEMAND)
        account.api.asks = [each for each in account.api.asks if each["id"] != 1000]
        with pytest.raises(NoCapacity, match="no 1x_RTX_4090_24GB in US at this price"):
            await harness.ours.launch(gang)
        assert account.billed() == 0

    async def test_an_interrupted_instance_is_deleted_and_counts_as_preempted(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("outbid", purchase=Purchase.SPOT)
        await harness.expect(GangState.RUNNING, gang)
        (machine,) = account.cloud.billed()
        account.cloud.change(machine.id, off=True)
        await account.wait(timedelta(minutes=1))
        seen = await harness.one(gang.name)  # Vast.ai would start it again
        assert (seen.state, seen.preempted) == (GangState.RUNNING, False)
        assert account.billed() == 0
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        assert seen.reason == "Vast.ai reports: stopped"

    async def test_offers_are_searched_again_after_two_minutes_or_a_request(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one", purchase=Purchase.ON_DEMAND)
        for _ in range(3):
            await harness.ours.offers()
        assert len(account.api.searches) == 2  # on demand and spot
        await account.wait(timedelta(minutes=2))
        await harness.ours.offers()
        assert len(account.api.searches) == 4
        await harness.launch(gang)  # searches once
        await harness.ours.offers()
        assert len(account.api.searches) == 7
        await harness.remove(gang.name)

    async def test_a_search_quota_that_is_used_up_does_not_stop_other_calls(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours")
        quota = CloudFault(429, "search_quota_exceeded", "daily search row quota")
        account.api.read_faults = [quota] * 3
        with pytest.raises(TryAgain, match="search_quota_exceeded"):
            await provider.offers()
        assert await provider.gangs() == []

    @pytest.mark.parametrize(
        ("status", "code", "error"),
        [
            (404, "invalid_args", NoCapacity),
            (410, "no_such_ask", NoCapacity),
            (400, "invalid_price", NoCapacity),
            (400, "invalid_args", Refused),
            (403, "invalid_args", Refused),
            (429, "too frequent", TryAgain),
            (503, "unavailable", TryAgain),
        ],
    )
    def test_only_a_computer_that_is_gone_lets_the_job_try_others(
        self, account: RestPlace, status: int, code: str, error: type[Exception]
    ) -> None:
        cloud = VastCloud(check_settings(MANIFEST, {}), account.cloud.now)
        fault = CloudFault(status, code, "message")
        assert type(read_fault(cloud, fault, "a launch", making=True)) is error
        cloud.account.close()


def _offers(provider: Provider) -> Sequence[Offer]:
    return asyncio.run(provider.offers())


def test_the_documented_example_of_an_instance_is_read() -> None:
    assert _read(EXAMPLE) == CloudMachine(
        id="312",
        name="ML Training Job 2025",
        state=MachineState.RUNNING,
        ssh=SshTarget(address="192.0.2.45", port=20000),
        created_at=datetime.fromtimestamp(1668804745.1223178, UTC),
    )


@pytest.mark.parametrize(
    ("status", "is_bid", "state", "preempted"),
    [
        (None, True, MachineState.STARTING, False),
        ("created", False, MachineState.STARTING, False),
        ("loading", False, MachineState.STARTING, False),
        ("stopped", False, MachineState.STOPPED, False),
        ("stopped", True, MachineState.STOPPED, True),
        ("exited", True, MachineState.STOPPED, False),
        ("frozen", True, MachineState.STOPPED, True),
        ("offline", True, MachineState.RUNNING, False),
        ("unknown", False, MachineState.RUNNING, False),
    ],
)
def test_the_documented_states_are_read(
    status: str | None, is_bid: bool, state: MachineState, preempted: bool
) -> None:
    told = EXAMPLE | {"actual_status": status, "is_bid": is_bid, "ports": None}
    machine = _read(told)
    assert (machine.state, machine.preempted, machine.ssh) == (state, preempted, None)


def test_the_documented_example_of_an_offer_costs_what_it_says() -> None:
    """In Vast.ai's example, the whole price is the lowest bid and the price of the disk."""
    assert OFFER["min_bid"] + OFFER["storage_total_cost"] == pytest.approx(OFFER["dph_total"])
    assert _country(OFFER) == "AT"


def test_all_pages_of_instances_are_read() -> None:
    assert _read_next({"instances": [], "next_token": None}) is None
    assert _read_next({"instances": [], "next_token": "a+/="}) == (
        "/v1/instances/?limit=25&after_token=a%2B%2F%3D"
    )
