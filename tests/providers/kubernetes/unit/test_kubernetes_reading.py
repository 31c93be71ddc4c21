"""What the Kubernetes provider reads out of nodes, pods and kubeconfigs."""

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.records import make_gang_spec, make_offer

from cavvy.catalog.fit import match_offers
from cavvy.catalog.needs import parse_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    AcceleratorNeed,
    ProviderOptions,
    ResourceSpec,
    TaskSpec,
    TopologyNeed,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec, GangState, Refused
from cavvy.providers.batch.shapes import AcceleratorRates
from cavvy.providers.kubernetes.cluster import (
    ResourceAmount,
    list_offers,
    promise,
    read_nodes,
    read_quantity,
    requested,
)
from cavvy.providers.kubernetes.docker_sidecar import (
    TAKE_FOLDER,
    find_fault,
    make_docker_fields,
)
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.kubeconfig import KubeLogin, read_contexts
from cavvy.providers.kubernetes.options import read_options
from cavvy.providers.kubernetes.pods import OwnerObject, make_pod
from cavvy.providers.kubernetes.quota import limit
from cavvy.providers.kubernetes.status import (
    FoundPods,
    PodGangRecord,
    PodRank,
    look,
    take_out,
    why_hopeless,
)
from cavvy.providers.kubernetes.topology import object_to_labels

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
Object = dict[str, Any]


def make_node(
    name: str, has: dict[str, str], labels: dict[str, str] | None = None, **more: Any
) -> Object:
    has = {"cpu": "64", "memory": "512Gi", "pods": "110", **has}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": more.get("taints", [])},
        "status": {
            "capacity": {**has, **more.get("capacity", {})},
            "allocatable": has,
            "conditions": [
                {"type": "Ready", "status": more.get("ready", "True"), "reason": "KubeletStopped"}
            ],
        },
    }


def offers_of(
    *nodes: Object, pods: tuple[Object, ...] = (), price: str = "1", waits: bool = False
) -> list[Offer]:
    found = read_nodes(nodes, pods, {}, ())
    rates = {"gpu_rate": AcceleratorRates(price), "node_rate": HourlyRate(0)}
    return list(list_offers(found, region="c", zone="ns", waits=waits, **rates))  # type: ignore[arg-type]  # by name


def find(offers: list[Offer], accelerator: str | None, count: int) -> Offer:
    (found,) = [o for o in offers if (o.accelerator, o.accelerator_count) == (accelerator, count)]
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("500m", Fraction(1, 2)),
        ("16Gi", 16 * 2**30),
        ("1500M", 1_500_000_000),
        ("1e3", 1000),
        ("x", 0),
    ],
)
def test_quantities(text: str, value: object) -> None:
    assert read_quantity(text) == value


def test_offers_of_gpus_slices_and_shares() -> None:
    h100 = make_node(
        "a", {"nvidia.com/gpu": "8"}, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    )
    sliced = make_node(
        "b", {"nvidia.com/mig-1g.10gb": "7"}, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    )
    shared = make_node("c", {"nvidia.com/gpu.shared": "4"}, {"nvidia.com/gpu.product": "Tesla-T4"})
    amd = make_node("d", {"amd.com/gpu": "8"}, {"amd.com/gpu.product-name": "AMD_Instinct_MI300X"})
    offers = offers_of(h100, sliced, shared, amd, price="H100=2.5 MI300X=3 1")
    one = find(offers, "H100", 1)
    assert (one.vcpus, one.memory_mib, one.rate.usd, one.capacity) == (
        8,
        64 * 1024,
        Fraction(5, 2),
        8,
    )
    assert find(offers, "MI300X", 8).rate.usd == 24
    words = {offer.instance_type for offer in offers if offer.accelerator_count == 1}
    assert any("MIG-1g.10gb" in word for word in words)
    assert any("Tesla-T4-SHARED" in word for word in words)
    assert not any(offer.accelerator == "H100" and "MIG" in offer.instance_type for offer in offers)
    instance = find(offers, "H100-MIG-1g.10gb", 1)
    need = ResourceSpec(accelerators=parse_accelerator("H100:1g.10gb"))
    assert instance.accelerator_memory_mib == 10240
    assert {each.accelerator for each in match_offers(offers, need).offers} == {"H100-MIG-1g.10gb"}


def test_sizes_of_the_same_nodes_are_one_pool() -> None:
    both = {"nvidia.com/gpu": "8", "nvidia.com/mig-1g.10gb": "7"}
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    mixed, plain = make_node("a", both, labels), make_node("b", {"nvidia.com/gpu": "8"}, labels)
    other = make_node(
        "c", {"amd.com/gpu": "8"}, {"amd.com/gpu.product-name": "AMD_Instinct_MI300X"}
    )
    offers = [offer for offer in offers_of(mixed, plain, other) if offer.accelerator_count]
    assert {offer.pool for offer in offers if offer.accelerator != "MI300X"} == {"a"}
    assert {offer.pool for offer in offers if offer.accelerator == "MI300X"} == {"c"}


def test_what_pods_hold_is_not_free_and_spot_nodes_are_spot() -> None:
    labels = {"gpu.type": "h100", "cloud.google.com/gke-spot": "true"}
    node = make_node("a", {"nvidia.com/gpu": "8"}, labels)
    limits = {"limits": {"nvidia.com/gpu": "5", "cpu": "4"}}
    pod = {
        "metadata": {},
        "spec": {"nodeName": "a", "containers": [{"resources": limits}]},
        "status": {},
    }
    done = {**pod, "status": {"phase": "Succeeded"}}
    offers = offers_of(node, pods=(pod, done))
    assert find(offers, "H100", 3).capacity == 1
    assert find(offers, "H100", 4).capacity == 0
    assert {offer.purchase for offer in offers} == {Purchase.SPOT}


def test_nodes_that_take_no_pods_are_not_offered() -> None:
    gone = make_node("a", {}, ready="Unknown")
    tainted = make_node("b", {}, taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    assert offers_of(gone, tainted) == []
    borne = read_options({"tolerations": "team=x:NoSchedule"}).tolerations
    assert [node.why_not for node in read_nodes([gone, tainted], (), {}, borne)] == [
        "not ready: KubeletStopped",
        "",
    ]
    taint = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    assert find(
        offers_of(make_node("c", {"nvidia.com/gpu": "1"}, {"gpu.type": "h100"}, taints=taint)),
        "H100",
        1,
    )


def test_unhealthy_gpus_are_counted_and_not_offered() -> None:
    node = make_node(
        "a", {"nvidia.com/gpu": "7"}, {"gpu.type": "h100"}, capacity={"nvidia.com/gpu": "8"}
    )
    assert read_nodes([node], (), {}, ())[0].broken == 1
    assert find(offers_of(node), "H100", 8).capacity == 0


def make_pod_without_node(limits: dict[str, str], labels: dict[str, str]) -> Object:
    requests = {"cpu": "32", "memory": "1Gi", **limits}
    container = {"name": "work", "resources": {"requests": requests, "limits": limits}}
    return {
        "metadata": {"name": "p", "labels": labels},
        "spec": {"containers": [container]},
        "status": {},
    }


def test_pods_of_ours_that_have_no_node_yet_take_room() -> None:
    gpus, plain = make_node("a", {"nvidia.com/gpu": "8"}), make_node("b", {})
    ours = {"app.kubernetes.io/managed-by": "cavvy"}
    for limits, labels, left in (
        ({"nvidia.com/gpu": "6"}, ours, {"a": (2, 32), "b": (0, 64)}),
        ({}, ours, {"a": (8, 32), "b": (0, 64)}),
        ({"nvidia.com/gpu": "9"}, ours, {"a": (8, 64), "b": (0, 64)}),
        ({"nvidia.com/gpu": "6"}, {}, {"a": (8, 64), "b": (0, 64)}),
    ):
        found = read_nodes([gpus, plain], [make_pod_without_node(limits, labels)], {}, ())
        assert {node.name: (node.free.gpus, int(node.free.cpus)) for node in found} == left


def test_promised_room_is_gone_from_every_entry_of_a_node() -> None:
    both = {"nvidia.com/gpu": "4", "nvidia.com/mig-1g.10gb": "4"}
    found = promise(
        read_nodes([make_node("a", both)], [], {}, ()),
        {"nvidia.com/gpu": ResourceAmount(cpus=Fraction(24), gpus=1)},
        3,
    )
    assert {node.resource: (node.free.gpus, int(node.free.cpus)) for node in found} == {
        "nvidia.com/gpu": (2, 16),
        "nvidia.com/mig-1g.10gb": (4, 16),
    }


def test_quotas_leave_less() -> None:
    node = make_node("a", {"nvidia.com/gpu": "8"}, {"gpu.type": "h100"})
    quota = {
        "spec": {},
        "status": {
            "hard": {"requests.nvidia.com/gpu": "4"},
            "used": {"requests.nvidia.com/gpu": "2"},
        },
    }
    nodes = read_nodes([node], (), {}, ())
    capacities = [
        limit(find(offers_of(node), "H100", count), nodes, [quota]).capacity for count in (1, 2, 3)
    ]
    assert capacities == [2, 1, 0]
    quota["metadata"] = {"name": "few"}
    found = limit(find(offers_of(node), "H100", 3), nodes, [quota])
    assert found.limited_by == "ResourceQuota few (requests.nvidia.com/gpu: 2 of 4 used)"


@pytest.mark.parametrize(
    ("spec", "cpus"),
    [
        ({"containers": ["2", "1"]}, 3),
        ({"containers": ["2"], "initContainers": ["4"]}, 4),
        ({"containers": ["2"], "initContainers": [("1", "Always")]}, 3),
        ({"containers": ["2"], "initContainers": [("1", "Always"), "4"]}, 5),
        ({"containers": ["2"], "initContainers": ["4", ("1", "Always")]}, 4),
        ({"containers": ["2"], "resources": {"requests": {"cpu": "6"}}}, 6),
        ({"containers": ["2"], "overhead": {"cpu": "500m"}}, Fraction(5, 2)),
    ],
)
def test_sidecars_and_what_a_whole_pod_asks_for_are_held_too(spec: Object, cpus: Fraction) -> None:
    def make_container(given: Any) -> Object:
        amount, restarts = given if isinstance(given, tuple) else (given, None)
        return {
            "resources": {"requests": {"cpu": amount}},
            **({"restartPolicy": restarts} if restarts else {}),
        }

    lists = {
        name: [make_container(each) for each in given]
        for name, given in spec.items()
        if name.endswith("tainers")
    }
    held = requested({"metadata": {}, "spec": {**spec, **lists}}, "")
    assert (held.cpus, held.pods) == (cpus, 1)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(Refused, match="node_selector"):
        read_options({"node_selector": "pool"})
    with pytest.raises(ValueError, match="more than one"):
        AcceleratorRates("1 2")


def make_pod_seen(phase: str, state: Object, **more: Any) -> Object:
    return {
        "metadata": {
            "name": "g-0",
            "uid": "u",
            "labels": {"cavvy/rank": "0"},
            **more.get("metadata", {}),
        },
        "spec": {"nodeName": more.get("node", "n1")},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "work", "state": state}],
            "conditions": more.get("conditions", []),
            "startTime": "2026-05-01T11:50:00Z",
            **more.get("status", {}),
        },
    }


RECORD = PodGangRecord(name="g", uid="r", nodes=1, asked_at=NOW - timedelta(minutes=10))
BEGAN, OVER = "2026-05-01T11:50:05Z", "2026-05-01T11:58:00Z"


def judge(
    pod: Object | None, record: PodGangRecord = RECORD, lost: dict[str, str] | None = None
) -> Any:
    return look(record, FoundPods({"g-0": pod} if pod else {}, {}), lost or {}, NOW)


def test_a_pod_that_runs_and_one_that_ended() -> None:
    running = judge(make_pod_seen("Running", {"running": {"startedAt": BEGAN}}))
    assert running.seen.state is GangState.RUNNING
    message = json.dumps(
        {"outcome": "exit", "exit_code": 3, "reason": "the task ended with exit code 3"}
    )
    state = {
        "terminated": {"startedAt": BEGAN, "finishedAt": OVER, "exitCode": 0, "message": message}
    }
    ended = judge(make_pod_seen("Succeeded", state))
    assert (ended.end.exit_code, ended.end.reason, ended.end.preempted) == (
        3,
        "the task ended with exit code 3",
        False,
    )
    assert ended.seen.nodes[0].ended_at == datetime(2026, 5, 1, 11, 58, tzinfo=UTC)


@pytest.mark.parametrize(
    "pod",
    [
        make_pod_seen(
            "Failed",
            {},
            status={"reason": "Evicted", "message": "The node was low on resource: memory."},
        ),
        make_pod_seen(
            "Failed",
            {"terminated": {"startedAt": BEGAN, "finishedAt": OVER, "exitCode": 143}},
            conditions=[
                {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            ],
        ),
        make_pod_seen(
            "Failed",
            {"terminated": {"startedAt": BEGAN, "finishedAt": OVER, "exitCode": 143}},
            metadata={"deletionTimestamp": OVER},
        ),
        None,  # deleted while nobody looked
    ],
)
def test_what_is_taken_back_is_preempted_unless_we_removed_it(pod: Object | None) -> None:
    taken = judge(pod)
    assert taken.end.preempted
    removed = judge(
        pod,
        PodGangRecord(**{**{f: getattr(RECORD, f) for f in RECORD.__slots__}, "removing_at": NOW}),
    )
    assert (removed.end.preempted, removed.end.reason) == (False, "removed")


def test_a_lost_node_and_a_deadline_are_no_preemptions() -> None:
    running = make_pod_seen(
        "Running", {"running": {"startedAt": BEGAN}}, metadata={"deletionTimestamp": OVER}
    )
    lost = judge(running, lost={"n1": "NodeStatusUnknown"})
    assert (lost.end.preempted, lost.stuck) == (False, ("g-0",))
    assert "n1 is lost" in lost.end.reason
    late = judge(
        make_pod_seen("Failed", {}, status={"reason": "DeadlineExceeded", "message": "too long"})
    )
    assert (late.end.preempted, late.end.reason) == (
        False,
        "Kubernetes: DeadlineExceeded: too long",
    )


def test_the_grace_period_of_a_pod_that_has_ended_is_not_billed() -> None:
    """Kubernetes writes the time of the deletion plus the grace period, which is in the future."""
    later = f"{NOW + timedelta(minutes=10):%Y-%m-%dT%H:%M:%SZ}"
    running = {"running": {"startedAt": BEGAN}}
    for pod in (
        make_pod_seen("Failed", running, metadata={"deletionTimestamp": later}),
        make_pod_seen("Failed", running, metadata={"deletionTimestamp": OVER}),
        None,
    ):
        seen = PodRank(rank=0, uid="u", node="n1", started_at=NOW - timedelta(minutes=9))
        [node] = judge(pod, replace(RECORD, seen=(seen,))).seen.nodes
        assert node.unseen
        assert node.ended_at is not None
        assert node.ended_at <= NOW
    state = {"terminated": {"startedAt": BEGAN, "finishedAt": OVER, "exitCode": 137}}
    exact = make_pod_seen("Failed", state, metadata={"deletionTimestamp": later})
    [node] = judge(exact).seen.nodes
    assert (node.ended_at, node.unseen) == (datetime(2026, 5, 1, 11, 58, tzinfo=UTC), False)


def test_a_pod_that_replaces_a_lost_one_is_awaited_and_the_lost_one_is_billed_to_its_end() -> None:
    """The new pod does not exist until there is room for it; the old one has a broken GPU."""
    began = NOW - timedelta(minutes=9)
    seen = tuple(PodRank(rank=n, uid=f"u{n}", node="n1", started_at=began) for n in (0, 1))
    record = replace(RECORD, nodes=2, seen=seen)
    after = take_out(record, [seen[1]], 2)
    assert (after.pods, after.all_pods) == (["g-0", "g-1-r1"], ["g-0", "g-1-r1", "g-1"])
    assert take_out(after, [seen[1]], 2) == after
    first = make_pod_seen("Running", {"running": {"startedAt": BEGAN}})
    old = make_pod_seen("Running", {"running": {"startedAt": BEGAN}})
    waiting = look(after, FoundPods({"g-0": first, "g-1": old}, {}), {}, NOW)
    assert (waiting.end, waiting.seen.state) == (None, GangState.QUEUED)
    assert [node.rank for node in waiting.seen.nodes] == [0]
    assert [node.ended_at for node in waiting.seen.replaced] == [None]
    gone = look(after, FoundPods({"g-0": first}, {}), {}, NOW)
    assert [each.ended_at for each in gone.replaced or ()] == [NOW]
    removed = replace(after, removing_at=NOW)
    assert look(removed, FoundPods({}, {}), {}, NOW).end is not None


def test_pods_without_a_node_wait_with_their_reason_and_not_for_ever() -> None:
    why = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes: no GPU",
    }
    why["lastTransitionTime"] = "2026-05-01T11:59:00Z"
    pod = make_pod_seen("Pending", {}, node="", conditions=[why])
    seen = judge(pod).seen
    assert (seen.state, seen.reason) == (GangState.QUEUED, "Unschedulable: 0/2 nodes: no GPU")
    assert "no GPU" in why_hopeless([pod], NOW, waits=False)
    assert why_hopeless([pod], NOW, waits=True) == ""
    pull = make_pod_seen(
        "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    )
    assert judge(pull).seen.reason == "ImagePullBackOff: no such image"
    assert why_hopeless([pull], NOW, waits=True) == "ImagePullBackOff: no such image"


GATED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
    "lastTransitionTime": "2026-05-01T11:00:00Z",
}
EVICTED = {
    "type": "TerminationTarget",
    "status": "True",
    "reason": "StoppedByWorkloadEvicted",
    "message": "Preempted to accommodate a workload in the ClusterQueue",
}


def test_a_pod_that_kueue_holds_back_is_queued_for_as_long_as_it_takes() -> None:
    pod = make_pod_seen(
        "Pending", {}, node="", conditions=[GATED], status={"containerStatuses": []}
    )
    seen = judge(pod).seen
    assert (seen.state, seen.reason.partition(":")[0]) == (GangState.QUEUED, "SchedulingGated")
    assert why_hopeless([pod], NOW, waits=read_options({"queue": "gold"}).waits) == ""


def test_what_kueue_evicts_is_preempted_and_what_it_keeps_of_a_removed_gang_has_ended() -> None:
    state = {"terminated": {"startedAt": BEGAN, "finishedAt": OVER, "exitCode": 143}}
    evicted = judge(
        make_pod_seen("Failed", state, metadata={"deletionTimestamp": OVER}, conditions=[EVICTED])
    )
    assert (evicted.end.preempted, evicted.end.reason) == (
        True,
        "Kueue: Preempted to accommodate a workload in the ClusterQueue",
    )
    # Kueue's finalizer keeps a pod that was never admitted; it will never get a node.
    kept = make_pod_seen(
        "Pending", {}, node="", metadata={"deletionTimestamp": OVER}, conditions=[GATED]
    )
    assert judge(kept).end.preempted
    removed = judge(kept, replace(RECORD, removing_at=NOW))
    assert (removed.end.preempted, removed.end.reason) == (False, "removed")


@pytest.mark.parametrize("which", ["containerStatuses", "initContainerStatuses"])
def test_a_container_that_cannot_be_started_is_not_waited_for_for_ever(which: str) -> None:
    waiting = {"reason": "CreateContainerError", "message": "no runtime nvidia"}
    pod = make_pod_seen(
        "Pending", {}, status={which: [{"name": "istio-proxy", "state": {"waiting": waiting}}]}
    )
    assert why_hopeless([pod], NOW, waits=True) == "CreateContainerError: no runtime nvidia"
    assert why_hopeless([pod], NOW - timedelta(minutes=9), waits=True) == ""
    pod["status"]["containerStatuses"] = [
        {"name": "work", "state": {"running": {"startedAt": BEGAN}}}
    ]
    if which == "initContainerStatuses":  # a sidecar is started anew beside what runs
        assert why_hopeless([pod], NOW, waits=True) == ""


def make_spec(**more: Any) -> GangSpec:
    offer = make_offer(
        "kubernetes/c/ns/8xh100-64cpu-512gb",
        0,
        accelerator="H100",
        accelerator_count=2,
        vcpus=16,
        memory_mib=131072,
    )
    agent_endpoint = AgentEndpoint(address="unix:/x", token="tell-nobody")
    return make_gang_spec(
        offer,
        name="g",
        nodes=2,
        agent_endpoint=agent_endpoint,
        labels={"project": "p", "odd one": "é"},
        **more,
    )


def test_a_pod_carries_what_the_settings_say_and_no_token() -> None:
    node = read_nodes([make_node("a", {"nvidia.com/gpu": "8"}, {"gpu.type": "h100"})], (), {}, ())[
        0
    ]
    settings = {
        "queue": "gold",
        "priority_class": "low",
        "pull_secrets": "a, b",
        "runtime_class": "nvidia",
    }
    volume = Volume(kind=VolumeKind.NAMED, source="data", path="/data", read_only=True)
    spec = make_spec(longest=timedelta(hours=2), image="x:1", volumes=(volume,))
    pod = make_pod(
        spec, 1, "m", OwnerObject(name="g", uid="u"), node, read_options(settings), "agent"
    )
    labels, inside = pod["metadata"]["labels"], pod["spec"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["kueue.x-k8s.io/pod-group-name"]) == (
        "gold",
        "g",
    )
    annotations = {
        name: value for name, value in pod["metadata"]["annotations"].items() if "kueue" in name
    }
    assert annotations == {
        "kueue.x-k8s.io/pod-group-total-count": "2",
        "kueue.x-k8s.io/retriable-in-group": "false",
    }
    assert (inside["restartPolicy"], inside["priorityClassName"], inside["runtimeClassName"]) == (
        "Never",
        "low",
        "nvidia",
    )
    assert inside["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert inside["containers"][0]["image"] == "x:1"
    assert inside["containers"][0]["resources"]["limits"] == {
        "memory": "131072Mi",
        "nvidia.com/gpu": "2",
    }
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in inside["containers"][0][
        "volumeMounts"
    ]
    assert inside["activeDeadlineSeconds"] > 7200
    assert "tell-nobody" not in json.dumps(pod)


@pytest.mark.parametrize(
    ("resource", "has", "gpus", "nodes", "asked"),
    [
        ("rdma/ib", "100", 8, 2, "1"),  # CoreWeave
        ("rdma/ib", "100", 2, 2, "1"),
        ("rdma/shared_ib", "63", 8, 2, "1"),  # AKS
        ("vpc.amazonaws.com/efa", "32", 8, 2, "32"),  # EKS
        ("vpc.amazonaws.com/efa", "32", 2, 2, None),  # another pod may need them
        ("rdma/ib", "100", 8, 1, None),
        ("rdma/ib", "0", 8, 2, None),
        ("example.com/ib", "1", 8, 2, None),
    ],
)
def test_pods_of_a_gang_request_the_rdma_network(
    resource: str, has: str, gpus: int, nodes: int, asked: str | None
) -> None:
    told = make_node("a", {"nvidia.com/gpu": "8", resource: has}, {"gpu.type": "h100"})
    (node,) = read_nodes([told], (), {}, ())
    spec = make_spec()
    spec = replace(spec, nodes=nodes, offer=replace(spec.offer, accelerator_count=gpus))
    owner = OwnerObject(name="g", uid="u")
    pod = make_pod(spec, 0, "m", owner, node, read_options({}), "agent")
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"].get(resource) == resources["requests"].get(resource) == asked
    assert resources["limits"]["nvidia.com/gpu"] == str(gpus)


def test_a_task_names_fields_of_its_pods() -> None:
    node = read_nodes([make_node("a", {"nvidia.com/gpu": "8"})], (), {}, ())[0]
    container = {
        "name": "ray-node",
        "command": ["theirs"],
        "args": ["theirs"],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "env": [{"name": "A", "value": "b"}, {"name": "CAVVY_POD_RANK", "value": "9"}],
        "resources": {"limits": {"rdma/ib": 1}},
        "volumeMounts": [{"name": "fast", "mountPath": "/fast"}],
    }
    fields = {
        "metadata": {"name": "x", "labels": {"team": "a", "cavvy/gang": "x"}},
        "spec": {
            "restartPolicy": "Always",
            "hostIPC": True,
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "containers": [container, {"name": "beside", "image": "b"}],
            "volumes": [{"name": "fast", "emptyDir": {}}],
        },
    }
    owner, read = OwnerObject(name="g", uid="u"), read_options({})
    plain = make_pod(make_spec(), 1, "m", owner, node, read, "agent")
    pod = make_pod(make_spec(options={"pod": fields}), 1, "m", owner, node, read, "agent")
    assert pod["metadata"] == plain["metadata"] | {
        "labels": {"team": "a", **plain["metadata"]["labels"]}
    }
    work, beside = pod["spec"]["containers"]
    first = plain["spec"]["containers"][0]
    assert beside == {"name": "beside", "image": "b"}
    assert (work["name"], work["command"], "args" in work) == ("work", first["command"], False)
    assert work["securityContext"] == container["securityContext"]
    assert work["resources"]["limits"] == {**first["resources"]["limits"], "rdma/ib": 1}
    assert [each["name"] for each in work["env"]] == [
        *(each["name"] for each in first["env"]),
        "A",
    ]
    assert work["volumeMounts"] == [*first["volumeMounts"], container["volumeMounts"][0]]
    assert pod["spec"]["volumes"] == [*plain["spec"]["volumes"], {"name": "fast", "emptyDir": {}}]
    assert pod["spec"]["tolerations"][-1]["key"] == "spot"
    assert (pod["spec"]["hostIPC"], pod["spec"]["restartPolicy"]) == (True, "Never")


def make_placed(need: TopologyNeed, **settings: str) -> dict[str, Any]:
    node = read_nodes([make_node("a", {"nvidia.com/gpu": "8"})], (), {}, ())[0]
    spec = replace(make_spec(topology=need), nodes=4)
    owner = OwnerObject(name="g", uid="u")
    return dict(make_pod(spec, 3, "m", owner, node, read_options(settings), "agent"))


def test_a_rack_is_an_affinity_to_the_pods_of_the_gang() -> None:
    gang = {"app.kubernetes.io/managed-by": "cavvy", "cavvy/installation": "m", "cavvy/gang": "g"}
    affinity = make_placed(TopologyNeed(same="rack", prefer="zone"), topology="rack=x.com/rack")[
        "spec"
    ]["affinity"]["podAffinity"]
    assert affinity == {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "x.com/rack", "labelSelector": {"matchLabels": gang}}
        ],
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "podAffinityTerm": {
                    "topologyKey": "topology.kubernetes.io/zone",
                    "labelSelector": {"matchLabels": gang},
                },
            }
        ],
    }
    sliced = make_placed(TopologyNeed(same="nvlink", slice=2))
    assert sliced["metadata"]["labels"]["cavvy/slice"] == "1"
    (term,) = sliced["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert term == {
        "topologyKey": "nvidia.com/gpu.clique",
        "labelSelector": {"matchLabels": {**gang, "cavvy/slice": "1"}},
    }


@pytest.mark.parametrize(
    ("need", "told"),
    [
        (TopologyNeed(same="rack"), {"podset-required-topology": "rack"}),
        (TopologyNeed(prefer="rack"), {"podset-preferred-topology": "rack"}),
        (
            TopologyNeed(same="rack", slice=2),
            {
                "podset-slice-required-topology": "rack",
                "podset-slice-size": "2",
                "podset-preferred-topology": "rack",
            },
        ),
    ],
)
def test_kueue_places_the_pods_by_annotations(need: TopologyNeed, told: dict[str, str]) -> None:
    pod = make_placed(need, queue="gold")
    found = {
        name.removeprefix("kueue.x-k8s.io/"): value
        for name, value in pod["metadata"]["annotations"].items()
        if "topology" in name or "slice" in name or "index" in name
    }
    assert found == {"pod-group-pod-index-label": "cavvy/rank", **told}
    assert "podAffinity" not in pod["spec"].get("affinity", {})


def test_a_label_that_no_node_has_is_refused_with_those_that_nodes_have() -> None:
    known = {"example.com/rack", "example.com/block", "kubernetes.io/os"}
    task = TaskSpec(name="t", run="x", nodes=2, topology=TopologyNeed(same="rack"))
    assert str(object_to_labels(task, {}, known)) == (
        "topology.same: no node has the label rack; labels of places are example.com/block, "
        "example.com/rack; the setting `topology` gives labels shorter names"
    )
    assert object_to_labels(task, {"rack": "example.com/rack"}, known) is None
    assert object_to_labels(task, {}, ()) is None


@pytest.mark.parametrize("mode", ["all", "build"])
def test_docker_beside_the_work_has_its_own_container_and_socket(mode: str) -> None:
    node = read_nodes([make_node("a", {"nvidia.com/gpu": "8"})], (), {}, ())[0]
    owner, read = OwnerObject(name="g", uid="u"), read_options({})

    def make(option: object) -> dict[str, Any]:
        fields = {"spec": {"containers": [{"env": [{"name": "A", "value": "b"}]}]}}
        spec = make_spec(options={"docker": option, "pod": fields})
        return dict(make_pod(spec, 1, "m", owner, node, read, "agent")["spec"])

    pod = make(mode)
    engine, client = pod["initContainers"]
    (work,) = pod["containers"]
    assert engine["restartPolicy"] == "Always"
    socket = engine["volumeMounts"][0]
    assert socket in work["volumeMounts"]
    variables = {each["name"]: each.get("value") for each in work["env"]}
    address = variables["DOCKER_HOST" if mode == "all" else "BUILDKIT_HOST"]
    assert address.startswith(f"unix://{socket['mountPath']}/")
    assert any(address in each for each in engine["args"])
    assert variables["A"] == "b"
    paths = [each["mountPath"] for each in work["volumeMounts"]]
    assert {"/usr/local/bin/docker", "/usr/local/libexec/docker/cli-plugins"} <= set(paths)
    names = {each["name"] for each in pod["volumes"]}
    mounts = [*engine["volumeMounts"], *client["volumeMounts"], *work["volumeMounts"]]
    assert {each["name"] for each in mounts} <= names
    cached = make({"mode": mode, "cache": "claim"})
    assert {"name": "docker-data", "persistentVolumeClaim": {"claimName": "claim"}} in cached[
        "volumes"
    ]
    engine, client = cached["initContainers"]
    assert engine["volumeMounts"][1]["subPath"] == f"{mode}/p", "the same for every pod"
    assert engine["command"][2] == TAKE_FOLDER
    assert any(address in each for each in engine["args"])
    assert client["volumeMounts"][1] == socket


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_engines_share_no_folder_of_the_cache_and_use_old_ones_again(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], str]:
        engine = ["sh", "-c", 'echo "$0"; read end']
        command = ["sh", "-ec", TAKE_FOLDER, str(tmp_path), "--root", *engine]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    container = tmp_path / "0" / "containers" / "c"
    container.mkdir(parents=True)
    policy = {"Name": "always", "MaximumRetryCount": 0}
    settings = {"Binds": None, "RestartPolicy": policy, "AutoRemove": False}
    text = json.dumps(settings, separators=(",", ":"))
    (container / "hostconfig.json").write_text(text)
    first, taken = start()
    found = json.loads((container / "hostconfig.json").read_text())
    assert found == {**settings, "RestartPolicy": {**policy, "Name": "no"}}
    second, other = start()
    assert (taken, other) == (f"--root={tmp_path}/0", f"--root={tmp_path}/1")
    first.communicate("end\n")
    third, again = start()
    assert again == taken
    for process in (second, third):
        process.communicate("end\n")


@pytest.mark.parametrize(
    ("listed", "removed"), [("a\nb\n", "rm -fv a b"), ("", "ps -aq"), (None, "")]
)
def test_a_pod_starts_only_without_the_containers_of_earlier_pods(
    listed: str | None, removed: str, tmp_path: Path
) -> None:
    """None stands for an engine that does not list its containers."""
    fields = make_docker_fields({"mode": "all", "cache": "claim"}, "p")
    script = fields["spec"]["initContainers"][1]["command"][2].split("\n")
    steps = [line for line in script if not line.startswith("cp ")]
    docker, calls = tmp_path / "docker", tmp_path / "calls"
    answer = "exit 1" if listed is None else f"printf '{listed}'"
    docker.write_text(
        f'#!/bin/sh\n[ "$3" != ps ] || {{ {answer}; }}\nshift 2; echo "$*" >> {calls}\n'
    )
    docker.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["sh", "-ec", "\n".join(steps)], env=path, check=False)
    assert (ended.returncode == 0) == (listed is not None)
    assert removed == (calls.read_text().splitlines()[-1] if calls.exists() else "")


def test_an_export_has_the_pod_fields_of_settings_and_task() -> None:
    values = json.dumps({"pod": {"spec": {"priorityClassName": "high"}}})
    asked = ResourceSpec(options=(ProviderOptions(provider="kubernetes", values=values),))
    read = read_options({"pod": "{spec: {hostIPC: true}}"})
    text = make_export(TaskSpec(name="t", run="true", resources=asked), None, 1, read)
    pod = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Pod")
    assert (pod["spec"]["hostIPC"], pod["spec"]["priorityClassName"]) == (True, "high")


def test_a_volume_is_mounted_at_several_paths() -> None:
    node = read_nodes([make_node("a", {"nvidia.com/gpu": "8"})], (), {}, ())[0]
    mounts = [{"name": "fast", "mountPath": path} for path in ("/a", "/b")]
    fields = {"spec": {"containers": [{"volumeMounts": mounts}]}}
    owner, read = OwnerObject(name="g", uid="u"), read_options({})
    pod = make_pod(make_spec(options={"pod": fields}), 1, "m", owner, node, read, "agent")
    assert pod["spec"]["containers"][0]["volumeMounts"][-2:] == mounts


@pytest.mark.parametrize(
    ("option", "right"),
    [("all", True), ({"mode": "build", "cache": "c"}, True), ("none", False), ({"mode": 1}, False)],
)
def test_a_wrong_mode_of_docker_is_an_objection(option: object, right: bool) -> None:
    assert (find_fault(option) is None) is right


def test_an_export_names_what_it_leaves_out() -> None:
    text = make_export(TaskSpec(name="t", run="torchrun x", nodes=2), None, 2, read_options({}))
    assert "retry" in text.partition("apiVersion")[0]
    assert text.count("kind: Pod") == 2
    assert "value: t-0.t" in text
    queued = make_export(
        TaskSpec(name="t", run="x", nodes=2), None, 2, read_options({"queue": "gold"})
    )
    assert (
        queued.count("kueue.x-k8s.io/queue-name: gold")
        == queued.count("retriable-in-group: 'false'")
        == 2
    )


def expand(texts: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """As a kubelet does with commands and variables before anything runs."""

    def find(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", find, text) for text in texts]


def test_an_export_runs_the_work_as_cavvy_does() -> None:
    run = (
        'false\n[[ $CAVVY_PARAM_FAST = true ]] && echo "$CAVVY_HOSTS $CAVVY_PARAM_TO_GO" && exit '
        "7\n"
    )
    task = TaskSpec(
        name="t",
        setup="echo set",
        run=run,
        nodes=2,
        params={"fast": True, "to_go": 3},
        secrets=("KEY",),
    )
    text = make_export(task, None, 2, read_options({}))
    assert (
        "kubectl create secret generic t-secrets --from-literal=KEY="
        in text.partition("apiVersion")[0]
    )
    _, _, second = yaml.safe_load_all(text)
    (container,) = second["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert env["NODE_RANK"] == "1"
    done = subprocess.run(
        expand(container["command"], env), env={**os.environ, **env}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (7, "set\nt-0.t,t-1.t 3\n")
    assert "false\n" in text  # a program of several lines stays readable
    failing = make_export(
        replace(task, setup="false", run="echo ran", nodes=1), None, 1, read_options({})
    )
    (container,) = yaml.safe_load(failing)["spec"]["containers"]
    assert subprocess.run(expand(container["command"], {}), capture_output=True).stdout == b""


def test_a_kubelet_changes_nothing_of_what_is_exported() -> None:
    run = "echo $$ $(NAME) $(date $(NAME)) $$$ $$$(NAME) $( ${NAME} $"
    task = TaskSpec(name="t", run=run, env={"NAME": "n", "ODD": "a$$b$(NAME)$"})
    (container,) = yaml.safe_load(make_export(task, None, 1, read_options({})))["spec"][
        "containers"
    ]
    assert expand(container["command"], {"NAME": "n"})[-1] == f"{run}\n"
    assert "command -v bash" in expand(container["command"], {})[2]
    (odd,) = [each["value"] for each in container["env"] if each["name"] == "ODD"]
    assert expand([odd], {"NAME": "n"}) == ["a$$b$(NAME)$"]


def test_an_export_asks_for_the_accelerators_of_the_task() -> None:
    def pod_of(text: str) -> Object:
        found: Object = yaml.safe_load(text)
        return found["spec"]

    for name, resource in (
        ("Gaudi2", "habana.ai/gaudi"),
        ("Max1550", "gpu.intel.com/i915"),
        ("H100", "nvidia.com/gpu"),
        ("MI300X", "amd.com/gpu"),
    ):
        task = TaskSpec(
            name="t", run="x", resources=ResourceSpec(accelerators=(AcceleratorNeed(name=name),))
        )
        blind = make_export(task, None, 1, read_options({}))
        assert f"any {resource} is accepted; add a nodeSelector for {name}" in blind
        assert pod_of(blind)["containers"][0]["resources"]["limits"][resource] == "1"
    nodes = read_nodes(
        [make_node("a", {"nvidia.com/mig-1g.10gb": "4"}, {"gpu.type": "h100"})], (), {}, ()
    )
    offer = find(
        offers_of(make_node("a", {"nvidia.com/mig-1g.10gb": "4"}, {"gpu.type": "h100"})),
        "H100-MIG-1g.10gb",
        2,
    )
    asked = make_export(task, offer, 1, read_options({}), nodes[0])
    assert "add a nodeSelector" not in asked
    assert pod_of(asked)["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "2"
    assert "gpu.type" in json.dumps(pod_of(asked)["affinity"])


def write_config(path: Path, user: Object, **cluster: Any) -> str:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return str(path)


def test_a_plugin_is_asked_for_its_token_and_asked_again_when_that_ends(tmp_path: Path) -> None:
    script = tmp_path / "login"
    script.write_text(
        "#!/bin/sh\necho x >> $COUNT\nuntil=2026-05-01T12:10:00Z\n"
        'echo "{\\"status\\": {\\"token\\": \\"t$(wc -l < $COUNT)\\", \\"expirationTimestamp\\": '
        '\\"$until\\"}}"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    plugin = {"command": "./login", "env": [{"name": "COUNT", "value": str(tmp_path / "count")}]}
    (context,) = read_contexts(write_config(tmp_path / "config", {"exec": plugin}), [])
    assert (context.namespace, context.user) == ("ml", "u")
    clock = [NOW]

    async def scenario() -> list[str]:
        login = KubeLogin(context, tmp_path, lambda: clock[0])
        told = [(await login.proof()).headers["Authorization"] for _ in range(2)]
        clock[0] = NOW + timedelta(minutes=9, seconds=30)
        return [*told, (await login.proof()).headers["Authorization"]]

    assert [text.replace(" ", "") for text in asyncio.run(scenario())] == [
        "Bearert1",
        "Bearert1",
        "Bearert2",
    ]


def test_what_cannot_be_used_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="exec credential plugin"):
        read_contexts(write_config(tmp_path / "a", {"auth-provider": {}}), [])
    with pytest.raises(Refused, match="proxy socks5://p"):
        read_contexts(write_config(tmp_path / "b", {}, **{"proxy-url": "socks5://p"}), [])
    with pytest.raises(Refused, match="as-groups"):
        read_contexts(write_config(tmp_path / "b", {"as": "ann", "as-groups": ["g"]}), [])
    with pytest.raises(Refused, match="no context 'y'; the existing ones are: x"):
        read_contexts(write_config(tmp_path / "c", {}), ["y"])
    with pytest.raises(Refused, match="cannot be read"):
        read_contexts(str(tmp_path / "none"), [])
