"""The Verda provider keeps the contract, on a stand-in that checks every request."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.contract.leftovers import check_crashed_script, check_early_removal
from tests.contract.verda_stand_in import VerdaStandIn
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.domain.values import replace
from cavvy.providers import verda
from cavvy.providers.base import GangState, QuotaTooSmall, Refused, TryAgain
from cavvy.providers.contract import ContractHarness, LaunchFault
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.verda import VerdaCloud, _read
from cavvy.providers.vm.cloud import CloudMachine, MachineState, SshTarget

PROOF = Proof("verda", False, "a strict stand-in for Verda's API")


class TestVerda(RestContract):
    package, traits, stand_in = verda, VerdaCloud.traits, VerdaStandIn
    launch_faults = read_replies("""
    NoCapacity     400  invalid_request       Not enough resources available.
    QuotaTooSmall  402  insufficient_funds    Insufficient funds.
    Refused        400  invalid_request       hostname is invalid
    Refused        401  unauthorized_request  No access to resources
    Refused        403  forbidden_action      Not available to this account
    TryAgain       429  too_many_requests     Not enough resources available.
    TryAgain       503  service_unavailable   Service not available
    """)

    def test_spot_is_offered_where_verda_has_it(self, account: RestPlace) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        spot = {
            (each.instance_type, each.region): each.rate.micros_per_hour
            for each in offers
            if each.purchase is Purchase.SPOT
        }
        assert spot == {("CPU.4V.16G", "FIN-01"): 11_900, ("8H100.80S.176V", "FIN-01"): 6_410_000}

    async def test_a_spot_instance_that_verda_takes_is_preempted_and_a_deleted_one_is_not(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("spot", purchase=Purchase.SPOT)
        account.api.reclaim(account.cloud.billed()[0].id)
        seen = await harness.one(gang.name)
        assert (seen.state, seen.preempted) == (GangState.ENDED, True)
        await harness.remove(gang.name)
        other = await harness.running("other", purchase=Purchase.SPOT)
        await harness.remove(other.name)
        assert not any(each.preempted for each in await harness.ours.gangs(other.name))

    @pytest.mark.parametrize(
        ("kind", "image"),
        [
            ("CPU.4V.16G", "ubuntu-24.04"),
            ("8H100.80S.176V", "ubuntu-24.04-cuda-13.0-open-docker"),
        ],
    )
    async def test_instances_boot_the_newest_image_of_their_type_and_leave_no_script(
        self, account: RestPlace, harness: ContractHarness, kind: str, image: str
    ) -> None:
        gang = await harness.spec("typed", nodes=2)
        offers = [each for each in await harness.ours.offers() if each.instance_type == kind]
        await harness.launch(replace(gang, offer=offers[0]))
        assert len(account.api.scripts) == 2
        await harness.remove(gang.name)
        assert account.api.images == [image] * 2
        assert account.api.scripts == {}

    def test_a_refused_instance_leaves_no_script(self, account: RestPlace) -> None:
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="insufficient_funds"):
            account.launch()
        assert account.api.scripts == {}

    @pytest.mark.parametrize("fault", [LaunchFault.DROPPED, LaunchFault.LOST])
    async def test_a_repeated_request_leaves_no_script(
        self, account: RestPlace, harness: ContractHarness, fault: LaunchFault
    ) -> None:
        gang = await harness.spec("again")
        account.fail(0, fault)
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        await account.settle()
        await harness.ours.launch(gang)
        assert len(account.api.scripts) == 1
        await harness.remove(gang.name)
        assert account.api.scripts == {}

    def test_the_script_of_a_server_that_crashed_is_deleted(self, account: RestPlace) -> None:
        def add_theirs() -> None:
            account.api.scripts["theirs"] = "#!/bin/sh"
            account.api.names["theirs"] = "cv-web"

        check_crashed_script(account, add_theirs)

    def test_an_instance_that_is_provisioned_is_deleted_once_it_runs(
        self, account: RestPlace
    ) -> None:
        check_early_removal(account)

    async def test_an_access_token_is_replaced_before_it_ends(self, account: RestPlace) -> None:
        provider = account.provider("ours")
        for minutes in (0, 8, 1, 8):
            await account.wait(timedelta(minutes=minutes))
            await provider.offers()
        assert account.api.logins == 2

    async def test_a_revoked_token_is_replaced_at_once(
        self, account: RestPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("one")
        account.api.tokens.clear()
        await harness.ours.launch(gang)
        await account.settle()
        account.api.tokens.clear()
        await harness.remove(gang.name)
        assert account.api.logins == 3

    async def test_a_token_that_is_never_accepted_is_replaced_only_once(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours")
        await provider.offers()
        account.api.read_faults = [VerdaStandIn.denied] * 3
        with pytest.raises(Refused, match="Access token"):
            await provider.offers()
        assert len(account.api.read_faults) == 1
        assert account.api.logins == 2

    def test_without_a_client_id_nothing_is_asked(
        self, account: RestPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VERDA_CLIENT_ID", raising=False)
        with pytest.raises(Refused, match="client_id: no value; set client_id"):
            asyncio.run(account.provider("ours", client_id="").offers())
        assert account.api.logins == 0


def test_an_instance_in_the_form_of_verdas_package_is_read() -> None:
    told = {
        "id": "deadc0de-a5d2-4972-ae4e-d429115d055b",
        "created_at": "2026-11-02T10:00:00.000Z",
        "status": "running",
        "ip": "1.2.3.4",
        "hostname": "cv-one",
        "description": "hope you enjoy your GPU",
        "location": "FIN-01",
        "price_per_hour": 0.60,
        "instance_type": "1V100.6V",
        "image": "fastai",
        "ssh_key_ids": ["12345dc1-a5d2-4972-ae4e-d429115d055b"],
        "os_volume_id": "46fc0247-8f65-4d8a-ad73-852a8b3dc1d3",
    }
    assert _read(told) == CloudMachine(
        id="deadc0de-a5d2-4972-ae4e-d429115d055b",
        name="cv-one",
        state=MachineState.RUNNING,
        address="1.2.3.4",
        ssh=SshTarget(address="1.2.3.4"),
        created_at=datetime(2026, 11, 2, 10, tzinfo=UTC),
    )
