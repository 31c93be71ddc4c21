"""The provider for endpoints of Vertex AI keeps the contract, on a stand-in that checks every request
and every reply against Google's discovery document.
"""

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.contract.endpoint_place import EndpointContract, EndpointPlace
from tests.contract.gcp_stand_in import PROJECT
from tests.contract.google_contract import ServiceAccountContract
from tests.contract.vertex_endpoints_stand_in import VertexEndpointsStandIn
from tests.contract.vertex_stand_in import REGIONS
from tests.proofs import Proof
from tests.providers.gcp.contract.test_provider_vertex import STOCKOUT, read_prices

from cavvy.domain.offers import Purchase
from cavvy.domain.services import ReadinessProbe, ServiceSpec
from cavvy.domain.tasks import TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers import vertex_endpoints
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import (
    GangState,
    ProviderContext,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.vertex_endpoints import VertexEndpoints, read_answer

PROOF = Proof("vertex-endpoints", False, "a strict stand-in for Vertex AI's endpoints")
CONTEXT = ProviderContext(installation="any", home=Path())
TRAITS = ManagedCloud(VertexEndpoints(CONTEXT)).traits
IMAGE = "us-docker.pkg.dev/research-42/serve/digits:1"
SERVED = ServiceSpec(port=8080, probe=ReadinessProbe(path="/ping"))
TASK = TaskSpec(name="s", run="serve", service=SERVED, image=IMAGE)


class VertexEndpointsPlace(EndpointPlace):
    """One project, with a service account."""

    api: VertexEndpointsStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        traits = replace(TRAITS, tags=True)
        super().__init__(vertex_endpoints, traits, VertexEndpointsStandIn, server, home)
        self.table = {"regions": ", ".join(REGIONS), "image": IMAGE}

    def double(self) -> None:
        """Names are unique in a region: the second endpoint is in another one."""
        newest = self.cloud.billed()[-1]
        here = newest.tags["region"]
        there = next(each for each in REGIONS if each != here)
        for kept in (self.api.models, self.api.endpoints):
            kept[there, newest.name] = kept[here, newest.name]
        self.cloud.add(newest.name, {**newest.tags, "region": there})


class TestVertexEndpoints(ServiceAccountContract, EndpointContract):
    package, traits, stand_in = vertex_endpoints, TRAITS, VertexEndpointsStandIn
    make_place = VertexEndpointsPlace
    creates, pause = timedelta(seconds=20), timedelta(seconds=21)
    made_once = ("aiplatform.models.upload",)
    quota = "custom_model_serving"
    pages, task = "https://cloud.google.com/", TASK
    bad = MappingProxyType(
        {
            "inputs": (Transfer(source="gs://models/digits", target="/model"),),
            "image": "python:3",
        }
    )

    def test_offers_are_vertex_ais_machines_on_demand(self, account: RestPlace) -> None:
        offers = asyncio.run(account.provider("ours", regions="us-central1").offers())
        assert {each.purchase for each in offers} == {Purchase.ON_DEMAND}
        assert {each.provider for each in offers} == {"vertex-endpoints"}
        known = {
            each.instance_type: each.rate.micros_per_hour
            for each in read_prices("gcp")
            if (each.region, each.purchase) == ("us-central1", Purchase.ON_DEMAND)
        }
        assert len(offers) > 2
        for each in offers:
            price = known[each.instance_type] * 1.15
            assert abs(each.rate.micros_per_hour - price) <= 1
            assert "management fee" in each.source

    async def test_an_endpoint_has_image_environment_and_machine(
        self, account: VertexEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.spec("shaped")
        offers = await account.provider(gang.installation).offers()
        gpu = next(each for each in offers if each.instance_type == "n1-standard-8-t4x1")
        gang = replace(gang, offer=gpu, env={"LEVEL": "3", "PORT": "4711"})
        email = f"serve@{PROJECT}.iam.gserviceaccount.com"
        provider = account.provider(gang.installation, service_account=email)
        await provider.launch(gang)
        ((region, name),) = account.api.endpoints
        container = account.api.models[region, name].body["containerSpec"]
        assert container == {
            "imageUri": IMAGE,
            "args": ["serve"],
            "env": [{"name": "LEVEL", "value": "3"}],
            "ports": [{"containerPort": 8080}],
            "predictRoute": "/invocations",
            "healthRoute": "/ping",
            "deploymentTimeout": "1800s",
        }
        deployed = account.api.deployments[name]
        assert deployed["dedicatedResources"] == {
            "machineSpec": {
                "machineType": "n1-standard-8",
                "acceleratorType": "NVIDIA_TESLA_T4",
                "acceleratorCount": 1,
            },
            "minReplicaCount": 1,
            "maxReplicaCount": 1,
        }
        assert deployed["serviceAccount"] == email
        await account.settle()
        await provider.remove(gang.name)

    async def test_the_bill_ends_with_the_request_to_undeploy_and_everything_is_deleted(
        self, account: VertexEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("steps")
        (name,) = account.api.deployments
        account.api.lingers.add(name)
        at = account.cloud.time
        await harness.ours.remove(gang.name)
        await account.settle()
        harness.restart()  # the operation has the end, also for another server
        await account.settle()
        assert len(account.api.endpoints) == 1
        assert account.api.calls.count("aiplatform.endpoints.undeployModel") == 1
        account.api.lingers.clear()
        await account.settle()
        (node,) = (await harness.one(gang.name)).nodes
        assert (node.unseen, node.ended_at) == (False, at)
        assert node.started_at is not None
        assert node.started_at < at
        assert (account.api.models, account.api.endpoints) == ({}, {})

    @pytest.mark.parametrize(("reason", "full"), [(STOCKOUT, True), ("Model server exited", False)])
    async def test_a_failed_deployment_is_deleted_and_costs_nothing(
        self, account: VertexEndpointsPlace, harness: ContractHarness, reason: str, full: bool
    ) -> None:
        gang = await harness.launched("failed")
        ((_, name),) = account.api.endpoints
        account.api.failures[name] = reason
        await account.settle()
        seen = await harness.one(gang.name)
        assert (seen.state, seen.no_capacity) == (GangState.ENDED, full)
        assert seen.nodes[0].started_at == seen.nodes[0].ended_at
        assert reason in seen.reason
        assert (account.api.models, account.api.endpoints) == ({}, {})

    async def test_only_objects_of_this_installation_are_tidied(
        self, account: VertexEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("kept")
        ((region, name),) = account.api.endpoints
        left = name.replace("-0-1", "-9-1")
        other = region, "web"
        for key in ((region, left), other):
            account.api.models[key] = account.api.models[region, name]
        account.api.endpoints[region, left] = account.api.endpoints[region, name]
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        assert set(account.api.models) == {(region, name), other}
        assert set(account.api.endpoints) == {(region, name)}
        await harness.remove(gang.name)

    async def test_only_the_calls_of_the_guide_are_made(
        self, account: VertexEndpointsPlace, harness: ContractHarness
    ) -> None:
        gang = await harness.running("all")
        request = ReplicaRequest(body=b"", headers={})
        await account.provider(gang.installation).invoke(gang.name, request)
        await harness.remove(gang.name)
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        guide = (Path(__file__).parents[4] / "docs/guides/managed-endpoints.md").read_text()
        granted = set(re.findall(r"`(aiplatform\.[\w.]+)`", guide))
        assert set(account.api.calls) <= granted


def test_errors_of_google_are_told_from_answers_of_the_container() -> None:
    def told(status: int, body: bytes, **headers: str) -> ReplicaAnswer:
        return ReplicaAnswer(status=status, headers=headers, body=body)

    error = b'{"error": {"code": 1, "message": "m", "status": "s"}}'
    own = {"x-vertex-ai-deployed-model-id": "1", "content-type": "a/b"}
    assert read_answer(told(503, error, **own)).headers == {"content-type": "a/b"}
    assert read_answer(told(400, error)).body == error  # such as a body that is too large
    assert read_answer(told(429, error)).headers == {"retry-after": "1"}
    assert read_answer(told(500, b"its own")).body == b"its own"
    for status, kind in ((404, TryAgain), (503, TryAgain), (403, Refused)):
        with pytest.raises(kind):
            read_answer(told(status, error))
