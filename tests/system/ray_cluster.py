"""A real Ray cluster for tests: each node in network, process and mount namespaces of its own, on
one wire.

Ray is installed into an environment of its own below ~/.cache/cavvy-tests at its first use. A
cluster that does not come up is a skip that says why; nothing is tried twice. It ends with the
process that started it, killed or not.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.proofs import Proof
from tests.shared import once_in_group, when_group_ends
from tests.system.hosts import Lab, LabHost, lab_at
from tests.system.packages import CACHE, install_whole
from tests.system.storages import once
from tests.system.tied import start_tied
from tests.verdict import SkippedForTime
from tests.waits import START_S

VERSION = "2.60.0"
# What Ray measures of itself and of its machines, which no test reads, is measured once a minute.
QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_metrics_report_interval_ms": "60000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "METRICS_RECORD_INTERVAL_S": "60",
    "NODE_STATS_UPDATE_INTERVAL_SECONDS": "60",
    "RAY_DASHBOARD_STATS_UPDATING_INTERVAL": "60",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    "RAY_worker_niceness": "0",  # at Ray's 15, work hardly runs beside other tests
    "RAY_health_check_period_ms": "1000",  # a killed node is noticed sooner
    "RAY_local_fs_capacity_threshold": "1",  # at 0.95, a full disk of this machine stops its work
}
PROOF = Proof("ray", True, f"Ray {VERSION}, its nodes in network namespaces")


@once
def installed() -> Path:
    """The folder of the programs of an environment with Ray."""
    folder = CACHE / f"ray-{VERSION}"
    try:
        install_whole(folder, _install)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        pytest.skip(
            f"Ray {VERSION} cannot be installed: {error} {said.decode(errors='replace')[-500:]}"
        )
    return folder / "bin"


def _install(folder: Path, seconds: float) -> None:
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", folder],
        [*pip, f"ray[default]=={VERSION}"],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=seconds)


class RayHost(LabHost):
    """A host whose first process is `ray start`, so that the node dies with it."""

    def __init__(self, lab: Lab, number: int, options: list[str]) -> None:
        super().__init__(lab, number)
        self.options = options

    def start(self) -> None:
        temp = Path(f"/tmp/{self.space}")  # short, for the sockets in it
        temp.mkdir(mode=0o700, exist_ok=True)
        environ = {
            "PATH": f"{installed()}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            **QUIET,
        }
        ray = (
            f"ray start --block --disable-usage-stats --node-ip-address={self.address} "
            f"--temp-dir={temp}"
        )
        ray += " --include-log-monitor=false"
        # Ray itself gives a node 30 s to come up, which a busy machine may need more than once.
        script = (
            f"hostname {self.name}; for again in 1 2 3; do {ray} {' '.join(self.options)}; "
            "sleep 1; done"
        )
        spaces = ["unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]

        with open(self.folder / "ray.log", "ab") as log:
            self._process = start_tied(
                ["ip", "netns", "exec", self.space, *spaces, "sh", "-c", script],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether Ray has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        return (self.folder / "ray.log").read_text(errors="replace")[-1500:]

    def clear(self) -> None:
        shutil.rmtree(f"/tmp/{self.space}", ignore_errors=True)


class Cluster:
    """A head and workers; 10.99.0.254 is where the tests are."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.url = "http://10.99.0.1:8265"
        self.spare: list[RayHost] = []  # that tests may take away
        self._made = 0

    def add(self, *, cpus: int = 4, gpus: int = 0, kind: str = "T4", labels: str = "") -> RayHost:
        self._made += 1
        options = [
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            "--memory=6000000000",
            "--object-store-memory=80000000",
        ]
        if gpus:
            options.append(f"--resources='{json.dumps({f'accelerator_type:{kind}': 1})}'")
        if labels:
            options.append(f"--labels={labels}")
        if self._made == 1:
            options += ["--head", "--port=6379", "--dashboard-host=0.0.0.0"]
        else:
            options.append("--address=10.99.0.1:6379")
        host = RayHost(self.lab, self._made, options)
        self.lab.hosts.append(host)
        host.wire()
        host.start()
        return host

    def wait(self, hosts: Sequence[RayHost], seconds: float = START_S) -> None:
        """Until these are alive and the job API answers; a skip where they never are."""
        until = time.monotonic() + seconds
        while True:
            try:
                alive = {node["node_ip"] for node in self.nodes() if node["state"] == "ALIVE"}
                missing = [host.name for host in hosts if host.address not in alive]
                if not missing:
                    self.ask("GET", "/api/jobs/")
                    return
                why = f"{', '.join(missing)} are not alive"
            except (OSError, ValueError) as error:
                why = str(error)
            late = time.monotonic() > until
            if late or any(host.has_ended() for host in hosts):
                said = "\n".join(
                    host.said() for host in self.lab.hosts if isinstance(host, RayHost)
                )
                raise (SkippedForTime if late else pytest.skip.Exception)(
                    f"Ray did not come up ({why}): {said}"
                )
            time.sleep(0.25)

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/api/v0/nodes?limit=1000&detail=1")["data"][
            "result"
        ]["result"]
        return found

    def jobs(self) -> list[dict[str, Any]]:
        return [job for job in self.ask("GET", "/api/jobs/") if job.get("submission_id")]

    def groups(self) -> list[dict[str, Any]]:
        """What is reserved now."""
        found = self.ask("GET", "/api/v0/placement_groups?limit=1000&detail=1")["data"]["result"][
            "result"
        ]
        return [group for group in found if group["state"] != "REMOVED"]

    def log(self, job: str) -> str:
        return str(self.ask("GET", f"/api/jobs/{job}/logs")["logs"])

    def ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as answer:
            return json.loads(answer.read())

    def agents(self) -> list[str]:
        """The command lines of agents, and of what holds them, on all nodes."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = (
                    Path(f"/proc/{name}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                environ = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if str(self.lab.root).encode() in environ and (
                ".pyz" in words or "Holds the agent" in words
            ):
                found.append(words[-200:])
        return found

    def folders(self) -> list[Path]:
        """What nodes that live keep of gangs."""
        alive = [host for host in self.lab.hosts if isinstance(host, RayHost) and host.runs()]
        return [path for host in alive for path in host.home.glob(".cavvy-ray/*/gangs/*")]


@contextmanager
def cluster_at(root: Path) -> Iterator[Cluster]:
    """A cluster of which nothing is left afterwards; nodes are added to it."""
    installed()
    with lab_at(root) as lab:
        try:
            yield Cluster(lab)
        finally:
            lab.down()
            for host in lab.hosts:
                if isinstance(host, RayHost):
                    host.clear()


@once_in_group
def shared_cluster() -> Cluster:
    """One cluster for all tests of this group: a head, and a worker with two GPUs."""
    stack = ExitStack()
    when_group_ends(stack.close)
    root = Path(f"/tmp/cavvy-ray-{os.getpid()}")
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    cluster = stack.enter_context(cluster_at(root))
    head = cluster.add()
    with cluster.lab.entered():
        cluster.wait([head])
        cluster.wait([cluster.add(gpus=2)])
    return cluster
