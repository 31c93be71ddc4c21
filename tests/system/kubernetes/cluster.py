"""A real Kubernetes on this machine for tests: two nodes with eight pretended GPUs each.

It is built once, from Debian's source, into ~/.cache/cavvy; see build.sh. One cluster serves all
tests of a process. `python -m tests.system.kubernetes.cluster` leaves one running for trying things
out, until Ctrl-D; with `build` it only makes ready what a cluster takes, which a run of the tests
then finds.
"""

import atexit
import importlib.util
import io
import json
import marshal
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.shared import when_group_ends
from tests.system.packages import alone, install_packages, install_whole
from tests.verdict import SkippedForTime
from tests.waits import START_S, wait_until

CACHE = Path("~/.cache/cavvy/kubernetes-1.20.2").expanduser()
HERE = Path(__file__).parent
PLUGIN_NEEDS = CACHE / "grpc"  # modules
PACKAGES = (
    "etcd-server",
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "conntrack",
    "iproute2",
    "iptables",
    "curl",
    "openssl",
)
BUILDERS = ("golang-go", "dpkg-dev", "golang-github-modern-go-reflect2-dev")
BUILD_S = 2400  # 330 s of CPU, on machines that are busy with others
SPARING = {"GOGC": "400"}  # programs in Go collect their garbage less often, for more memory
_TRUST = ssl._create_unverified_context()  # its certificate is made anew each time
TOO_LATE = 75  # the exit code of a keeper whose cluster did not come up in time
GROUP = f"cavvy-kube{os.getpid()}-"  # of control groups; runs beside each other must not meet


class Cluster:
    """A running cluster. `kubeconfig` reaches it as its administrator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = 2
        self.kubeconfig = folder / "admin.conf"
        self._keeper: subprocess.Popen[str] | None = None

    def up(self) -> None:
        door = socket.create_server(("127.0.0.1", 0))
        os.set_inheritable(door.fileno(), True)
        config = {
            "folder": str(self.folder / "k"),
            "bin": str(CACHE / "bin"),
            "images": [str(path) for path in sorted((CACHE / "images").glob("*.tar"))],
            "python": sys.executable,
            "plugin": str(HERE / "plugin.py"),
            "fd": door.fileno(),
            "group": GROUP,
            "nodes": self.nodes,
            "step_s": START_S,
        }
        (self.folder / "k").mkdir(parents=True)
        path = self.folder / "keeper.json"
        path.write_text(json.dumps(config))
        cleaner = ["setsid", "sh", str(HERE / "cleaner.sh"), GROUP, str(self.folder)]
        self._cleaner = subprocess.Popen(cleaner, stdin=subprocess.PIPE)
        command = [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount",
        ]
        command += [
            "--propagation=private",
            "--mount-proc",
            sys.executable,
            "-u",
            str(HERE / "keeper.py"),
            str(path),
        ]
        with open(self.folder / "keeper.log", "wb") as log:
            self._keeper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=[door.fileno()],
                env={**os.environ, **SPARING, "PATH": path_of(), "PYTHONPATH": str(PLUGIN_NEEDS)},
                start_new_session=True,
            )
        address = f"https://127.0.0.1:{door.getsockname()[1]}"
        door.close()
        self._write_kubeconfig(address)
        if self._answer(2 * START_S) != "up":
            said = (self.folder / "keeper.log").read_text()[-800:]
            late = self._keeper.wait() in (-signal.SIGKILL, TOO_LATE)
            raise (SkippedForTime if late else RuntimeError)(f"the cluster did not come up: {said}")
        self.until_ready(2)

    def until_ready(self, nodes: int) -> None:
        wait_until(lambda: self.count_ready() >= nodes, seconds=START_S, pause_s=0.2)

    def count_ready(self) -> int:
        """The nodes that are ready and have their GPUs."""
        found = self.kubectl("get", "nodes", "-o", "json", check=False)
        count = 0
        for node in json.loads(found)["items"] if found else ():
            conditions = {
                each["type"]: each["status"] for each in node["status"].get("conditions", ())
            }
            has = node["status"].get("allocatable", {}).get("nvidia.com/gpu", "0") != "0"
            count += conditions.get("Ready") == "True" and has
        return count

    def down(self) -> None:
        if self._keeper is not None:
            with suppress(OSError):
                self._keeper.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            self._keeper.kill()  # its child goes with it, and with that all of the cluster
            self._keeper.wait()
            self._keeper.stdout.close()  # type: ignore[union-attr]  # it is a pipe
            self._keeper = None
            self._cleaner.communicate(timeout=START_S)

    def kill_node(self, number: int) -> None:
        self._tell(f"kill-node {number}")

    def start_node(self, number: int) -> None:
        self._tell(f"start-node {number}")
        self.until_ready(self.nodes)

    def set_unhealthy(self, number: int, *devices: str) -> None:
        path = self.folder / f"k/n{number}/varlib/device-plugins/unhealthy"
        path.write_text("\n".join(devices))

    def kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def api(self, path: str, method: str = "GET", body: "dict[str, Any] | None" = None) -> Any:
        """What the API server answers to its administrator; much faster than kubectl."""
        headers = {"Authorization": "Bearer admin-token", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self.address + path, data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, context=_TRUST, timeout=START_S) as answer:
            return json.load(answer)

    def pods(self, namespace: str = "default") -> list[dict[str, Any]]:
        """The pods of gangs."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=cavvy/gang"
        found: list[dict[str, Any]] = self.api(path)["items"]
        return found

    def tell_state(self) -> str:
        """Its nodes, pods and latest events, and how full the disk is, for the report of a test
        that failed.
        """
        tables = [
            self.kubectl("get", *words, check=False)
            for words in (
                ("leases", "-n", "kube-node-lease", "-o", "yaml"),
                ("events", "-A", "--sort-by=.lastTimestamp"),
                ("pods", "-A", "-o", "wide"),
                ("nodes", "-o", "wide"),
            )
        ]
        usage, now = shutil.disk_usage(self.folder), time.strftime("%FT%TZ", time.gmtime())
        tables[0] = "\n".join(line for line in tables[0].splitlines() if "Time:" in line)
        tables[1] = "\n".join(tables[1].splitlines()[-15:])
        return "\n".join(
            [*tables, f"{now}: {usage.free >> 20} MiB of {usage.total >> 20} are free"]
        )

    def make_namespace(self, name: str) -> None:
        self.api("/api/v1/namespaces", "POST", {"metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        wait_until(lambda: self.api(path)["items"])  # without it no pod is admitted

    def drop_namespace(self, name: str) -> None:
        """Everything in it goes, in a while; what its pods held is free at once."""
        self.api(f"/api/v1/namespaces/{name}/pods", "DELETE", {"gracePeriodSeconds": 0})
        self.api(f"/api/v1/namespaces/{name}", "DELETE")

    @property
    def address(self) -> str:
        address: str = json.loads(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        return address

    def _tell(self, command: str) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(command + "\n")
        self._keeper.stdin.flush()
        assert self._answer(START_S) == "done"

    def _answer(self, seconds: float) -> str:
        assert self._keeper is not None
        timer = threading.Timer(seconds, self._keeper.kill)
        timer.start()
        try:
            return self._keeper.stdout.readline().strip()  # type: ignore[union-attr]  # it is a pipe
        finally:
            timer.cancel()

    def _write_kubeconfig(self, address: str) -> None:
        cluster = {"server": address, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "meadow", "cluster": cluster}],
            "users": [
                {"name": "ann", "user": {"token": "admin-token"}},
                {"name": "viewer", "user": {"token": "viewer-token"}},
            ],
            "contexts": [
                {"name": "meadow", "context": {"cluster": "meadow", "user": "ann"}},
                {"name": "viewer", "context": {"cluster": "meadow", "user": "viewer"}},
            ],
            "current-context": "meadow",
        }
        self.kubeconfig.write_text(json.dumps(config))


@cache
def shared() -> "Cluster | pytest.skip.Exception":
    """The cluster of all tests of this group, or the skip that says why there is none. A start that
    fails is the only one of a run, whatever becomes of the process.
    """
    if (tried := first_try()) is not None:
        return tried
    try:
        if reason := why_not():
            return no_more(pytest.skip.Exception(reason))
        root = Path(tempfile.mkdtemp(prefix="rmk-", dir="/tmp"))
        cluster = Cluster(root)
        try:
            cluster.up()
        except BaseException:
            cluster.down()
            raise
    except SkippedForTime as late:
        return no_more(late)
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        return no_more(pytest.skip.Exception(f"no Kubernetes could be started here: {error}"))
    when_group_ends(lambda: forget(cluster))
    return cluster


def forget(cluster: Cluster) -> None:
    """End it. A later call makes another one."""
    cluster.down()
    tries().unlink(missing_ok=True)
    shared.cache_clear()


def shared_or_skip() -> Cluster:
    """This process's cluster; the test is skipped where there is none."""
    found = shared()
    if isinstance(found, Cluster):
        return found
    raise found


def tries() -> Path:
    """Where this run's try is noted: processes of one run of pytest, one after the other, know
    of it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"p{os.getpid()}"
    return Path(tempfile.gettempdir(), f"cavvy-kubernetes-{run}")


def first_try() -> "pytest.skip.Exception | None":
    """None for the first try of this run; else what became of that one."""
    atexit.register(tries().unlink, missing_ok=True)
    died = "the process that made a Kubernetes in this run has died; it is not tried again"
    try:
        with open(tries(), "x") as file:
            json.dump({"late": True, "reason": died}, file)
    except FileExistsError:
        said = json.loads(tries().read_text())
        return (SkippedForTime if said["late"] else pytest.skip.Exception)(said["reason"])
    return None


def no_more(skip: pytest.skip.Exception) -> pytest.skip.Exception:
    said = {"late": isinstance(skip, SkippedForTime), "reason": str(skip)}
    tries().write_text(json.dumps(said))
    return skip


def why_not() -> str:
    """Why no cluster can be made here; installs and builds what is missing, once. Raises
    SkippedForTime where that takes longer than BUILD_S.
    """
    if os.getuid() != 0:
        return "a Kubernetes is started by root here: run the tests as root"
    if not os.path.isdir("/sys/fs/cgroup/cpuset"):
        return (
            "Kubernetes 1.20 needs control groups of version 1, which this machine does not have: "
            "boot with systemd.unified_cgroup_hierarchy=0"
        )
    give_up = time.monotonic() + BUILD_S
    with alone(CACHE.name, BUILD_S):
        return make_ready(give_up)


def make_ready(give_up: float) -> str:
    """Install, build and pack what is missing; why that cannot be done. Ends by `give_up`, a
    time of the clock.
    """
    tools = ("etcd", "containerd", "runc", "ctr", "conntrack", "ip", "busybox", "curl", "openssl")
    try:
        has = all(shutil.which(tool, path=path_of()) for tool in tools) and os.path.exists(
            "/usr/lib/cni/ptp"
        )
        if not has and (why := install_packages(PACKAGES)):
            return why
        if not shutil.which("kubectl") and (why := install_packages(["kubernetes-client"])):
            return why
        if not (CACHE / "bin/kubelet").exists():  # the folder appears when all is in it
            if why := install_packages(BUILDERS):
                return why
            step(give_up, "bash", str(HERE / "build.sh"), str(CACHE))
        install_whole(PLUGIN_NEEDS, install_grpc)
        make_images()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        return f"Kubernetes could not be made ready: {error} {said.decode(errors='replace')[-300:]}"
    return ""


def install_grpc(folder: Path, seconds: float) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "grpcio"]
    step(time.monotonic() + seconds, *command)


def step(give_up: float, *command: str) -> None:
    """Run a command to its end; what it started ends with it when the time is up or this process
    is interrupted.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=max(1.0, give_up - time.monotonic()))
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SkippedForTime(f"{command[0]} {command[1]} takes too long") from error
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def make_images() -> None:
    """Images without a registry: the pause, a busybox, and a busybox with this machine's Python.

    That one has Python's own modules compiled, as the images of Debian, conda and NVIDIA have them.
    """
    folder = CACHE / "images"
    folder.mkdir(exist_ok=True)
    from cavvy.providers.hosts.bundles import pack_python

    if not (folder / "box.tar").exists():  # the last of the two
        write_image(
            folder / "pause.tar", "localhost/pause:1", None, ["/bin/busybox", "sleep", "2147483647"]
        )
        write_image(folder / "box.tar", "localhost/box:1", None, ["sh"])
    version = "{}.{}.{}".format(*sys.version_info[:3])
    current = folder / f"python-{version}-3.tar"
    for old in set(folder.glob("python-*.tar")) - {current}:
        old.unlink()
    if not current.exists():
        with tempfile.TemporaryDirectory() as scratch:
            packed = pack_python(Path(scratch)).content
        write_image(current, "localhost/python:1", packed, ["sh"], list_libraries())


def list_libraries() -> "dict[str, Path]":
    """What programs of this machine need of it, so that they run in the image when their folders
    are mounted.
    """
    torch = Path(sysconfig.get_path("purelib"), "torch")
    files = [
        Path(sys.base_prefix, "bin/python3"),
        *Path(sysconfig.get_config_var("DESTSHARED") or "/none").glob("*.so"),
    ]
    files += [*torch.glob("_C*.so"), *torch.glob("lib/*.so")]
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    paths = {
        Path(word)
        for line in said.splitlines()
        for word in line.split()
        if word.startswith(("/lib", "/usr/lib"))
    }
    return {
        str(path).removeprefix("/usr").lstrip("/"): path for path in sorted(paths) if path.is_file()
    }


def write_image(
    path: Path,
    name: str,
    python: "bytes | None",
    command: "list[str]",
    more: "Mapping[str, Path] | None" = None,
) -> None:
    """A docker archive of one layer; `more` are files of this machine by their places in the
    image.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        busybox = Path(shutil.which("busybox") or "/bin/busybox")
        for folder in ("bin", "usr", "usr/bin", "tmp", "etc", "root"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        add(tar, "bin/busybox", busybox.read_bytes(), 0o755)
        applets = subprocess.run(
            [busybox, "--list"], capture_output=True, text=True, check=True
        ).stdout.split()
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        if python is not None:
            with tarfile.open(fileobj=io.BytesIO(python)) as packed:
                for member in packed:
                    content = packed.extractfile(member)
                    assert content is not None
                    add_module(tar, f"opt/python/{member.name}", content.read(), member.mode)
            home = "/opt/python"
            start = (
                f"#!/bin/sh\nexec {home}/lib/loader --library-path {home}/lib "
                f'{home}/bin/python3 "$@"\n'
            )
            add(tar, "usr/bin/python3", start.encode(), 0o755)
        for place, file in (more or {}).items():
            add(tar, place, file.read_bytes(), 0o755)
    from hashlib import sha256

    digest = sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "MADE_FROM=an image"],
            "Cmd": command,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    text = json.dumps(config).encode()
    settings = f"{sha256(text).hexdigest()}.json"
    fresh = path.with_suffix(".new")
    with tarfile.open(fresh, "w") as tar:
        add(tar, "layer.tar", layer.getvalue(), 0o644)
        add(tar, settings, text, 0o644)
        manifest = [{"Config": settings, "RepoTags": [name], "Layers": ["layer.tar"]}]
        add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)
    fresh.rename(path)


def add_module(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    """A file, and its compiled form if it is a module."""
    add(tar, name, content, mode)
    with suppress(SyntaxError):  # of grammars' examples
        if name.endswith(".py"):
            path = Path(name)
            code = marshal.dumps(compile(content, f"/{name}", "exec", dont_inherit=True))
            head = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + importlib.util.source_hash(content)
            compiled = f"{path.parent}/__pycache__/{path.stem}.{sys.implementation.cache_tag}.pyc"
            add(tar, compiled, head + code, 0o644)


def add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def path_of() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


if __name__ == "__main__":
    began = time.monotonic()
    if sys.argv[1:] == ["build"]:
        sys.exit(why_not() or None)
    found = shared()
    if not isinstance(found, Cluster):
        sys.exit(str(found))
    took = f"up after {time.monotonic() - began:.1f} s; Ctrl-D ends it"
    print(f"export KUBECONFIG={found.kubeconfig}    # {took}", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words:
            {"kill": found.kill_node, "start": found.start_node}[words[0]](int(words[1]))
