"""Node pools without nodes are offered, and their gangs wait for the autoscaler."""

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.providers.kubernetes.unit.test_kubernetes_calls import (
    PODS,
    Server,
    make_provider,
    make_server,
)
from tests.providers.kubernetes.unit.test_kubernetes_reading import NOW, make_node, make_pod_seen
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, NoCapacity, QuotaTooSmall, Refused
from cavvy.providers.kubernetes.cluster import KubernetesNode
from cavvy.providers.kubernetes.node_pools import (
    COMPUTE_CLASSES,
    KARPENTER,
    MACHINES,
    make_nodes,
    read_declared,
    read_templates,
)
from cavvy.providers.kubernetes.pods import INSTALLATION
from cavvy.providers.kubernetes.status import PodGangRecord, why_hopeless

Object = dict[str, Any]
RECORDS = "/api/v1/namespaces/default/configmaps"


def make_machine(provider: str, instance: str, accelerator: str | None, count: int) -> Offer:
    return Offer(
        provider=provider,
        region="r",
        instance_type=instance,
        accelerator=accelerator,
        accelerator_count=count,
        vcpus=192,
        memory_mib=2097152,
        rate=HourlyRate(1),
    )


MACHINE_TYPES = {
    ("aws", "p5.48xlarge"): make_machine("aws", "p5.48xlarge", "H100", 8),
    ("aws", "trn1.32xlarge"): make_machine("aws", "trn1.32xlarge", "Trainium", 16),
    ("gcp", "a3-highgpu-8g"): make_machine("gcp", "a3-highgpu-8g", "H100", 8),
    ("azure", "Standard_E2"): make_machine("azure", "Standard_E2", None, 0),
}


def find(provider: str, instance: str) -> Offer | None:
    return MACHINE_TYPES.get((provider, instance))


def make_karpenter(requirements: dict[str, list[str]], group: str = "karpenter.k8s.aws") -> Object:
    wanted = [
        {"key": key, "operator": "In", "values": values} for key, values in requirements.items()
    ]
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    spec = {"requirements": wanted, "nodeClassRef": {"group": group}, "taints": [taint]}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": spec}
    return {"metadata": {"name": "gold"}, "spec": {"template": template}}


INSTANCE, CAPACITY = "node.kubernetes.io/instance-type", "karpenter.sh/capacity-type"
CLASS = {
    "metadata": {"name": "fast"},
    "spec": {"priorities": [{"machineType": "a3-highgpu-8g", "spot": True}, {"gpu": {}}]},
}
SCALES = "capacity.cluster-autoscaler.kubernetes.io"
MACHINE_DEPLOYMENT = {
    "metadata": {
        "name": "workers",
        "annotations": {
            f"{SCALES}/cpu": "64",
            f"{SCALES}/memory": "512Gi",
            f"{SCALES}/gpu-type": "nvidia.com/gpu",
            f"{SCALES}/gpu-count": "4",
            f"{SCALES}/labels": "gpu.type=a100,zone=b",
            f"{SCALES}/taints": "nvidia.com/gpu=x:NoSchedule",
        },
    }
}


def see(node: KubernetesNode) -> tuple[str, str, int, bool, tuple[str, str]]:
    return (
        node.resource,
        node.product,
        node.shape.gpus,
        node.spot,
        (node.label, node.label_value),
    )


@pytest.mark.parametrize(
    ("source", "item", "expected"),
    [
        (
            KARPENTER,
            make_karpenter({INSTANCE: ["p5.48xlarge", "x"], CAPACITY: ["spot", "on-demand"]}),
            [
                ("nvidia.com/gpu", "H100", 8, spot, (INSTANCE, "p5.48xlarge"))
                for spot in (True, False)
            ],
        ),
        (
            KARPENTER,
            make_karpenter(
                {
                    "karpenter.k8s.aws/instance-family": ["trn1"],
                    "karpenter.k8s.aws/instance-size": ["32xlarge"],
                }
            ),
            [("aws.amazon.com/neuron", "Trainium", 16, False, (INSTANCE, "trn1.32xlarge"))],
        ),
        (
            KARPENTER,
            make_karpenter({INSTANCE: ["Standard_E2"]}, "karpenter.azure.com"),
            [],  # the pool's taint keeps pods without GPUs away
        ),
        (
            COMPUTE_CLASSES,
            CLASS,
            [("nvidia.com/gpu", "H100", 8, True, ("cloud.google.com/compute-class", "fast"))],
        ),
        (
            MACHINES[0],
            MACHINE_DEPLOYMENT,
            [("nvidia.com/gpu", "a100", 4, False, ("gpu.type", "a100"))],
        ),
        (MACHINES[0], {"metadata": {"name": "plain"}}, []),
    ],
)
def test_pools_of_autoscalers_are_read(source: str, item: Object, expected: object) -> None:
    nodes = make_nodes(read_templates(source, item, find), {}, ())
    assert [see(node) for node in nodes if not node.why_not] == expected
    assert all(node.pool == item["metadata"]["name"] for node in nodes)


def test_pools_are_declared_by_a_node_or_by_an_instance_type(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    node = {"kind": "Node", **make_node("old", {"nvidia.com/gpu": "2"}, {"gpu.type": "t4"})}
    short = {"name": "big", "cloud": "gcp", "instance": "a3-highgpu-8g", "spot": True}
    file.write_text(yaml.safe_dump_all([node, [short]]))
    first, second = make_nodes(read_declared(str(file), find), {}, ())
    assert see(first) == ("nvidia.com/gpu", "t4", 2, False, ("gpu.type", "t4"))
    rule = ("cloud.google.com/gke-nodepool", "big")
    assert see(second) == ("nvidia.com/gpu", "H100", 8, True, rule)
    for wrong in ("{name: a}", "[", "{name: a, cloud: gcp, instance: none}"):
        file.write_text(wrong)
        with pytest.raises(Refused, match="pools"):
            read_declared(str(file), find)


def in_cluster(tmp_path: Path, check: Callable[[Server, Any], Any]) -> None:
    """Run a check against a cluster with a pool of p5.48xlarge and no node."""
    server = make_server()
    server.answers["GET", "/api/v1/nodes"] = 200, {"items": []}
    pool = make_karpenter({INSTANCE: ["p5.48xlarge"]})
    server.answers["GET", f"/apis/{KARPENTER}"] = 200, {"items": [pool]}

    async def scenario() -> None:
        async with server.serving():
            provider = make_provider(tmp_path, server.port)
            provider._context = replace(provider._context, find_instance=find)
            await check(server, provider)
            await provider.close()

    asyncio.run(scenario())


def make_gang(offer: Offer) -> GangSpec:
    return make_gang_spec(offer, name="g", nodes=2)


def keep_record(server: Server, provider: Any) -> None:
    """Let the stand-in accept a gang's record and secret."""
    metadata = {"name": "g", "uid": "u", "labels": {INSTALLATION: provider.mark}}
    record = {"metadata": metadata, "data": {"nodes": "2", "asked_at": NOW.isoformat()}}
    server.answers["POST", RECORDS] = 201, record
    server.answers["GET", RECORDS + "/g"] = 200, record
    server.answers["POST", RECORDS.replace("configmaps", "secrets")] = 201, {}


@pytest.mark.parametrize(
    ("said", "kind", "named"),
    [
        (
            "exceeded quota: few, requested: pods=1, used: pods=2, limited: pods=2",
            NoCapacity,
            "ResourceQuota few: ",
        ),
        (
            "exceeded quota: few, requested: limits.cpu=9, used: limits.cpu=0, limited: "
            "limits.cpu=2",
            QuotaTooSmall,
            "ResourceQuota few: ",
        ),
        (
            "maximum memory usage per Container is 1Gi, but limit is 4Gi",
            QuotaTooSmall,
            "LimitRange small: ",
        ),
    ],
)
def test_the_quota_that_refuses_a_pod_is_named(
    tmp_path: Path, said: str, kind: type[Exception], named: str
) -> None:
    async def check(server: Server, provider: Any) -> None:
        keep_record(server, provider)
        refusal = {"reason": "Forbidden", "message": f'pods "g-0" is forbidden: {said}'}
        server.answers["POST", PODS] = 403, refusal
        ranges = {"items": [{"metadata": {"name": "small"}}]}
        server.answers["GET", "/api/v1/namespaces/default/limitranges"] = 200, ranges
        offer = max(await provider.offers(), key=lambda each: each.accelerator_count)
        with pytest.raises(kind, match=named):
            await provider.launch(make_gang(offer))

    in_cluster(tmp_path, check)


def test_a_gang_starts_on_a_pool_without_nodes(tmp_path: Path) -> None:
    async def check(server: Server, provider: Any) -> None:
        offer = max(await provider.offers(), key=lambda each: each.accelerator_count)
        assert (offer.accelerator, offer.accelerator_count, offer.capacity) == ("H100", 8, None)
        assert "pool gold adds nodes" in offer.source
        keep_record(server, provider)
        gang = make_gang(offer)
        await provider.launch(gang)
        assert json.loads(server.sent[RECORDS])["data"].get("pool") == "gold"
        rule = {"key": INSTANCE, "operator": "In", "values": ["p5.48xlarge"]}
        assert (
            rule
            in json.loads(server.sent[PODS])["spec"]["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]["nodeSelectorTerms"][0]["matchExpressions"]
        )
        other = replace(gang, offer=replace(offer, accelerator_count=9))
        with pytest.raises(NoCapacity):
            await provider.launch(other)

    in_cluster(tmp_path, check)


def test_a_gang_waits_for_its_pool_but_not_for_ever() -> None:
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/0 nodes",
        "lastTransitionTime": "2026-05-01T11:50:00Z",
    }
    pod = make_pod_seen("Pending", {}, conditions=[unplaced])
    for waited, ends in ((10, False), (25, True)):
        asked_at = NOW - timedelta(minutes=waited)
        record = PodGangRecord(name="g", uid="r", nodes=1, asked_at=asked_at, pool="gold")
        assert bool(why_hopeless([pod], NOW, waits=record.waits_at(NOW))) is ends
