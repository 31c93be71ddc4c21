"""The Paperspace provider keeps the contract, on a stand-in that checks every request."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.contract.leftovers import check_crashed_script, check_early_removal
from tests.contract.paperspace_stand_in import GPU, H100, NETWORK, OWN, PLAIN, PaperspaceStandIn
from tests.proofs import Proof
from tests.records import pick_prices, words_of

from cavvy.domain.values import replace
from cavvy.providers import paperspace
from cavvy.providers.base import QuotaTooSmall, Refused
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace, read_replies
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.paperspace import PaperspaceCloud, _read
from cavvy.providers.vm.cloud import (
    CloudMachine,
    MachineState,
    SshTarget,
)

PROOF = Proof("paperspace", False, "a strict stand-in for Paperspace's API")


read_prices = pick_prices()


class PaperspacePlace(RestPlace):
    """One team, with the catalog's prices."""

    api: PaperspaceStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(paperspace, PaperspaceCloud.traits, PaperspaceStandIn, server, home)


class TestPaperspace(RestContract):
    package, traits, stand_in = paperspace, PaperspaceCloud.traits, PaperspaceStandIn
    make_place = PaperspacePlace
    launch_faults = read_replies("""
    NoCapacity     400  BAD_REQUEST          We are currently out of capacity
    NoCapacity     400  BAD_REQUEST          This type is not available
    QuotaTooSmall  400  BAD_REQUEST          This type requires approval
    Refused        400  BAD_REQUEST          diskSize is invalid
    Refused        403  FORBIDDEN            Not available to this team
    TryAgain       429  TOO_MANY_REQUESTS    The rate limit is reached
    TryAgain       503  SERVICE_UNAVAILABLE  Not available
    """)

    def test_offers_are_the_catalogs_types_that_a_template_runs_on(
        self, account: PaperspacePlace
    ) -> None:
        offers = {
            each.instance_type: each for each in asyncio.run(account.provider("ours").offers())
        }
        assert set(offers) == {
            *("C5", "C9", "GPU+", "P4000", "P4000x2", "A4000", "V100", "A100-80G", "H100"),
            "H100x8",
        }
        assert {each.region for each in offers.values()} == {"us-ny2"}
        found = offers["H100x8"]
        assert (found.accelerator, found.accelerator_count) == ("H100", 8)
        assert found.accelerator_memory_mib == 80 * 1024
        assert found.rate.micros_per_hour == 47_600_000
        assert found.disk_gib == 93

    @pytest.mark.parametrize(
        ("kind", "template", "nvlink"),
        [("C9", PLAIN, False), ("A4000", GPU, False), ("H100x8", H100, True)],
    )
    async def test_machines_boot_the_newest_template_of_their_type_and_leave_no_script(
        self,
        account: PaperspacePlace,
        harness: ContractHarness,
        kind: str,
        template: str,
        nvlink: bool,
    ) -> None:
        gang = await harness.spec("typed", nodes=2)
        offers = [each for each in await harness.ours.offers() if each.instance_type == kind]
        await harness.launch(replace(gang, offer=offers[0]))
        assert len(account.api.scripts) == 2
        await harness.remove(gang.name)
        for body in account.api.requests:
            assert (body["machineType"], body["templateId"]) == (kind, template)
            assert body.get("enableNvlink", False) is nvlink
            assert (body["region"], body["diskSize"]) == ("ny2", 100)
        assert len(account.api.requests) == 2
        assert account.api.scripts == {}

    async def test_the_settings_name_the_template_the_network_and_the_disk(
        self, account: PaperspacePlace
    ) -> None:
        provider = account.provider("ours", template=OWN, network=NETWORK, disk_gb=101)
        offers = {each.instance_type: each for each in await provider.offers()}
        assert set(offers) == {"C5", "A4000"}
        assert offers["C5"].disk_gib == 232
        gang = await account.harness().spec("set")
        provider = account.provider(gang.installation, template=OWN, network=NETWORK, disk_gb=101)
        await provider.launch(replace(gang, offer=offers["C5"]))
        await account.settle()
        await provider.remove(gang.name)
        (body,) = account.api.requests
        assert (body["templateId"], body["networkId"], body["diskSize"]) == (OWN, NETWORK, 250)

    @pytest.mark.parametrize(
        ("table", "words"),
        [({"template": "tnone"}, "lists no template tnone"), ({"disk_gb": 2001}, "too large")],
    )
    def test_settings_that_paperspace_does_not_allow_are_refused(
        self, account: PaperspacePlace, table: dict[str, str | int], words: str
    ) -> None:
        with pytest.raises(Refused, match=words):
            asyncio.run(account.provider("ours", **table).offers())

    async def test_several_nodes_need_a_private_network(
        self, account: PaperspacePlace, harness: ContractHarness
    ) -> None:
        for nodes in (2, 1):
            gang = await harness.spec(f"size-{nodes}", nodes=nodes)
            provider = account.provider(gang.installation, network="")
            if nodes == 2:
                with pytest.raises(Refused, match="several nodes need a private network"):
                    await provider.launch(gang)
            else:
                await provider.launch(gang)
            await account.settle()
            await provider.remove(gang.name)
        (body,) = account.api.requests
        assert "networkId" not in body

    @pytest.mark.parametrize(("reach", "kind"), [(False, "none"), (True, "dynamic")])
    async def test_only_machines_that_the_server_reaches_have_a_public_address(
        self, account: PaperspacePlace, reach: bool, kind: str
    ) -> None:
        gang = await account.harness().spec("reach")
        provider = account.provider(gang.installation, reach_by_ssh=reach)
        await provider.launch(gang)
        await account.settle()
        await provider.remove(gang.name)
        assert [body["publicIpType"] for body in account.api.requests] == [kind]

    def test_a_refused_machine_leaves_no_script(self, account: PaperspacePlace) -> None:
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="limit of the team"):
            account.launch()
        assert account.api.scripts == {}

    async def test_deletions_do_not_each_list_all_scripts(
        self, account: PaperspacePlace, harness: ContractHarness
    ) -> None:
        gang = await harness.launched("many", nodes=4)
        harness.restart()
        await harness.remove(gang.name)
        assert account.api.scripts == {}
        # one for the deletions; the others are sweeps
        assert account.api.listings <= 4

    def test_the_script_of_a_machine_that_was_never_made_is_deleted(
        self, account: PaperspacePlace
    ) -> None:
        theirs = {"id": "theirs", "name": "cv-web", "assignedMachineIds": []}
        check_crashed_script(account, lambda: account.api.scripts.update(theirs=theirs))

    def test_a_machine_that_is_provisioned_is_deleted_once_it_runs(
        self, account: PaperspacePlace
    ) -> None:
        check_early_removal(account)


def test_the_region_of_every_price_of_the_catalog_is_known() -> None:
    prices = read_prices("paperspace")
    assert len(prices) == 16
    assert {each.region for each in prices} == {"us-ny2"}


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            MachineState.STARTING: "provisioning starting",
            MachineState.RUNNING: "ready stopping restarting",
            MachineState.STOPPED: "off",
        }
    ),
)
def test_a_machine_in_the_documented_form_is_read(status: str, state: MachineState) -> None:
    told = {
        "id": "ps0123456",
        "name": "cv-one",
        "state": status,
        "machineType": "A4000",
        "region": "East Coast (NY2)",
        "privateIp": "10.1.2.3",
        "publicIp": "198.51.100.7",
        "dtCreated": "2026-11-02T10:00:00.000Z",
        "dtDeleted": None,
    }
    found = _read(told)
    assert replace(found, reason="") == CloudMachine(
        id="ps0123456",
        name="cv-one",
        state=state,
        address="10.1.2.3",
        ssh=SshTarget(address="198.51.100.7"),
        created_at=datetime(2026, 11, 2, 10, tzinfo=UTC),
    )
    gone = _read({**told, "dtDeleted": "2026-11-02T11:00:00.000Z"})
    assert gone.state is MachineState.ENDED
    assert gone.ended_at == datetime(2026, 11, 2, 11, tzinfo=UTC)
