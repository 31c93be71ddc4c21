"""The provider for endpoints of Azure ML keeps the contract, on a stand-in that checks every request
and every reply against Azure's published API.
"""

import asyncio
import dataclasses
import json
import re
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from click.testing import CliRunner
from tests.contract.azure_public import identity_variables
from tests.contract.azureml_description import WORKSPACE
from tests.contract.azureml_endpoints_description import RIGHTS
from tests.contract.azureml_endpoints_stand_in import (
    ML_TOKEN,
    NO_ROOM,
    AzureMlEndpointsStandIn,
)
from tests.contract.endpoint_place import EndpointContract, EndpointPlace
from tests.proofs import Proof
from tests.providers.azure.contract.test_provider_azure import FileCredential, Token
from tests.records import pick_prices

from cavvy.cli.main import cli
from cavvy.domain.offers import Purchase
from cavvy.domain.services import ReadinessProbe, ServiceSpec
from cavvy.domain.tasks import TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers import azureml_endpoints
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.azureml_endpoints import (
    MANIFEST,
    AzureMlEndpoints,
    make_endpoints,
    name_fault,
    read_answer,
)
from cavvy.providers.base import (
    GangState,
    Provider,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.endpoint_provider import make_provider
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import CloudFault

PROOF = Proof("azureml-endpoints", False, "a strict stand-in for Azure ML's online endpoints")
CONTEXT = ProviderContext(installation="any", home=Path(), settings=check_settings(MANIFEST, {}))
TRAITS = ManagedCloud(AzureMlEndpoints(CONTEXT)).traits
IMAGE = "lab.azurecr.io/digits:1"
TYPES = ("Standard_DS3_v2", "Standard_DS5_v2", "Standard_NC4as_T4_v3", "Standard_D4s_v3")
SERVED = ServiceSpec(port=8080, probe=ReadinessProbe(path="/ping"))
TASK = TaskSpec(name="s", run="serve", service=SERVED, image=IMAGE)


read_prices = pick_prices(TYPES)


class ScopedCredential(FileCredential):
    """Each token opens one service alone."""

    def get_token(self, *scopes: str) -> Token:
        token = super().get_token(*scopes)
        return Token(ML_TOKEN) if scopes == ("https://ml.azure.com/.default",) else token


class AzureMlEndpointsPlace(EndpointPlace):
    """One workspace."""

    api: AzureMlEndpointsStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        traits = replace(TRAITS, tags=True)
        super().__init__(azureml_endpoints, traits, AzureMlEndpointsStandIn, server, home)
        self.table = {"image": IMAGE}

    def make(self, context: ProviderContext) -> Provider:
        return make_provider(
            MANIFEST,
            context,
            lambda each: make_endpoints(each, lambda: ScopedCredential(self.file)),
        )


class TestAzureMlEndpoints(EndpointContract):
    package, traits, stand_in = azureml_endpoints, TRAITS, AzureMlEndpointsStandIn
    make_place = AzureMlEndpointsPlace
    creates, pause = timedelta(seconds=60), timedelta(seconds=31)
    made_once = "make endpoint", "make deployment"
    quota = "Current usage/limit: 0/6"
    pages, task = "https://learn.microsoft.com/", TASK
    bad = MappingProxyType({"inputs": (Transfer(source="az://models/digits", target="/model"),)})

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("the names of endpoints are unique in a region")

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = dict(asyncio.run(account.provider("ours").whoami()))
        assert facts["workspace"] == WORKSPACE
        assert facts["sizes without a known price"] == "standard_f2s_v2"
        assert self.stand_in.key not in str(facts)

    def test_offers_are_sizes_of_endpoints_at_the_price_of_the_machine(
        self, account: RestPlace
    ) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        known = {
            each.instance_type: each
            for each in read_prices("azure")
            if (each.region, each.purchase) == ("eastus", Purchase.ON_DEMAND)
        }
        assert {each.instance_type for each in offers} == {TYPES[0], TYPES[2]}
        for each in offers:
            same = known[each.instance_type]
            assert (each.rate, each.source, each.provider) == (
                same.rate,
                same.source,
                MANIFEST.name,
            )

    async def test_an_endpoint_has_image_environment_routes_and_machine(
        self, account: AzureMlEndpointsPlace
    ) -> None:
        own = "/subscriptions/0/resourceGroups/r/providers/Microsoft.ManagedIdentity/u/serve"
        harness = account.harness()
        gang = await harness.spec("shaped")
        offers = await account.provider(gang.installation).offers()
        gpu = next(each for each in offers if each.accelerator)
        gang = replace(gang, offer=gpu, env={"LEVEL": "3", "PORT": "4711"})
        provider = account.provider(gang.installation, identity=own, start_s=605)
        await provider.launch(gang)
        ((name, kept),) = account.api.endpoints.items()
        assert re.fullmatch(r"cv[0-9a-f]{20}", name)
        assert kept.body["properties"] == {"authMode": "AADToken"}
        identity = {"type": "UserAssigned", "userAssignedIdentities": {own: {}}}
        assert kept.body["identity"] == identity
        (environment,) = account.api.environments.values()
        assert environment == {
            "image": IMAGE,
            "osType": "Linux",
            "isAnonymous": False,
            "inferenceConfig": {
                "livenessRoute": {"port": 8080, "path": "/ping"},
                "readinessRoute": {"port": 8080, "path": "/ping"},
                "scoringRoute": {"port": 8080, "path": "/invocations"},
            },
        }
        assert kept.deployment is not None
        told = kept.deployment["properties"]
        assert told["environmentVariables"] == {"LEVEL": "3"}
        assert told["instanceType"] == "Standard_NC4as_T4_v3"
        assert told["requestSettings"] == {
            "requestTimeout": "PT180S",
            "maxConcurrentRequestsPerInstance": 64,
        }
        ready, alive = told["readinessProbe"], told["livenessProbe"]
        assert (ready["failureThreshold"], ready["period"]) == (61, "PT10S")
        assert alive["initialDelay"] == "PT605S"
        await account.settle()
        await provider.remove(gang.name)

    async def test_the_bill_ends_with_the_request_to_delete(
        self, account: AzureMlEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("billed")
        began = account.cloud.billed()[0].at
        at = account.cloud.time
        await harness.ours.remove(gang.name)
        assert len(account.api.endpoints) == 1  # Azure still deletes it
        await account.settle()
        (node,) = (await harness.one(gang.name)).nodes
        assert (node.started_at, node.ended_at, node.unseen) == (began, at, False)
        assert account.api.calls.count("delete endpoint") == 1
        assert account.api.endpoints == {}

    async def test_an_endpoint_that_is_being_made_is_deleted_once_azure_allows_it(
        self, account: AzureMlEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("early")
        account.api.strict = True
        await harness.launch(gang)
        with pytest.raises(TryAgain, match="in progress"):
            await harness.ours.remove(gang.name)
        harness.restart()
        await account.settle()
        assert (await harness.one(gang.name)).state is GangState.ENDED
        assert account.api.endpoints == {}

    @pytest.mark.parametrize("full", [True, False])
    async def test_a_failed_deployment_is_deleted_and_has_azures_reason(
        self, account: AzureMlEndpointsPlace, harness: ContractHarness, full: bool
    ) -> None:
        """Azure bills it until then, unless it got no machine."""
        gang = await harness.launched("failed")
        began = account.cloud.time
        (name,) = account.api.endpoints
        account.api.failures[name] = NO_ROOM[1] if full else "The container crashed."
        if full:
            account.api.codes[name] = NO_ROOM[0]
        await account.wait(timedelta(seconds=45))
        await harness.ours.gangs()
        ended = account.cloud.time
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, full)
        (node,) = seen.nodes
        assert (node.started_at, node.ended_at) == (ended if full else began, ended)
        assert account.api.failures[name] in seen.reason
        assert account.api.endpoints == {}

    async def test_a_failed_or_taken_endpoint_is_refused_with_azures_reason(
        self, account: AzureMlEndpointsPlace
    ) -> None:
        account.api.creates = timedelta(seconds=30)
        harness = account.harness()
        gang = await harness.spec("bad")
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        (name,) = account.api.endpoints
        account.api.endpoint_failures[name] = "The limit of role assignments is reached."
        await account.wait(timedelta(seconds=30))
        with pytest.raises(Refused, match="role assignments"):
            await harness.ours.launch(gang)
        await account.settle()
        assert account.api.endpoints == {}
        account.api.taken = True
        with pytest.raises(Refused, match="needs to be unique"):
            await harness.ours.launch(gang)

    async def test_only_old_endpoints_of_this_installation_are_tidied(
        self, account: AzureMlEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("kept")
        ((name, kept),) = account.api.endpoints.items()
        empty = dataclasses.replace(kept, deployment=None)
        tags = {"cavvy-name": "cv-0-other-1-0-1"}
        other = dataclasses.replace(empty, body={**kept.body, "tags": tags})
        account.api.endpoints |= {"left": empty, "other": other}
        await harness.ours.gangs()
        assert len(account.api.endpoints) == 3
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        await account.settle()
        assert set(account.api.endpoints) == {name, "other"}
        await harness.remove(gang.name)

    def test_a_workspace_that_does_not_exist_is_refused(self, account: RestPlace) -> None:
        with pytest.raises(Refused, match=r"\[providers.azureml-endpoints\] workspace: the worksp"):
            asyncio.run(account.provider("ours", workspace="other").offers())

    async def test_only_the_rights_of_the_guide_are_needed(
        self, account: AzureMlEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("all")
        request = ReplicaRequest(body=b"", headers={})
        await account.provider(gang.installation).invoke(gang.name, request)
        await harness.remove(gang.name)
        guide = (Path(__file__).parents[4] / "docs/guides/managed-endpoints.md").read_text()
        granted = set(re.findall(r"`workspaces/([\w/]+)`", guide))
        assert {RIGHTS[each] for each in account.api.calls} == granted


def test_answers_of_azure_are_told_from_answers_of_the_container() -> None:
    """https://learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-online-endpoints"""

    def told(status: int, own: str = "") -> ReplicaAnswer:
        headers = {"content-type": "a/b", "server": "x"}
        headers |= {"ms-azureml-model-error-statuscode": own} if own else {}
        return ReplicaAnswer(status=status, headers=headers, body=b"told")

    for answer, status in (
        (told(200), 200),
        (told(424, "422"), 422),
        (told(424, "503"), 503),
        (told(424, "999"), 424),
        (told(413), 413),
        (told(408), 504),
    ):
        expected = ReplicaAnswer(status=status, headers={"content-type": "a/b"}, body=b"told")
        assert read_answer(answer) == expected
    assert read_answer(told(429)).headers == {"retry-after": "1"}
    for status, kind in ((404, TryAgain), (424, TryAgain), (502, TryAgain), (401, Refused)):
        with pytest.raises(kind):
            read_answer(told(status))


def test_a_fault_of_a_deployment_is_named_by_its_text() -> None:
    text = "Cannot create a deployment in endpoint e because it is in Updating provisioning state."
    assert name_fault(CloudFault(400, "BadRequest", text)).status == 409
    full = CloudFault(400, *NO_ROOM)
    assert name_fault(full) is full
    assert AzureMlEndpoints(CONTEXT).is_full(full)
    quota = name_fault(CloudFault(400, "BadRequest", "Not enough quota available for Standard_X"))
    assert quota.code in TRAITS.quota_codes
    assert "how-to-manage-quotas" in quota.message
    other = CloudFault(400, "BadRequest", "the size is not supported")
    assert name_fault(other) is other


def test_a_comparison_of_ways_has_the_price_of_the_cheapest_endpoint(
    rest_server: RestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = AzureMlEndpointsStandIn(MemoryCloud(replace(TRAITS, tags=True)), rest_server)
    places = {**api.settings, "endpoint": api.url, "image": IMAGE}
    table = "".join(f"{name} = '{value}'\n" for name, value in places.items())
    (tmp_path / "settings.toml").write_text(f"[providers.azureml-endpoints]\n{table}")
    (tmp_path / "service.yaml").write_text(
        "{name: digits, run: serve, resources: {gpu: T4}, "
        "service: {port: 8080, probe: {path: /ping}}}"
    )
    (tmp_path / "day.csv").write_text("start_s,requests\n0,8\n600,2\n1200,0\n")
    variables = identity_variables(api.url)
    for name, value in {
        **variables,
        "CAVVY_HOME": str(tmp_path / "home"),
        "CAVVY_CONFIG": str(tmp_path / "settings.toml"),
    }.items():
        monkeypatch.setenv(name, value)
    command = ["plan", str(tmp_path / "service.yaml"), "--load", str(tmp_path / "day.csv")]
    checked = CliRunner().invoke(cli, ["check", "azureml-endpoints"]).output
    assert re.search(r"offers +3 in 1 regions", checked), checked
    told = CliRunner().invoke(cli, [*command, "-o", "json"])
    ways = {each["way"]: each for each in json.loads(told.stdout)["ways"]}
    assert ways["managed endpoint"]["usd_month"] > 0
    assert "azureml-endpoints/eastus Standard_NC4as_T4_v3" in ways["managed endpoint"]["price"]
    told = CliRunner().invoke(cli, command)
    assert "the price of azureml-endpoints was not compared with the cloud's bill" in told.output
    told = CliRunner().invoke(cli, [*command, "--managed-price", "3"])
    assert "was not compared" not in told.output
