"""The provider for compute instances of Azure Machine Learning keeps the contract, on a stand-in that
checks every request and every reply against Azure's published API.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.azureml_description import WORKSPACE
from tests.contract.azureml_notebooks_stand_in import ComputeInstancesStandIn
from tests.contract.only_sessions import check_only_sessions
from tests.proofs import Proof
from tests.providers.azure.contract.test_provider_azure import FileCredential
from tests.records import pick_prices, words_of

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers import azureml_notebooks
from cavvy.providers.azureml.api import make_short_name
from cavvy.providers.azureml_notebooks import (
    MANIFEST,
    ComputeInstances,
    read_instance,
)
from cavvy.providers.base import GangState, ProviderContext, Refused
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.managed.provider import ManagedCloud, make_provider
from cavvy.providers.managed.service import JobState
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.provider import VmProvider

PROOF = Proof("azureml-notebooks", False, "a strict stand-in for compute instances of Azure ML")
SETTINGS = check_settings(MANIFEST, {})
CONTEXT = ProviderContext(installation="any", home=Path(), settings=SETTINGS)
TRAITS = ManagedCloud(ComputeInstances(CONTEXT)).traits
TYPES = ("Standard_DS3_v2", "Standard_DS5_v2", "Standard_NC4as_T4_v3")
CREATED = "2026-11-01T12:00:00.0000000+00:00"


read_prices = pick_prices(TYPES)


class ComputeInstancesPlace(RestPlace):
    """One workspace."""

    api: ComputeInstancesStandIn
    list_prices = staticmethod(read_prices)

    def __init__(self, server: RestServer, home: Path) -> None:
        traits = replace(TRAITS, tags=True)
        super().__init__(azureml_notebooks, traits, ComputeInstancesStandIn, server, home)

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        places = {"endpoint": self.api.url, **self.api.settings}
        context = self.make_context(installation, {**places, **table})
        service = ComputeInstances(context, lambda: FileCredential(self.file))
        made = make_provider(MANIFEST, context, lambda context: service)
        self._providers.append(made)
        return made


class TestComputeInstances(RestContract):
    package, traits, stand_in = azureml_notebooks, TRAITS, ComputeInstancesStandIn
    make_place = ComputeInstancesPlace
    has_others = False

    def test_a_second_node_of_the_same_name_is_deleted(self) -> None:
        pytest.skip("the names of compute instances are unique in a region")

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = dict(asyncio.run(account.provider("ours").whoami()))
        assert facts["workspace"] == WORKSPACE
        assert facts["sizes without a known price"] == "standard_z9"
        assert self.stand_in.key not in str(facts)

    def test_offers_are_sizes_of_compute_instances_with_the_catalogs_price(
        self, account: RestPlace
    ) -> None:
        offers = asyncio.run(account.provider("ours").offers())
        known = {
            each.instance_type: each
            for each in read_prices("azure")
            if (each.region, each.purchase) == ("eastus", "on-demand")
        }
        assert {each.instance_type for each in offers} == {TYPES[0], TYPES[2]}
        for each in offers:
            same = known[each.instance_type]
            assert (each.rate, each.source, each.as_of) == (same.rate, same.source, same.as_of)
        named = asyncio.run(account.provider("ours", sizes="standard_nc*").offers())
        assert [each.instance_type for each in named] == [TYPES[2]]

    async def test_a_notebook_starts_the_agent_and_has_the_settings(
        self, account: ComputeInstancesPlace
    ) -> None:
        table = {"user_id": "u-1", "tenant_id": "t-1", "subnet": "/net/1", "idle_stop_s": 999_999}
        harness = account.harness()
        gang = await harness.spec("shaped")
        provider = account.provider(gang.installation, **table)
        await provider.launch(gang)
        await account.settle()
        await provider.gangs()
        facts = dict(await provider.whoami())
        await provider.remove(gang.name)
        facts = facts
        ((name, body),) = account.api.bodies.items()
        inner = body["properties"]["properties"]
        assert inner["idleTimeBeforeShutdown"] == "PT4320M"  # Azure's maximum
        assert inner["subnet"] == {"id": "/net/1"}
        user = inner["personalComputeInstanceSettings"]["assignedUser"]
        assert user == {"objectId": "u-1", "tenantId": "t-1"}
        (script,) = account.api.scripts.values()
        assert script.startswith("#!/bin/sh\n")
        assert "CAVVY_CONTAINER_RANK=0" in script
        assert "/anaconda/envs/jupyter_env/bin" in script
        assert facts[f"notebook {name}"] == f"https://{name}.eastus.instances.azureml.ms/lab"

    def test_only_sessions_run_on_notebooks(self, account: RestPlace) -> None:
        check_only_sessions(account.provider("ours"))

    def test_a_workspace_that_does_not_exist_is_refused(self, account: RestPlace) -> None:
        other = account.provider("ours", workspace="other")
        with pytest.raises(
            Refused, match=r"\[providers.azureml-notebooks\] workspace: the workspace"
        ):
            asyncio.run(other.offers())

    def test_a_missing_right_is_refused_before_a_plan(self, account: RestPlace) -> None:
        account.api.fail = lambda request: (
            (CloudFault(403, "AuthorizationFailed", "computes/read"), False)
            if request.path.endswith("/computes")
            else None
        )
        with pytest.raises(Refused, match="computes/read"):
            asyncio.run(account.provider("ours").offers())

    def test_a_notebook_that_azure_stopped_is_deleted_with_the_reason(
        self, account: ComputeInstancesPlace
    ) -> None:
        async def scenario() -> str:
            harness = account.harness()
            gang = await harness.running("idle", nodes=1)
            (machine,) = account.cloud.billed()
            last = {"operationName": "Stop", "operationTrigger": "IdleShutdown"}
            account.api.changes[machine.id] = {"state": "Stopped", "lastOperation": last}
            await account.wait(timedelta(minutes=1))
            seen = await harness.one(gang.name)
            await account.settle()
            assert (await harness.one(gang.name)).state is GangState.ENDED
            return seen.reason

        assert "after its idle time" in asyncio.run(scenario())
        assert account.billed() == 0


def told(state: str, **inner: Any) -> dict[str, Any]:
    return {
        "name": "cv1",
        "tags": {"cavvy-name": "cv-1-a-b-0-1"},
        "properties": {
            "computeType": "ComputeInstance",
            "createdOn": CREATED,
            "provisioningState": "Succeeded",
            "properties": {"state": state, **inner},
        },
    }


@pytest.mark.parametrize(
    ("name", "state"),
    words_of(
        {
            JobState.WAITING: "Creating",
            JobState.RUNNING: "SettingUp UserSettingUp JobRunning",
            JobState.RECLAIMED: "Stopping UserSetupFailed",
            JobState.ENDED: "Deleting",
        }
    ),
)
def test_states_are_read(name: str, state: JobState) -> None:
    job = read_instance(told(name))
    assert job.state is state
    assert job.started_at == datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_a_size_without_capacity_lets_the_job_go_elsewhere() -> None:
    error = {"error": {"code": "SkuNotAvailable", "message": "no capacity"}}
    job = read_instance(told("CreateFailed", errors=[error]))
    assert (job.state, job.no_capacity) == (JobState.RECLAIMED, True)
    assert job.reason == "SkuNotAvailable: no capacity"


def test_names_are_short_enough_for_azure() -> None:
    name = make_short_name("cv-0123456789-a-very-long-name-of-a-gang-abcd-0-1")
    assert len(name) <= 24
    assert name == make_short_name("cv-0123456789-a-very-long-name-of-a-gang-abcd-0-1")
