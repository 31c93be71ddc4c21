"""The provider for endpoints of SageMaker keeps the contract, by real boto3 over a stand-in that
checks requests and replies against botocore's model, and the signatures of calls.
"""

import asyncio
from collections.abc import Mapping
from datetime import timedelta

import pytest
from tests.contract.aws_contract import CONTEXT, AwsContract, StagedPlace, check_times, tell
from tests.contract.endpoint_place import check_bodies
from tests.contract.sagemaker_endpoints_stand_in import FULL, EndpointsStandIn
from tests.contract.sagemaker_stand_in import IMAGE, ROLE
from tests.proofs import Proof
from tests.records import words_of

from cavvy.domain.services import ReadinessProbe, ReplicaTarget, ServiceSpec, TargetKind
from cavvy.domain.tasks import Scalar, TaskSpec, Transfer
from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaRequest
from cavvy.providers.base import (
    QuotaTooSmall,
)
from cavvy.providers.managed.endpoint_provider import EndpointProvider
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState
from cavvy.providers.objections import list_objections, refuses_all
from cavvy.providers.sagemaker_endpoints import MANIFEST, SageMakerEndpoints, SageMakerRuntime

PROOF = Proof("sagemaker-endpoints", False, "a strict stand-in for endpoints, by real boto3")
TRAITS = ManagedCloud(SageMakerEndpoints(CONTEXT)).traits
TABLE: Mapping[str, Scalar] = {"role": ROLE, "image": IMAGE}
SERVED = ServiceSpec(port=8080, probe=ReadinessProbe(path="/ping"))
TASK = TaskSpec(name="s", run="serve", service=SERVED)


class EndpointsPlace(StagedPlace):
    api: EndpointsStandIn

    def provider(self, installation: str, **table: Scalar) -> EndpointProvider:
        inner = super().provider(installation, **table)
        made = EndpointProvider(inner, SageMakerRuntime({}, self.aws), self.cloud.now)
        self.newest[installation] = made
        return made


class TestSageMakerEndpoints(AwsContract[EndpointsPlace]):
    traits, manifest, stand_in, service = TRAITS, MANIFEST, EndpointsStandIn, SageMakerEndpoints
    place_type = EndpointsPlace
    table = TABLE
    guide = "managed-endpoints"

    def test_offers_have_the_prices_of_hosting(self, account: EndpointsPlace) -> None:
        provider = account.provider("ours", regions="us-east-1")
        offers = asyncio.run(provider.offers())
        assert {(o.instance_type, o.purchase, o.rate.micros_per_hour) for o in offers} == {
            ("ml.m5.large", "on-demand", 115_000),
            ("ml.g4dn.xlarge", "on-demand", 736_400),
        }

    async def test_an_endpoint_has_image_environment_and_model(
        self, account: EndpointsPlace
    ) -> None:
        model = Transfer(source="s3://models/digits", target="/opt/ml/model")
        harness = self.harness(account)
        gang = replace(
            await harness.spec("shaped"), env={"LEVEL": "3", "PORT": "4711"}, inputs=(model,)
        )
        provider = account.provider(gang.installation, subnets="a, b", security_groups="g")
        await provider.launch(gang)
        ((region, name),) = account.api.bodies
        made = account.api.models[region, name]
        assert made["ExecutionRoleArn"] == ROLE
        assert made["PrimaryContainer"] == {
            "Image": IMAGE.replace("{region}", region),
            "Environment": {"LEVEL": "3"},
            "ModelDataSource": {
                "S3DataSource": {
                    "S3Uri": "s3://models/digits/",
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            },
        }
        assert made["VpcConfig"] == {"Subnets": ["a", "b"], "SecurityGroupIds": ["g"]}
        (variant,) = account.api.configs[region, name]["ProductionVariants"]
        assert (variant["InitialInstanceCount"], variant["InstanceType"]) == (1, "ml.m5.large")
        await account.settle()
        await provider.remove(gang.name)

    async def test_an_endpoint_is_deleted_with_its_model_once_it_is_created(
        self, account: EndpointsPlace
    ) -> None:
        """Its bill ends with the request for its deletion."""
        harness = self.harness(account)
        gang = await harness.launched("steps")
        await harness.ours.remove(gang.name)
        assert account.billed() == 1  # it is being created
        await account.settle()
        assert (account.billed(), account.api.models, account.api.configs) == (0, {}, {})
        (node,) = (await harness.one(gang.name)).nodes
        assert node.started_at is not None
        assert not node.unseen
        assert node.ended_at == node.started_at + timedelta(seconds=90)

    @pytest.mark.parametrize(("reason", "full"), [(FULL, True), ("did not pass the ping", False)])
    def test_an_endpoint_that_fails_to_start_is_deleted_and_costs_nothing(
        self, account: EndpointsPlace, reason: str, full: bool
    ) -> None:
        self.check_failed_start(account, reason, full=full)
        assert account.api.models == {}

    async def test_a_refused_endpoint_leaves_no_model(self, account: EndpointsPlace) -> None:
        harness = self.harness(account)
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="endpoint usage"):
            await harness.launch(await harness.spec("refused"))
        assert (account.api.models, account.api.configs) == ({}, {})

    async def test_models_without_an_endpoint_are_deleted_later(
        self, account: EndpointsPlace
    ) -> None:
        """Also those of a server that was killed; models of others are left alone."""
        other = {"CreationTime": 0.0}
        account.api.models["us-east-1", "cv-other"] = other
        harness = self.harness(account)
        gang = await harness.running("kept")
        ((region, name),) = account.api.bodies
        left = name.replace("-0-1", "-9-1")
        account.api.models[region, left] = dict(account.api.models[region, name])
        account.api.configs[region, left] = dict(account.api.configs[region, name])
        await account.wait(timedelta(hours=2))
        await harness.ours.gangs()
        assert set(account.api.models) == {(region, name), ("us-east-1", "cv-other")}
        assert set(account.api.configs) == {(region, name)}
        await harness.remove(gang.name)
        assert account.api.models == {("us-east-1", "cv-other"): other}

    async def test_signed_requests_reach_the_container_once(self, account: EndpointsPlace) -> None:
        gang = await self.harness(account).running("called")
        ((region, name),) = account.api.bodies

        def end() -> None:
            account.api.DeleteEndpoint(region, {"EndpointName": name})

        provider = account.newest[gang.installation]
        await check_bodies(account.api, provider, gang.name, end, status=418)

    def test_what_an_endpoint_cannot_do_is_refused_with_the_page(
        self, account: EndpointsPlace
    ) -> None:
        provider = account.provider("ours")
        assert refuses_all(provider) == ""
        assert list_objections(TASK, provider) == []
        target = ReplicaTarget(kind=TargetKind.METRIC, value=1, metric="m")
        bad = replace(
            TASK,
            run="python serve.py",
            setup="pip install x",
            secrets=("KEY",),
            inputs=(Transfer(source="data", target="/opt/ml/model"),),
            nodes=2,
            image="python:3",
            service=replace(
                SERVED,
                port=80,
                models=("m",),
                probe=ReadinessProbe(path="/"),
                replicas=replace(SERVED.replicas, target=target),
            ),
        )
        found = {each.field: each.reason for each in list_objections(bad, provider)}
        assert set(found) == {
            "run",
            "setup",
            "secrets",
            "inputs",
            "nodes",
            "image",
            "service.port",
            "service.models",
            "service.probe.path",
            "service.replicas.target",
        }
        assert all("https://docs.aws" in each for name, each in found.items() if name != "image")
        (objection,) = list_objections(TaskSpec(name="x", run="serve"), provider)
        assert "start one with `cavvy serve`" in objection.reason

    def test_a_missing_role_is_named(self, account: EndpointsPlace) -> None:
        self.check_missing(account, "role")

    async def use_all_calls(self, account: EndpointsPlace) -> None:
        harness = self.harness(account)
        gang = await harness.running("called")
        request = ReplicaRequest(body=b"", headers={})
        await account.newest[gang.installation].invoke(gang.name, request)
        await harness.remove(gang.name)
        await super().use_all_calls(account)


@pytest.mark.parametrize(
    ("status", "state"),
    words_of(
        {
            JobState.WAITING: "Creating",
            JobState.RUNNING: "InService SystemUpdating OutOfService",
            JobState.RECLAIMED: "Failed",
            JobState.ENDED: "Deleting",
        }
    ),
)
def test_states_of_endpoints_are_read(status: str, state: JobState) -> None:
    job = SageMakerEndpoints.read("us-east-1/cv-a-b-0-1", tell("Endpoint", status))
    check_times(job, status, state)
