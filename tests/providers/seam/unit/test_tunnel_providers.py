"""At which providers a task with `encrypt: true` can run."""

from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.base import Feature
from cavvy.providers.kubernetes.options import object_to_tunnel
from cavvy.providers.registry import manifests
from cavvy.spec.support import refusals

TASK = TaskSpec(name="t", run="true", nodes=2, encrypt=True)
# containers without CAP_NET_ADMIN, and jobs of ordinary users
REFUSES = {
    *("aws-batch", "azure-batch", "azureml", "ecs", "pbs", "runpod", "sagemaker", "slurm"),
    "vertex",
}
ONE_NODE = {
    "jarvislabs",
    "vast",
    "azureml-endpoints",
    "azureml-notebooks",
    "sagemaker-endpoints",
    "sagemaker-notebooks",
    "vertex-endpoints",
    "vertex-workbench",
}
ACCEPTS = {
    *("aws", "azure", "crusoe", "cudo", "digitalocean", "fake", "gcp", "hyperstack", "ibm", "join"),
    *("kubernetes", "lambda", "local", "nebius", "oci", "paperspace", "primeintellect", "ray"),
    *("shadeform", "ssh", "tpu", "verda", "vultr", *ONE_NODE),
}


def test_the_table_of_the_guide() -> None:
    """A provider that the table does not name states by itself what it lacks."""
    found = {each.name for each in manifests() if Feature.TUNNEL in each.unsupported}
    assert found & (ACCEPTS | REFUSES) == REFUSES
    for each in manifests():
        lacks = {str(feature): reason for feature, reason in each.unsupported.items()}
        objections = refusals(TASK, lacks)
        told = [every for every in objections if every.field == "encrypt"]
        assert bool(told) is (each.name in found), each.name
        alone = each.only_sessions or any(every.field == "nodes" for every in objections)
        assert each.name not in ACCEPTS | REFUSES or alone is (each.name in ONE_NODE), each.name


def test_pods_need_a_right_that_the_task_or_the_settings_add() -> None:
    refused = object_to_tunnel(TASK, None)
    assert refused is not None
    assert "NET_ADMIN" in refused.reason
    assert object_to_tunnel(TASK, {"spec": {}}) is None
    assert object_to_tunnel(replace(TASK, nodes=1), None) is None
    assert object_to_tunnel(replace(TASK, encrypt=False), None) is None


def test_only_traffic_between_nodes_needs_a_tunnel() -> None:
    lacks = {"tunnel": "why"}
    assert refusals(TASK, lacks) == [Objection("encrypt", "why")]
    assert refusals(replace(TASK, nodes=1), lacks) == []
    assert refusals(replace(TASK, encrypt=False), lacks) == []
