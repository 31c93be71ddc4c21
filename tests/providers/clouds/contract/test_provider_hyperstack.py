"""The Hyperstack provider keeps the contract, on a stand-in that checks every request against
Hyperstack's published description.
"""

import asyncio
from datetime import UTC, datetime

import pytest
from tests.contract.hyperstack_stand_in import HyperstackStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.domain.values import replace
from cavvy.providers import hyperstack
from cavvy.providers.base import GangState, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.hyperstack import HyperstackCloud, _read
from cavvy.providers.vm.cloud import CloudMachine, MachineState

PROOF = Proof("hyperstack", False, "a strict stand-in for Hyperstack's API")


class TestHyperstack(RestContract):
    package, traits, stand_in = hyperstack, HyperstackCloud.traits, HyperstackStandIn
    launch_faults = read_replies("""
    NoCapacity     400  bad_request  The flavor is out of stock.
    QuotaTooSmall  400  bad_request  The quota of GPUs is exceeded.
    Refused        400  bad_request  image_name is invalid
    TryAgain       409  conflict     The name exists.
    """)

    async def test_a_machine_gets_the_environment_key_and_image_of_its_region(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("placed")
        offers = {each.instance_type: each for each in await harness.ours.offers()}
        await harness.launch(replace(gang, offer=offers["n3-H100x8-NVLink"]))
        await harness.remove(gang.name)
        (body,) = account.api.requests
        assert body["environment_name"] == "default-CANADA-1"
        assert body["key_name"] == "laptop"
        assert body["image_name"] == "Ubuntu Server 24.04 LTS R570 CUDA 12.8 with Docker"
        assert body["assign_floating_ip"] is True

    async def test_a_spot_machine_that_is_reclaimed_ends_with_its_bill(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("spot", purchase=Purchase.SPOT)
        assert account.api.requests[0]["flavor_name"] == "n3-RTX-A6000x1-spot"
        account.cloud.change(account.cloud.billed()[0].id, ended=account.cloud.time)
        await account.settle()
        seen = await harness.one(gang.name)
        assert seen.state is GangState.ENDED
        assert account.billed() == 0

    def test_the_setting_selects_environments(self, account: RestPlace) -> None:
        provider = account.provider("ours", environments="default-NORWAY-1")
        assert {each.region for each in asyncio.run(provider.offers())} == {"NORWAY-1"}

    def test_an_account_without_an_ssh_key_gets_a_hint(self, account: RestPlace) -> None:
        account.api.keys = []
        with pytest.raises(Refused, match="no environment with an SSH key; create both"):
            asyncio.run(account.provider("ours").offers())


def test_times_without_a_zone_are_in_utc_and_documented_states_are_known() -> None:
    told = {
        "id": 7,
        "name": "cv-one",
        "status": "ACTIVE",
        "fixed_ip": "10.0.0.7",
        "created_at": "2026-05-06T16:04:09Z",
    }
    machine = CloudMachine(
        id="7",
        name="cv-one",
        state=MachineState.RUNNING,
        address="10.0.0.7",
        created_at=datetime(2026, 5, 6, 16, 4, 9, tzinfo=UTC),
    )
    assert _read(told) == _read(told | {"created_at": "2026-05-06T16:04:09"}) == machine
    states = {
        "CREATING": MachineState.STARTING,
        "ERROR": MachineState.STOPPED,
        "REBOOTING": MachineState.RUNNING,
        "HIBERNATED": MachineState.STOPPED,
    }
    for status, state in states.items():
        assert _read(told | {"status": status}).state is state
