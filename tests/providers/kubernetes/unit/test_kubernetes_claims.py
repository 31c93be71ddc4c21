"""Devices that drivers publish by Dynamic Resource Allocation become offers, and pods claim them.

`ClaimServer` stands in for an API server with the group resource.k8s.io: it has the objects that
NVIDIA's driver makes, in the form of each version of the API, and refuses templates that do not
have exactly that version's fields.
"""

import asyncio
from typing import Any, cast

import pytest
import yaml
from tests.providers.kubernetes.unit.test_kubernetes_reading import find, make_node

from cavvy.catalog.fit import match_offers
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.batch.shapes import AcceleratorRates
from cavvy.providers.kubernetes.api import ApiServerRefused
from cavvy.providers.kubernetes.cluster import KubernetesNode, list_offers, nodes_for
from cavvy.providers.kubernetes.context import ClusterContext
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.options import read_options
from cavvy.task_files import parse_task

GROUP = "/apis/resource.k8s.io"
GPU, MIG = "gpu.nvidia.com", "mig.nvidia.com"
TAINTS = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
PRODUCT = "NVIDIA A100-SXM4-80GB"


class ClaimServer:
    """An API server that has these versions of the group, and a node with these devices."""

    def __init__(self, version: str, devices: list[dict[str, Any]], **more: Any) -> None:
        self.version, self.calls = version, list[str]()
        path = f"{GROUP}/{version}"
        pool = {"name": "n", "generation": 2, "resourceSliceCount": 1}
        spec = {"driver": GPU, "nodeName": "n", "pool": pool, "devices": devices}
        if version == "v1beta1":
            spec["devices"] = [
                {"name": each["name"], "basic": {k: v for k, v in each.items() if k != "name"}}
                for each in devices
            ]
        old = {**spec, "pool": {**pool, "generation": 1}}
        shared = more.get("counters")
        slices = [{"spec": {**spec, **({"sharedCounters": shared} if shared else {})}}]
        self.lists: dict[str, list[Any]] = {
            "/api/v1/nodes": [make_node("n", more.get("has", {}), taints=TAINTS)],
            "/api/v1/pods": [],
            f"{path}/deviceclasses": [{"metadata": {"name": name}} for name in (GPU, MIG, "net")],
            f"{path}/resourceslices": [{"spec": old}, *slices],
            f"{path}/resourceclaims": [
                {"status": {"allocation": {"devices": {"results": [{**each}]}}}}
                for each in more.get("taken", ())
            ],
        }

    async def find(self, path: str) -> Any:
        self.calls.append(path)
        assert path == GROUP
        served = [{"version": each} for each in ("v1alpha3", self.version) if self.version]
        return {"versions": served} if served else None

    async def items(self, path: str, query: object = ()) -> list[Any]:
        if path not in self.lists:
            raise ApiServerRefused(404, "NotFound", "the server could not find it")
        return self.lists[path]


def device(name: str, **more: Any) -> dict[str, Any]:
    named = {"type": "gpu", "productName": PRODUCT, "uuid": f"GPU-{name}", **more.pop("named", {})}
    attributes = {each: {"string": value} for each, value in named.items()}
    return {
        "name": name,
        "attributes": {**attributes, "cudaComputeCapability": {"version": "8.0.0"}},
        "capacity": {"memory": {"value": "80Gi"}},
        **more,
    }


def read(server: ClaimServer) -> tuple[list[KubernetesNode], list[Offer]]:
    class Terms:
        options = read_options({})

        @staticmethod
        def now() -> Any:
            from datetime import UTC, datetime

            return datetime(2026, 5, 1, tzinfo=UTC)

        @staticmethod
        def find_instance(*_: object) -> None: ...

    context = ClusterContext(cast(Any, server), cast(Any, None), cast(Any, Terms))
    nodes = list(asyncio.run(context.nodes()))
    offers = list_offers(
        nodes,
        region="c",
        zone="ns",
        gpu_rate=AcceleratorRates("A100=8"),
        node_rate=HourlyRate(0),
        waits=False,
    )
    return nodes, list(offers)


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_published_gpu_is_offered_and_claimed(version: str) -> None:
    taken = [{"driver": GPU, "pool": "n", "device": "gpu-1", "request": "gpu"}]
    taken += [{**taken[0], "device": "gpu-0", "adminAccess": True}]  # of a monitor
    server = ClaimServer(version, [device(f"gpu-{n}") for n in range(3)], taken=taken)
    nodes, offers = read(server)
    one = find(offers, "A100", 1)
    assert (one.accelerator_memory_mib, one.capacity) == (81920, 2)
    assert find(offers, "A100", 3).capacity == 0
    two = find(offers, "A100", 2)
    text = make_export(
        parse_task("name: t\nrun: x\nresources: {gpu: 'A100:2'}"),
        two,
        1,
        read_options({}),
        nodes_for(nodes, two)[0],
    )
    template, pod = yaml.safe_load_all(text)
    assert template["apiVersion"] == f"resource.k8s.io/{version}"
    ((request,),) = template["spec"]["spec"]["devices"].values()
    named = {"name": request.pop("name")}
    exactly = request if version == "v1beta1" else request.pop("exactly")
    assert version == "v1beta1" or not request
    assert exactly == {
        "deviceClassName": GPU,
        "allocationMode": "ExactCount",
        "count": 2,
        "selectors": [
            {"cel": {"expression": f'device.attributes["{GPU}"].productName == "{PRODUCT}"'}}
        ],
    }
    claim = {**named, "resourceClaimTemplateName": template["metadata"]["name"]}
    assert pod["spec"]["resourceClaims"] == [claim]
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["claims"] == [named]
    assert GPU not in resources.get("limits", {})
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["spec"]["tolerations"]


def test_instances_share_the_slices_of_their_gpu() -> None:
    """The driver publishes all instances that a GPU could have; few of them exist together."""
    counters = [{"name": "gpu-0", "counters": {f"slice-{n}": {"value": "1"} for n in range(8)}}]

    def instance(profile: str, start: int, size: int) -> dict[str, Any]:
        used = {f"slice-{n}": {"value": "1"} for n in range(start, start + size)}
        consumes = [{"counterSet": "gpu-0", "counters": used}]
        named = {"type": "mig", "profile": profile}
        name = f"gpu-0-mig-{profile.replace('.', '')}-{start}"
        return device(name, named=named, consumesCounters=consumes)

    devices = [instance("1g.10gb", start, 1) for start in range(7)]
    devices += [instance("3g.40gb", start, 4) for start in (0, 4)]
    taken = [{"driver": GPU, "pool": "n", "device": devices[5]["name"]}]
    _, offers = read(ClaimServer("v1", devices, counters=counters, taken=taken))
    small, large = (find(offers, f"A100-MIG-{each}", 1) for each in ("1g.10gb", "3g.40gb"))
    assert (small.capacity, large.capacity) == (6, 1)
    assert (small.rate, large.rate) == (HourlyRate(1_000_000), HourlyRate(4_000_000))
    task = parse_task("run: x\nresources: {gpu: 'A100:3g.40gb'}")
    assert {each.accelerator for each in match_offers(offers, task.resources).offers} == {
        "A100-MIG-3g.40gb"
    }


@pytest.mark.parametrize(
    "server",
    [
        ClaimServer("", []),
        ClaimServer("v1", []),
        ClaimServer("v1", [device("gpu-0", taints=[{"effect": "NoSchedule"}])]),
        ClaimServer("v1", [device("net-0", named={"type": "nic"})]),
    ],
)
def test_other_clusters_stay_as_they_were(server: ClaimServer) -> None:
    nodes, offers = read(server)
    assert [each.claim for each in nodes] == [None]
    assert not any(each.accelerator_count for each in offers)


def test_a_node_with_a_device_plugin_keeps_it() -> None:
    server = ClaimServer("v1", [device("gpu-0")], has={"nvidia.com/gpu": "8"})
    nodes, _ = read(server)
    assert [(each.resource, each.claim) for each in nodes] == [("nvidia.com/gpu", None)]


def test_a_user_who_may_not_read_devices_gets_the_rest() -> None:
    server = ClaimServer("v1", [device("gpu-0")])
    del server.lists[f"{GROUP}/v1/resourceclaims"]
    nodes, _ = read(server)
    assert [each.claim for each in nodes] == [None]
