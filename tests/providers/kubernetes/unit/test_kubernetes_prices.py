"""Pods of managed clusters cost their share of the machine's price in the catalog."""

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.providers.kubernetes.unit.test_kubernetes_calls import make_provider, make_server
from tests.providers.kubernetes.unit.test_kubernetes_reading import NOW, make_node, write_config

from cavvy.catalog.fit import match_offers
from cavvy.cli.check import ProviderFinding, _as_service, _split_service
from cavvy.cli.main import cli
from cavvy.cli.reach.providers import load_providers
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import Refused
from cavvy.providers.batch.shapes import identify_gpu
from cavvy.providers.kubernetes.cluster import (
    KubernetesNode,
    NodeMachine,
    add_catalog,
    name_product,
    read_nodes,
)
from cavvy.providers.kubernetes.kubeconfig import KubeLogin, read_contexts
from cavvy.providers.kubernetes.node_pools import KARPENTER
from cavvy.providers.kubernetes.pods import _rules
from cavvy.providers.kubernetes.provider import KubernetesProvider, MachinePrices
from cavvy.providers.kubernetes.whoami import say_machines, say_services
from cavvy.store.snapshot.reader import list_instance, list_prices

INSTANCE, REGION = "node.kubernetes.io/instance-type", "topology.kubernetes.io/region"
GPU = "nvidia.com/gpu"


def make_row(
    provider: str,
    instance: str,
    usd: float,
    *,
    region: str = "r1",
    gpus: int = 0,
    gpu: str = "H100",
    spot: bool = False,
) -> Offer:
    return Offer(
        provider=provider,
        region=region,
        instance_type=instance,
        accelerator=gpu if gpus else None,
        accelerator_count=gpus,
        purchase=Purchase.SPOT if spot else Purchase.ON_DEMAND,
        vcpus=64,
        memory_mib=524288,
        rate=HourlyRate(round(usd * 1_000_000)),
    )


CATALOG = (
    make_row("aws", "p5.48xlarge", 80, gpus=8),
    make_row("aws", "p5.48xlarge", 60, region="r2", gpus=8),
    make_row("aws", "p5.48xlarge", 20, gpus=8, spot=True),
    make_row("aws", "p5.48xlarge", 24, gpus=8, spot=True),  # in another zone
    make_row("aws", "m7i.16xlarge", 3.2),
    make_row("gcp", "n1-standard-8", 0.4),
    make_row("gcp", "n1-standard-8-t4x1", 0.8, gpus=1, gpu="T4"),
    make_row("coreweave", "hgx-h100-8-gpu", 49.24, region="north-america", gpus=8),
    make_row("coreweave", "l40-8-gpu", 10, region="north-america", gpus=8, gpu="L40"),
)


def list_fake_instance(provider: str, instance: str) -> Sequence[Offer]:
    return [e for e in CATALOG if (e.provider, e.instance_type) == (provider, instance)]


def list_fake_prices(provider: str) -> Sequence[Offer]:
    return [each for each in CATALOG if each.provider == provider]


def make_machine(
    id_: str, instance: str, gpus: int = 0, gpu: str = "H100", **labels: str
) -> dict[str, Any]:
    """A node as the cloud's controller describes it."""
    own = {INSTANCE: instance, REGION: "r1", **({"gpu.type": gpu} if gpus else {}), **labels}
    node = make_node("n", {GPU: str(gpus)} if gpus else {}, own)
    node["spec"]["providerID"] = id_
    return node


def read(*nodes: dict[str, Any]) -> Sequence[KubernetesNode]:
    return read_nodes(nodes, (), {}, ())


def price(*nodes: dict[str, Any]) -> list[float]:
    prices = MachinePrices(list_fake_instance, list_fake_prices, lambda: NOW)
    return [float(node.rate.usd) for node in prices.put(read(*nodes))]


SPOT = {"eks.amazonaws.com/capacityType": "SPOT"}
COREWEAVE = {"node.coreweave.cloud/cpu": "intel-xeon", REGION: "US-EAST-04"}


@pytest.mark.parametrize(
    ("node", "usd"),
    [
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 8), 80),
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 8, **{REGION: "r2"}), 60),
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 8, **{REGION: "elsewhere"}), 0),
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 8, **SPOT), 24),
        (make_machine("aws:///r1a/i-0abc", "m7i.16xlarge"), 3.2),
        (make_machine("aws:///r1a/i-0abc", "m7i.16xlarge", **SPOT), 3.2),  # no spot price is known
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge"), 80),  # GPUs that it does not report
        (make_machine("aws:///r1a/i-0abc", "p5.48xlarge", **SPOT), 24),
        (make_machine("aws:///r1a/i-0abc", "unknown.large"), 0),
        (make_machine("gce://project/zone/name", "n1-standard-8"), 0.4),
        (make_machine("gce://project/zone/name", "n1-standard-8", 1, "nvidia-tesla-t4"), 0.8),
        (make_machine("gce://project/zone/name", "n1-standard-8", 2, "nvidia-tesla-t4"), 0),
        (make_machine("", "gd-8xh100ib-i128", 8, "H100_NVLINK_80GB", **COREWEAVE), 49.24),
        (make_machine("", "gd-8xh100ib-i128", 4, "H100_NVLINK_80GB", **COREWEAVE), 0),
        (make_machine("", "cd-gp-a192-genoa", **COREWEAVE), 0),
        (make_machine("kind://docker/kind/node", "m7i.16xlarge"), 0),
        (make_machine("", "m7i.16xlarge"), 0),
    ],
)
def test_a_machine_has_the_price_of_its_cloud(node: dict[str, Any], usd: float) -> None:
    assert price(node) == [usd]


def test_check_tells_the_machines_of_clouds_with_price_and_network() -> None:
    prices = MachinePrices(list_fake_instance, list_fake_prices, lambda: NOW)
    fast = make_machine("", "gd-8xh100ib-i128", 8, "H100_NVLINK_80GB", **COREWEAVE)
    fast["status"]["allocatable"]["rdma/ib"] = "100"
    nodes = [
        *[fast, make_machine("kind://docker/kind/node", "m7i.16xlarge")],
        *[make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 8, **SPOT)] * 2,
        make_machine("azure:///x", "unknown"),
    ]
    assert say_machines(prices.put(read(*nodes))) == [
        ("machine aws p5.48xlarge", "2 nodes on spot in r1, $24 an hour in the catalog"),
        ("machine azure unknown", "1 node in r1, no price in the catalog"),
        (
            "machine coreweave gd-8xh100ib-i128",
            "1 node in US-EAST-04, $49.24 an hour in the catalog, RDMA as rdma/ib",
        ),
    ]


GKE = {"cloud.google.com/gke-nodepool": "gpus"}
AKS = {"kubernetes.azure.com/cluster": "MC_g_c_eastus", "accelerator": "nvidia"}
NC24 = "Standard_NC24ads_A100_v4"


def find_in_catalog(cloud: str, instance: str) -> Offer | None:
    return next(iter(list_instance(cloud, instance)), None)


def test_a_gpu_that_labels_do_not_name_is_that_of_the_machine() -> None:
    """The labels of AKS say that a node has NVIDIA's GPUs, and not which ones."""
    node = make_machine("azure:///x", NC24, 1, "", **AKS)
    two = make_machine("azure:///x", NC24, 2, "", **AKS)  # time-sliced: one GPU for two pods
    named = make_machine("azure:///x", NC24, 1, "NVIDIA-H100-PCIe", **AKS)
    foreign = make_machine("kind://docker/x", NC24, 1, "nvidia")
    sixth = make_machine("azure:///x", "Standard_NV6ads_A10_v5", 1, "", **AKS)
    eighth = make_machine("aws:///x", "g6f.large", 1, "l4", **{"eks.amazonaws.com/nodegroup": "g"})
    parts = add_catalog(read(sixth, eighth), find_in_catalog)
    assert [each.product for each in parts] == ["A10-4GB-SHARED", "L4-3GB-SHARED"]
    assert {each.shape.gpu for each in parts} == {"A10-4GB-SHARED", "L4-3GB-SHARED"}
    assert identify_gpu(parts[0].product)[0] != "A10"  # which has 24 GB
    found = add_catalog(read(node, two, named, foreign), find_in_catalog)
    products = [(each.product, each.label, each.label_value) for each in found]
    assert products == [
        ("A100-80GB", INSTANCE, NC24),
        ("nvidia", "accelerator", "nvidia"),
        ("NVIDIA-H100-PCIe", "gpu.type", "NVIDIA-H100-PCIe"),
        ("nvidia", "gpu.type", "nvidia"),
    ]
    assert [each.service for each in found] == ["aks", "aks", "aks", ""]
    assert _rules(1, found[0])[0] == {"key": INSTANCE, "operator": "In", "values": [NC24]}


def test_check_tells_the_services_and_the_gpus_that_nodes_do_not_report() -> None:
    """A node that has a GPU, but no driver or device plugin, looks like a node without."""
    label = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    nodes = [
        make_machine("gce://p/z/n", "n1-standard-8", 0, **GKE, **label),
        make_machine("gce://p/z/n", "n1-standard-8", 0, **GKE, **label),
        make_machine("gce://p/z/n", "n1-standard-8", 1, "", **GKE, **label),
        make_machine("azure:///x", NC24, 0, **AKS),
        make_machine("azure:///x", "Standard_D4s_v5", 0, **AKS),
        make_machine("gce://p/z/n", "n1-standard-8", 0),  # a user's own cluster
    ]
    found = add_catalog(read(*nodes), find_in_catalog)
    assert [each.service for each in found] == ["gke", "gke", "gke", "aks", "aks", ""]
    facts = say_services(found)
    assert [(label, text.partition("; ")[0].partition(":")[0]) for label, text in facts] == [
        ("service gke", "Google Kubernetes Engine"),
        ("service aks", "Azure Kubernetes Service"),
        ("missing accelerators", "2 nodes should have nvidia-tesla-t4, but report none"),
        ("missing accelerators", "1 node should have 1 x A100-80GB, but reports none"),
    ]
    assert all("only of kubernetes" in text for _, text in facts[:2])
    assert "only of kubernetes" not in say_services(found[:3])[0][1]
    assert "gpu-driver-version=default" in facts[2][1]
    assert "use-nvidia-gpu" in facts[3][1]


@pytest.mark.parametrize("name", ["notcoreweave.cloud/x", "cloud.google.com/gke-nodepool.x/y"])
def test_labels_that_only_resemble_those_of_a_service_name_none(name: str) -> None:
    assert [each.service for each in read(make_machine("", "x", **{name: "1"}))] == [""]


@pytest.mark.parametrize(
    ("state", "why"), [("triage", "in the state triage, not production"), ("production", "")]
)
def test_a_node_of_coreweave_that_is_not_in_production_is_not_used(state: str, why: str) -> None:
    labels = {"node.coreweave.cloud/state": state}
    assert [each.why_not for each in read(make_machine("", "gd", 8, **labels))] == [why]


def test_the_name_of_a_service_stands_for_the_offers_of_its_clusters(tmp_path: Path) -> None:
    mine = {"eks.amazonaws.com/nodegroup": "g"}
    nodes = [make_machine("aws:///r1a/i-1", "m7i.16xlarge", **mine)]
    offers = [each for each in offer(tmp_path, nodes) if not each.accelerator_count]
    assert {each.service for each in offers} == {"eks"}

    def matches(*names: str) -> bool:
        return bool(match_offers(offers, ResourceSpec(providers=names)).offers)

    assert [matches("eks"), matches("gke", "eks"), matches("kubernetes"), matches()] == [True] * 4
    assert not matches("gke")
    assert not matches("")


def test_offers_of_a_cluster_of_several_services_belong_to_none(tmp_path: Path) -> None:
    """A pod may get any of the nodes, also of another size: with a policy for one service, it must
    not get those of the others.
    """
    nodes = [
        make_machine("", "m7i.16xlarge", **labels)
        for labels in ({"eks.amazonaws.com/nodegroup": "g"}, GKE, {})
    ]
    for number, node in enumerate(nodes):
        node["status"]["allocatable"]["cpu"] = str(8 + number)
        node["metadata"]["name"] = f"n{number}"
    for few in (nodes, nodes[::-1], nodes[:2]):
        assert {each.service for each in offer(tmp_path, few)} == {""}
    assert {each.service for each in offer(tmp_path, nodes[1:])} == {"gke"}  # a joined host


def test_prices_are_read_again_after_an_hour() -> None:
    catalog, at = [make_row("aws", "m7i.16xlarge", 3.2)], [NOW]

    def list_instance(provider: str, instance: str) -> Sequence[Offer]:
        return catalog

    prices = MachinePrices(list_instance, list_fake_prices, lambda: at[0])
    nodes = read(make_machine("aws:///r1a/i-0abc", "m7i.16xlarge"))
    assert [float(node.rate.usd) for node in prices.put(nodes)] == [3.2]
    catalog[:] = [make_row("aws", "m7i.16xlarge", 4.0)]
    assert [float(node.rate.usd) for node in prices.put(nodes)] == [3.2]
    at[0] += timedelta(hours=1)
    assert [float(node.rate.usd) for node in prices.put(nodes)] == [4.0]


def test_a_node_with_several_kinds_of_accelerators_has_no_price() -> None:
    node = make_machine("aws:///r1a/i-0abc", "p5.48xlarge", 4)
    for table in ("capacity", "allocatable"):
        node["status"][table] |= {"nvidia.com/mig-1g.10gb": "7"}
    assert price(node) == [0, 0]
    assert {each.machine for each in read(node)} == {NodeMachine()}


@pytest.mark.parametrize(
    ("id_", "instance", "gpus", "gpu", "region"),
    [
        ("aws:///us-east-1a/i-1", "p4d.24xlarge", 8, "NVIDIA-A100-SXM4-40GB", "us-east-1"),
        ("gce://p/z/n", "a2-highgpu-1g", 1, "nvidia-tesla-a100", "us-central1"),
        ("gce://p/z/n", "n1-standard-4", 1, "nvidia-tesla-t4", "us-central1"),
        ("azure:///subscriptions/s", "Standard_NC24ads_A100_v4", 1, "A100-80GB-PCIe", "eastus"),
    ],
)
def test_the_shipped_catalog_has_machines_by_their_labels(
    id_: str, instance: str, gpus: int, gpu: str, region: str
) -> None:
    node = make_machine(id_, instance, gpus, gpu, **{REGION: region})
    (found,) = MachinePrices(list_instance, list_prices, lambda: NOW).put(read(node))
    assert found.rate > HourlyRate(100_000)


def offer(tmp_path: Path, items: Sequence[dict[str, Any]], **settings: Any) -> Sequence[Offer]:
    """The offers of a cluster with these nodes and a pool of Karpenter."""
    server = make_server()
    server.answers["GET", "/api/v1/nodes"] = 200, {"items": list(items)}
    wanted = {"key": INSTANCE, "operator": "In", "values": ["p5.48xlarge"]}
    spec = {"requirements": [wanted], "nodeClassRef": {"group": "karpenter.k8s.aws"}}
    pool = {"metadata": {"name": "gold"}, "spec": {"template": {"spec": spec}}}
    server.answers["GET", f"/apis/{KARPENTER}"] = 200, {"items": [pool]}

    async def scenario() -> Sequence[Offer]:
        async with server.serving():
            provider = make_provider(tmp_path, server.port, **settings)
            provider._prices = MachinePrices(list_fake_instance, list_fake_prices, lambda: NOW)
            find = lambda _, name: next(e for e in CATALOG if e.instance_type == name)  # noqa: E731
            provider._context = replace(provider._context, find_instance=find)
            try:
                return await provider.offers()
            finally:
                await provider.close()

    return asyncio.run(scenario())


def rates(offers: Sequence[Offer]) -> dict[tuple[int, float], float]:
    """The prices by accelerators and CPUs."""
    return {(each.accelerator_count, each.vcpus): float(each.rate.usd) for each in offers}


def test_a_pod_costs_its_share_of_its_machine(tmp_path: Path) -> None:
    found = rates(offer(tmp_path, [make_machine("aws:///r2a/i-1", "m7i.16xlarge")]))
    assert (found[0, 64], found[0, 32], found[0, 1]) == (3.2, 1.6, 0.05)
    # the pool's machines will be in the region of the node
    gpus = {count: usd for (count, _), usd in found.items() if count}
    assert gpus == {count: 10.0 * count for count in range(1, 9)}


def test_a_pool_of_a_cluster_without_nodes_has_the_cheapest_regions_price(tmp_path: Path) -> None:
    gpus = {c: usd for (c, _), usd in rates(offer(tmp_path, [])).items() if c}
    assert gpus == {count: 7.5 * count for count in range(1, 9)}


def test_prices_of_the_settings_win_and_the_catalog_can_be_left_out(tmp_path: Path) -> None:
    nodes = [make_machine("aws:///r1a/i-1", "m7i.16xlarge")]
    stated = rates(offer(tmp_path, nodes, price_usd_gpu_hr="H100=2", price_usd_node_hr=6.4))
    assert stated[0, 64] == 6.4
    assert {usd / count for (count, _), usd in stated.items() if count} == {2}
    free = offer(tmp_path, nodes, catalog_prices=False)
    assert {each.rate for each in free} == {HourlyRate(0)}


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("gke-gcloud-auth-plugin", "gcloud components install gke-gcloud-auth-plugin"),
        ("/opt/none/aws", "install the AWS CLI"),
        ("kubelogin", "az aks install-cli"),
        ("some-login", "machine"),
    ],
)
def test_a_missing_plugin_is_named_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, hint: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = write_config(tmp_path / "config", {"exec": {"command": command}})
    (context,) = read_contexts(config, [])
    login = KubeLogin(context, tmp_path, lambda: NOW)
    with pytest.raises(Refused, match=hint) as caught:
        asyncio.run(login.proof())
    missing = "is not installed on the server's machine, and context x needs this command to log in"
    assert f"{command} {missing}" in str(caught.value)


def test_commands_know_the_catalog_as_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, `cavvy offers` and `check` show the pods of managed clusters as free."""
    config = write_config(tmp_path / "config", {})
    (tmp_path / "c.toml").write_text(f'[providers.kubernetes]\nkubeconfig = "{config}"\n')
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    provider = load_providers(["kubernetes"])["kubernetes"]
    assert isinstance(provider, KubernetesProvider)
    found = provider._context.find_instance("azure", NC24)
    assert found is not None
    assert name_product(found) == "A100-80GB"
    assert provider._context.list_instance("azure", NC24)
    assert provider._context.find_instance("azure", "") is None


def test_a_check_of_a_service_fails_without_its_nodes() -> None:
    ready = ProviderFinding(name="kubernetes", enabled=True, facts=[("service gke", "x")])
    assert _split_service("GKE") == ("gke", "kubernetes")
    assert _split_service("aws") == ("", "aws")
    assert _as_service(ready, "gke").state == "ready"
    assert "az aks get-credentials" in _as_service(ready, "aks").problem
    broken = replace(ready, problem="no answer")
    assert _as_service(broken, "aks").problem == "no answer"


def test_the_rights_of_a_service_are_those_of_its_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    (tmp_path / "c.toml").touch()
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "c.toml"))
    told = CliRunner().invoke(cli, ["check", "gke", "--policy"])
    assert (told.exit_code, "kind: ServiceAccount" in told.stdout) == (0, True)
    refused = CliRunner().invoke(cli, ["check", "AKS", "--live"])
    assert (refused.exit_code, "aks stands for clusters of kubernetes" in refused.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("service", "own"),
    [
        ("gke", ("cloud.google.com/gke-nodepool", "gke-gcloud-auth-plugin", "(gcp)")),
        ("aks", ("kubernetes.azure.com/agentpool", "scalesetpriority=spot:NoSchedule", "(azure)")),
        ("eks", ("eks.amazonaws.com/nodegroup", "aws eks get-token", "(aws)")),
        ("coreweave", ("gpu.nvidia.com/model", "cloud/state=production", "(coreweave)")),
    ],
)
def test_each_service_has_a_page_of_its_own(service: str, own: Sequence[str]) -> None:
    runner = CliRunner(env={"COLUMNS": "500"})
    told = runner.invoke(cli, ["check", service]).output
    assert all(each in told for each in own)
    assert "What is missing" in told
    others = {"gke-nodepool", "agentpool", "nodegroup", "node.coreweave.cloud"}
    assert sum(each in told for each in others) == 1
    plain = json.loads(runner.invoke(cli, ["check", service, "-o", "json"]).output)
    assert (plain["service"], plain["provider"]) == (service, "kubernetes")
    assert set(plain["own"]) >= {"its nodes", "GPU names", "prices", "login"}
    assert "drivers" in plain["missing"]
