"""The server on a real Kubernetes, from the objects in deploy/kubernetes: it starts, a member signs
in and runs a job as pods, with the rights of the service account alone, and a new pod goes on.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.conftest import ROOT
from tests.system.kubernetes import server_image, users
from tests.system.kubernetes.cluster import Cluster
from tests.system.trust import user_at
from tests.waits import START_S, wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # a cluster may have to be built first

OBJECTS = ROOT / "deploy" / "kubernetes"
SETTINGS = 'image = "localhost/python:1"\nprice_usd_gpu_hr = "3600"\n'
# The cluster of the tests has no kube-proxy, so pods reach the API server only by its own address.
API = {"KUBERNETES_SERVICE_HOST": "10.77.0.254", "KUBERNETES_SERVICE_PORT": "6443"}
cluster = users.cluster


def test_a_team_uses_a_server_on_kubernetes(cluster: Cluster, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    with served(cluster, tmp_path, certificate, key), user_at(tmp_path / "ada") as ada:
        with forwarded(cluster) as url:
            told = inside(cluster, "server", "init", "--admin", "ada", "--url", url)
            line = next(each for each in told.splitlines() if each.startswith("cavvy login"))
            ada.cli(*line.split()[1:], "--ca-file", str(authority.ca))
            task = ada.task(
                "{name: hello, resources: {gpu: H100:2}, run: 'echo $NVIDIA_VISIBLE_DEVICES'}"
            )
            assert ada.cli("run", "--yes", task).count("GPU-") == 2
            (job,) = ada.json("ps", "--all")
            assert (job["name"], job["phase"]) == ("hello", "done")
            # the job is done before its pod is removed, and so before the bill is complete
            wait_until(lambda: ada.json("cost", job["id"])["charges"])
            (charge,) = ada.json("cost", job["id"])["charges"]
            assert charge["rate_micros_per_hour"] == 7200 * 10**6
        ran = cluster.api("/api/v1/namespaces/cavvy-jobs/events")["items"]
        assert any(each["reason"] == "Scheduled" for each in ran)
        assert not cluster.pods("cavvy")

        (old,) = server_pods(cluster)
        cluster.kubectl("delete", "pod", "-n", "cavvy", old)
        wait_until(lambda: [each for each in server_pods(cluster) if each != old])
        ready(cluster)
        assert json.loads(inside(cluster, "ps", "--all", "-o", "json"))[0]["name"] == "hello"
        denied = inside(cluster, "server", "init", "--admin", "eve", code=1)
        assert "already has an admin: ada" in denied


@contextmanager
def served(cluster: Cluster, folder: Path, certificate: Path, key: Path) -> Iterator[None]:
    """The objects are applied and their server is ready; afterwards the cluster is as it was."""
    server_image.load_image(cluster, folder)
    state = cluster.folder / "state"
    state.mkdir()
    state.chmod(0o777)  # volumes that are folders of a node do not get the pod's group
    objects = kustomize(overlay(folder / "overlay", state))
    for each in ("cavvy", "cavvy-jobs"):
        cluster.make_namespace(each)
    try:
        files = f"--cert={certificate}", f"--key={key}"
        cluster.kubectl("create", "secret", "tls", "cavvy-tls", "-n", "cavvy", *files)
        cluster.kubectl("apply", "-f", "-", stdin=objects)
        ready(cluster)
        yield
    finally:
        for each in ("cavvy-jobs", "cavvy"):
            cluster.drop_namespace(each)
        names = ("pv/cavvy-state", "clusterrole/cavvy", "clusterrolebinding/cavvy")
        cluster.kubectl("delete", "--wait=false", "--ignore-not-found", *names)


def overlay(folder: Path, state: Path) -> Path:
    """An overlay as an installation would have it, for what this cluster lacks: a registry, a
    provisioner of volumes, and addresses of services.
    """
    folder.mkdir()
    (folder / "base").symlink_to(OBJECTS)
    settings = (OBJECTS / "server/settings.toml").read_text()
    table = "[providers.kubernetes]\n"
    assert table in settings
    (folder / "settings.toml").write_text(settings.replace(table, table + SETTINGS))
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "cavvy-state"},
        "spec": {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(state)},
            "claimRef": {"name": "cavvy", "namespace": "cavvy"},
        },
    }
    (folder / "volume.yaml").write_text(json.dumps(volume))
    place = "/spec/template/spec"
    changes: list[dict[str, Any]] = [
        {"op": "add", "path": f"{place}/containers/0/env/-", "value": {"name": name, "value": text}}
        for name, text in API.items()
    ]
    changes.append({"op": "add", "path": f"{place}/nodeName", "value": "n1"})
    image, tag = server_image.NAME.split(":")
    kustomization = {
        "resources": ["base/overlay", "volume.yaml"],
        "images": [{"name": "cavvy", "newName": image, "newTag": tag}],
        "configMapGenerator": [
            {
                "name": "cavvy-settings",
                "namespace": "cavvy",
                "behavior": "replace",
                "files": ["settings.toml"],
            }
        ],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(changes)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return folder


def kustomize(folder: Path) -> str:
    return subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True
    ).stdout


def ready(cluster: Cluster) -> None:
    limit = f"--timeout={START_S:.0f}s"
    cluster.kubectl("rollout", "status", "deployment/cavvy", "-n", "cavvy", limit)


def server_pods(cluster: Cluster) -> list[str]:
    found = cluster.api("/api/v1/namespaces/cavvy/pods")["items"]
    return [each["metadata"]["name"] for each in found]


def inside(cluster: Cluster, *arguments: str, code: int = 0) -> str:
    """What a command in the server's pod says on both streams."""
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", "exec", "-n", "cavvy"]
    done = subprocess.run(
        [*command, "deploy/cavvy", "--", "cavvy", *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """The URL at which this machine reaches the server."""
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", "port-forward", "-n", "cavvy"]
    forward = subprocess.Popen(
        [*command, "service/cavvy", ":443"], stdout=subprocess.PIPE, text=True
    )
    assert forward.stdout is not None
    try:
        line = forward.stdout.readline()  # Forwarding from 127.0.0.1:4711 -> 7443
        yield f"https://{line.split()[2]}"
    finally:
        forward.kill()
        forward.communicate()
