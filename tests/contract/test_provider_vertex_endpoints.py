"""The provider for endpoints of Vertex AI keeps the contract, on a stand-in that checks every request
and every reply against Google's discovery document.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.endpoint_place import EndpointPlace
from tests.contract.gcp_stand_in import PROJECT
from tests.contract.test_provider_vertex import STOCKOUT, read_prices
from tests.contract.vertex_endpoints_stand_in import VertexEndpointsStandIn
from tests.contract.vertex_stand_in import REGIONS
from tests.proofs import Proof

from cavvy.domain.offers import Purchase
from cavvy.domain.services import ReadinessProbe, ServiceSpec
from cavvy.domain.tasks import TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers import vertex_endpoints
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import (
    GangState,
    NotFound,
    ProviderContext,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.cloud import ManagedCloud
from cavvy.providers.objections import list_objections, refuses_all
from cavvy.providers.vertex.endpoint_calls import read_answer
from cavvy.providers.vertex.endpoints import VertexEndpoints
from cavvy.providers.vm.cloud import CloudFault

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
        self.file.write_text(self.api.make_key_file())

    def double(self) -> None:
        """Names are unique in a region: the second endpoint is in another one."""
        newest = self.cloud.billed()[-1]
        here = newest.tags["region"]
        there = next(each for each in REGIONS if each != here)
        for kept in (self.api.models, self.api.endpoints):
            kept[there, newest.name] = kept[here, newest.name]
        self.cloud.add(newest.name, {**newest.tags, "region": there})

    def close(self) -> None:
        asyncio.run(self.settle())
        super().close()


class TestVertexEndpoints(RestContract):
    package, traits, stand_in = vertex_endpoints, TRAITS, VertexEndpointsStandIn

    @pytest.fixture
    def account(self, rest_server: RestServer, tmp_path: Path) -> Iterator[RestPlace]:
        account = VertexEndpointsPlace(rest_server, tmp_path)
        yield account
        account.close()

    def test_a_wrong_key_is_refused(self, account: RestPlace) -> None:
        account.file.write_text("wrong")
        with pytest.raises(Refused, match=r"vertex-endpoints\] key_file: .* is not the key"):
            asyncio.run(account.provider("ours").offers())

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = asyncio.run(account.provider("ours").whoami())
        assert ("project", PROJECT) in facts
        assert self.stand_in.key not in str(facts)
        assert "PRIVATE KEY" not in str(facts)

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

    def test_an_endpoint_has_image_environment_and_machine(
        self, account: VertexEndpointsPlace
    ) -> None:
        async def scenario() -> None:
            harness = account.harness()
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

        asyncio.run(scenario())

    def test_a_model_is_deployed_once_google_has_made_model_and_endpoint(
        self, account: VertexEndpointsPlace
    ) -> None:
        """The launch is repeated until then; no second model is uploaded."""
        account.api.creates = timedelta(seconds=20)

        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.spec("slow")
            for _ in range(2):
                with pytest.raises(TryAgain):
                    await harness.ours.launch(gang)
                await account.wait(timedelta(seconds=21))
            assert account.billed() == 0
            harness.restart()
            await harness.ours.launch(gang)
            assert account.billed() == 1
            await account.settle()
            assert (await harness.one(gang.name)).state is GangState.RUNNING
            await harness.remove(gang.name)
            await account.settle()

        asyncio.run(scenario())
        calls = account.api.calls
        assert [calls.count(f"aiplatform.{each}") for each in ("models.upload",)] == [1]
        assert (account.api.models, account.api.endpoints) == ({}, {})

    def test_the_bill_ends_with_the_request_to_undeploy_and_everything_is_deleted(
        self, account: VertexEndpointsPlace
    ) -> None:
        async def scenario() -> None:
            harness = account.harness()
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

        asyncio.run(scenario())
        assert (account.api.models, account.api.endpoints) == ({}, {})

    @pytest.mark.parametrize(("reason", "full"), [(STOCKOUT, True), ("Model server exited", False)])
    def test_a_failed_deployment_is_deleted_and_costs_nothing(
        self, account: VertexEndpointsPlace, reason: str, full: bool
    ) -> None:
        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.spec("failed")
            await harness.launch(gang)
            ((_, name),) = account.api.endpoints
            account.api.failures[name] = reason
            await account.settle()
            seen = await harness.one(gang.name)
            assert (seen.state, seen.no_capacity) == (GangState.ENDED, full)
            assert seen.nodes[0].started_at == seen.nodes[0].ended_at
            assert reason in seen.reason

        asyncio.run(scenario())
        assert (account.api.models, account.api.endpoints) == ({}, {})

    def test_a_refused_deployment_leaves_nothing(self, account: VertexEndpointsPlace) -> None:
        account.api.quota = 0

        async def scenario() -> None:
            harness = account.harness()
            with pytest.raises(QuotaTooSmall, match="custom_model_serving"):
                await harness.ours.launch(await harness.spec("refused"))
            await account.wait(timedelta(hours=2))
            await harness.ours.gangs()

        asyncio.run(scenario())
        assert (account.api.models, account.api.endpoints) == ({}, {})

    def test_only_objects_of_this_installation_are_tidied(
        self, account: VertexEndpointsPlace
    ) -> None:
        async def scenario() -> None:
            harness = account.harness()
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

        asyncio.run(scenario())

    def test_any_body_reaches_the_container_once(self, account: VertexEndpointsPlace) -> None:
        got: list[tuple[bytes, str]] = []

        def answer(body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
            got.append((body, headers["content-type"]))
            if len(got) == 3:
                raise CloudFault(0, "no reply")
            return (200, b'{"sum": 3}') if len(got) == 1 else (503, b"no tea")

        async def scenario() -> list[ReplicaAnswer]:
            harness = account.harness()
            gang = await harness.running("called")
            provider = account.provider(gang.installation)
            account.api.container = answer
            assert await provider.answers(gang.name)
            request = ReplicaRequest(body=b"\x00\xff", headers={"content-type": "a/b", "x": "y"})
            told = [await provider.invoke(gang.name, request) for _ in range(2)]
            with pytest.raises(TryAgain):
                await provider.invoke(gang.name, request)
            ((_, name),) = account.api.endpoints
            account.api.failures[name] = "gone"
            assert not await provider.answers(gang.name)
            with pytest.raises(TryAgain):
                await provider.invoke(gang.name, request)
            with pytest.raises(NotFound):
                await provider.invoke("unknown", request)
            return told

        first, second = asyncio.run(scenario())
        assert (first.status, first.body) == (200, b'{"sum": 3}')
        assert (second.status, second.body) == (503, b"no tea")
        assert got == [(b"\x00\xff", "a/b")] * 3

    def test_what_an_endpoint_cannot_do_is_refused_with_the_page(
        self, account: VertexEndpointsPlace
    ) -> None:
        provider = account.provider("ours")
        assert refuses_all(provider) == ""
        assert list_objections(TASK, provider) == []
        bad = replace(
            TASK,
            run="python serve.py",
            inputs=(Transfer(source="gs://models/digits", target="/model"),),
            image="python:3",
            service=replace(SERVED, port=80),
        )
        found = {each.field: each.reason for each in list_objections(bad, provider)}
        assert set(found) == {"run", "inputs", "image", "service.port"}
        assert all("https://cloud.google.com/" in each for each in found.values())

    def test_only_the_calls_of_the_guide_are_made(self, account: VertexEndpointsPlace) -> None:
        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.running("all")
            request = ReplicaRequest(body=b"", headers={})
            await account.provider(gang.installation).invoke(gang.name, request)
            await harness.remove(gang.name)
            await account.wait(timedelta(hours=2))
            await harness.ours.gangs()

        asyncio.run(scenario())
        guide = (Path(__file__).parents[2] / "docs/guides/managed-endpoints.md").read_text()
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
