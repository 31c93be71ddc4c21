"""What is sent to API servers fits the schemas that Kubernetes 1.25 to 1.37 publish; only 1.20
itself runs in tests.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.providers.kubernetes.unit.test_kubernetes_reading import make_node, make_spec
from tests.system.packages import install_whole

from cavvy.agent.bundle import make_archive
from cavvy.domain.services import ReplicaCount, ServiceSpec
from cavvy.domain.tasks import TaskSpec, TopologyNeed, Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.providers.kubernetes import pods
from cavvy.providers.kubernetes.cluster import DeviceClaim, read_nodes
from cavvy.providers.kubernetes.export import make_export
from cavvy.providers.kubernetes.options import read_options
from cavvy.providers.kubernetes.pods import make_bundle
from cavvy.providers.kubernetes.whoami import make_policy

pytestmark = pytest.mark.system

PACKAGE = "kubernetes-validate==1.37.0"
CACHE = Path("~/.cache/cavvy-tests").expanduser() / PACKAGE
HERE = Path(__file__).parents[3] / "system"
SETTINGS = {
    "queue": "gold",
    "priority_class": "low",
    "pull_secrets": "a, b",
    "runtime_class": "nvidia",
    "scheduler": "volcano",
    "service_account": "trainer",
    "node_selector": "pool=gpu",
    "tolerations": "a=b:NoSchedule c:NoExecute d",
}
VOLUMES = (
    Volume(
        kind=VolumeKind.NAMED, source="data", path="/data", read_only=True, size_gib=10, type="fast"
    ),
    Volume(kind=VolumeKind.HOST, source="/scratch", path="inside"),
    Volume(kind=VolumeKind.NFS, source="files:/export", path="/files"),
)


@pytest.fixture(scope="module")
def package() -> Path:
    def fill(folder: Path, seconds: float) -> None:
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), PACKAGE]
        done = subprocess.run(install, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr[-300:]}")

    install_whole(CACHE, fill)
    return CACHE


def check(package: Path, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "kubernetes/schemas.py")],
        input=json.dumps(manifests),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def make_all() -> list[dict[str, Any]]:
    """One of each of what we send, with everything that settings and tasks can ask for."""
    labels = {"gpu.type": "h100", "cloud.google.com/gke-spot": "true"}
    options = read_options(SETTINGS)
    spec = make_spec(longest=timedelta(hours=2), image="x:1", volumes=VOLUMES)
    owner = pods.OwnerObject(name="g", uid="u")
    found = [
        pods.make_record(spec, "m", "2026-01-01T00:00:00+00:00", ""),
        pods.make_secret(spec, "m", owner),
        make_bundle(make_archive()),
        *(pods.make_claim(VOLUMES[0], nodes) for nodes in (1, 2)),
    ]
    for node_labels in (labels, {"gpu.type": "h100"}):
        (node,) = read_nodes([make_node("a", {"nvidia.com/gpu": "8"}, node_labels)], (), {}, ())
        found.append(pods.make_pod(spec, 1, "m", owner, node, options, "agent"))
        found.append(pods.make_pod(make_spec(), 0, "m", owner, node, read_options({}), "agent"))
        for queue in ("", "gold"):
            near = replace(spec, topology=TopologyNeed(same="rack", prefer="zone", slice=2))
            own = replace(options, queue=queue)
            found.append(pods.make_pod(near, 1, "m", owner, node, own, "agent"))
    task = TaskSpec(
        name="t", run="true", nodes=2, env={"A": "b"}, secrets=("KEY",), volumes=VOLUMES
    )
    found += yaml.safe_load_all(make_export(task, None, 2, options))
    served = replace(task, nodes=1, service=ServiceSpec(port=80, replicas=ReplicaCount(most=3)))
    found += yaml.safe_load_all(make_export(served, None, 1, options))
    found += yaml.safe_load_all(make_policy("ml"))
    return found


def test_manifests_fit_the_schemas_of_newer_versions(package: Path) -> None:
    answer = check(package, make_all())
    assert answer["problems"] == []
    assert {"1.25.0", "1.30.0", "1.37.0"} <= set(answer["versions"])


@pytest.mark.parametrize(("version", "since"), [("v1", "1.34.0"), ("v1beta1", "1.32.0")])
def test_claims_of_devices_fit_the_schemas_that_have_them(
    package: Path, version: str, since: str
) -> None:
    owner = pods.OwnerObject(name="g", uid="u")
    claim = DeviceClaim(
        version=version, device_class="mig.nvidia.com", product="NVIDIA H200", profile="1g.18gb"
    )
    (node,) = read_nodes([make_node("a", {"nvidia.com/gpu": "8"}, {})], (), {}, ())
    node = replace(node, claim=claim, resource=claim.device_class)
    template = pods.make_claim_template(make_spec(), "m", owner, claim)
    pod = pods.make_pod(make_spec(), 0, "m", owner, node, read_options({}), "agent")
    answer = check(package, [template, pod])
    refused = {each for each, _, _ in answer["problems"]}
    newer = {each for each in answer["versions"] if each >= since}
    assert "1.37.0" in newer
    assert newer.isdisjoint(refused)


def test_the_check_refuses_what_is_wrong(package: Path) -> None:
    (pod,) = [each for each in make_all() if each["kind"] == "Pod"][:1]
    pod["spec"]["containers"][0]["colour"] = "bay"
    worse = {**pod, "spec": {**pod["spec"], "containers": "none"}}
    answer = check(package, [pod, worse])
    assert {version for version, _, _ in answer["problems"]} == set(answer["versions"])
    assert len(answer["problems"]) == 2 * len(answer["versions"]) == 2 * 13
