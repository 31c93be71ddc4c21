"""`cavvy doctor`: each planted lack is found with its command, on this machine and through a job."""

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.cli_client import FakeClient, client

from cavvy.agent import doctor
from cavvy.agent.doctor import ExaminedMachine, Finding
from cavvy.cli.main import cli
from cavvy.client import ExecChunk, maintenance_wire

__all__ = ["client"]

SMI = """\
if [ $# = 0 ]; then echo '| NVIDIA-SMI 570.86   Driver Version: 570.86   CUDA Version: 12.8 |'
else echo 'NVIDIA H100 80GB HBM3, 9.0, 570.86'; fi
"""
DOCKER = """\
if [ $1 = info ]; then echo '{"Runtimes": {"runc": {}}}'; else echo 'Docker version 28.0'; fi
"""
TORCH = "__version__ = '2.9.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
IMPORTED = (
    "class cuda:\n is_available = lambda: True\n get_arch_list = lambda: ['sm_80', 'sm_90']\n"
)


class Planted:
    """A machine below a folder: its files, and the programs in its PATH."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        (root / "bin").mkdir()
        (root / "site").mkdir()
        monkeypatch.syspath_prepend(str(root / "site"))
        self.environ = {"PATH": str(root / "bin"), "HOME": str(root)}

    def program(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}")
        path.chmod(0o755)

    def file(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def pci(self, vendor: str, kind: str = "0x030200") -> None:
        self.file("sys/bus/pci/devices/0000:01:00.0/vendor", f"{vendor}\n")
        self.file("sys/bus/pci/devices/0000:01:00.0/class", f"{kind}\n")

    def torch(self, version: str = TORCH, imported: str = IMPORTED) -> None:
        self.file("site/torch/version.py", version)
        self.file("site/torch/__init__.py", imported)
        self.environ["PYTHONPATH"] = str(self.root / "site")

    def examine(self) -> dict[str, Finding]:
        machine = ExaminedMachine(self.environ, str(self.root))
        return {each.name: each for each in doctor.examine(machine, [])}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    # A real torch in this process stays what it is: it cannot be imported twice.
    real = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "torch"}
    for name in real:
        del sys.modules[name]
    yield Planted(tmp_path, monkeypatch)
    sys.modules.pop("torch", None)
    sys.modules.update(real)


def lack(found: dict[str, Finding], name: str) -> str:
    """Return what was found and the fix of a lack."""
    assert found[name].state == doctor.LACK, found[name]
    assert found[name].fix, found[name]
    return f"{found[name].found} | {found[name].fix}"


def test_a_machine_without_gpus_lacks_no_driver(planted: Planted) -> None:
    found = planted.examine()
    assert found["driver"] == Finding("driver", doctor.NOTE, "no NVIDIA GPU")
    assert "toolkit" not in found
    assert found["container"].state == doctor.NOTE


def test_a_healthy_gpu_machine_lacks_nothing_of_its_gpus(planted: Planted) -> None:
    planted.pci(doctor.NVIDIA)
    planted.program("nvidia-smi", SMI)
    planted.program("nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.61'")
    planted.program("docker", DOCKER)
    planted.file("etc/cdi/nvidia.yaml")
    planted.torch()
    found = planted.examine()
    assert found["driver"].found == "570.86, CUDA 12.8, 1 x NVIDIA H100 80GB HBM3"
    names = ("driver", "toolkit", "docker", "docker-gpus", "pytorch")
    assert [found[name].state for name in names] == [doctor.OK] * 5, found


def test_a_missing_driver(planted: Planted) -> None:
    planted.pci(doctor.NVIDIA)
    planted.program("apt-get", "")
    assert "sudo apt-get install -y nvidia-driver" in lack(planted.examine(), "driver")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "sudo reboot"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", "modprobe"),
    ],
)
def test_a_driver_that_fails(planted: Planted, text: str, fix: str) -> None:
    planted.program("nvidia-smi", f'echo "{text}"; exit 9')
    told = lack(planted.examine(), "driver")
    assert text in told
    assert fix in told


@pytest.mark.parametrize(
    ("version", "imported", "told"),
    [
        (TORCH.replace("'12.8'", "None"), IMPORTED, "for CPU"),
        (TORCH.replace("12.8", "13.0"), IMPORTED, "driver does not support"),
        (TORCH, IMPORTED.replace(", 'sm_90'", ""), "without code for compute 9.0"),
        (TORCH, IMPORTED.replace("True", "False"), "CUDA is not available"),
        (TORCH, "raise OSError('libcublas.so.12: cannot open')", "libcublas.so.12"),
    ],
)
def test_a_build_of_pytorch_that_does_not_fit(
    planted: Planted, version: str, imported: str, told: str
) -> None:
    planted.program("nvidia-smi", SMI)
    planted.torch(version, imported)
    assert told in lack(planted.examine(), "pytorch")


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ("9.0", ["sm_80", "sm_90"], True),
        ("8.9", ["sm_80"], True),  # the same major version
        ("8.0", ["sm_86"], False),
        ("12.0", ["sm_80", "sm_90"], False),
        ("12.0", ["sm_90", "compute_90"], True),  # compiled by the driver
        ("10.3", ["sm_100f"], True),
        ("10.3", ["sm_100a"], False),
        ("12.0", ["sm_120a"], True),
        ("[N/A]", [], True),
    ],
)
def test_which_gpus_a_build_has_code_for(capability: str, built: list[str], runs: bool) -> None:
    assert doctor.runs_on(capability, built) is runs


def test_a_toolkit_newer_than_the_driver(planted: Planted) -> None:
    planted.program("nvidia-smi", SMI)
    planted.program("nvcc", "echo 'Cuda compilation tools, release 13.1, V13.1.1'")
    assert "driver of version 580" in lack(planted.examine(), "toolkit")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("permission denied while trying to connect", "usermod -aG docker"),
        ('{"ID":""}\nCannot connect to the Docker daemon', "systemctl start docker"),
    ],
)
def test_an_engine_that_refuses(planted: Planted, text: str, fix: str) -> None:
    planted.program("docker", f"echo '{text}' >&2; exit 1")
    assert fix in lack(planted.examine(), "docker")


def test_containers_without_gpus(planted: Planted) -> None:
    planted.program("nvidia-smi", SMI)
    planted.program("docker", DOCKER)
    assert "nvidia-container-toolkit" in lack(planted.examine(), "docker-gpus")
    planted.program("nvidia-ctk", "")
    assert "nvidia-ctk runtime configure" in lack(planted.examine(), "docker-gpus")
    planted.program("docker", DOCKER.replace('"runc"', '"nvidia"'))
    assert planted.examine()["docker-gpus"].state == doctor.OK


def test_an_amd_gpu(planted: Planted) -> None:
    planted.pci(doctor.AMD, "0x120000")
    assert "modprobe amdgpu" in lack(planted.examine(), "rocm")
    planted.file("dev/kfd")
    assert planted.examine()["rocm"].state == doctor.NOTE
    planted.file("opt/rocm/.info/version", "6.4.1-83\n")
    assert planted.examine()["rocm"] == Finding("rocm", doctor.OK, "ROCm 6.4.1")
    planted.monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("kfd"))
    assert "usermod -aG render,video" in lack(planted.examine(), "rocm")


def test_gpu_nodes_of_a_cluster_without_a_device_plugin(planted: Planted) -> None:
    nodes: list[dict[str, Any]] = [
        {
            "metadata": {"name": "a", "labels": {"nvidia.com/gpu.present": "true"}},
            "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "96"}},
        },
        {
            "metadata": {"name": "b", "labels": {"cloud.google.com/gke-accelerator": "h100"}},
            "status": {"allocatable": {"cpu": "96"}},
        },
    ]
    planted.file("nodes.json", json.dumps({"items": nodes}))
    planted.program("kubectl", f"[ $1 = config ] || cat {planted.root}/nodes.json")
    planted.environ["PATH"] += ":/bin:/usr/bin"
    assert "such as b | kubectl create -f" in lack(planted.examine(), "device plugin")
    planted.file("nodes.json", json.dumps({"items": nodes[:1]}))
    assert planted.examine()["device plugin"].found == "8 GPUs on 1 nodes"
    planted.file("nodes.json", '{"items": [{"metadata": []}]}')
    assert planted.examine()["device plugin"].state == doctor.LACK


def test_a_proxy_that_does_not_answer_and_odd_variables(planted: Planted) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        port = taken.getsockname()[1]
        planted.environ["https_proxy"] = f"http://ada:secret@127.0.0.1:{port}"
        planted.environ["NO_PROXY"] = "localhost"
        told = lack(planted.examine(), "proxy")
    assert "https_proxy cannot be reached" in told
    assert "secret" not in told
    planted.environ["SSL_CERT_FILE"] = "/no/such/file"
    assert "unset SSL_CERT_FILE" in lack(planted.examine(), "certificates")


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        (found,) = doctor.check_ports([port])
    assert (found.state, str(port) in found.found) == (doctor.LACK, True)
    assert doctor.check_ports([port])[0].state == doctor.OK


def test_little_room(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 60)
    assert "du -xh" in lack(planted.examine(), "disk")
    monkeypatch.setattr(doctor, "LEAST_SHM", 1 << 60)
    planted.file("dev/shm/x")
    assert "remount,size=50% /dev/shm" in lack(planted.examine(), "shared memory")
    planted.file(".dockerenv")
    assert "--shm-size=8g" in lack(planted.examine(), "shared memory")


def test_another_environment_than_the_active_one(planted: Planted) -> None:
    planted.environ["VIRTUAL_ENV"] = str(planted.root / "venv")
    assert "python3 -m venv --clear" in lack(planted.examine(), "python")
    planted.file("venv/bin/python3")
    assert f". {planted.root}/venv/bin/activate" in lack(planted.examine(), "python")


def test_the_command_examines_this_machine() -> None:
    answer = CliRunner().invoke(cli, ["doctor", "-o", "json"], prog_name="cavvy")
    told = json.loads(answer.stdout)
    assert told["place"] == "this machine"
    states = [each["state"] for each in told["findings"]]
    assert answer.exit_code == (1 if "lack" in states else 0)
    assert states == sorted(states, key=("lack", "ok", "note").index)
    assert {"driver", "python", "ports", "clock", "proxy"} <= {
        each["name"] for each in told["findings"]
    }
    assert all(each["fix"] for each in told["findings"] if each["state"] == "lack")


def answer_exec(
    fake: FakeClient, monkeypatch: pytest.MonkeyPatch, prelude: str = ""
) -> list[tuple[str, int]]:
    """Let the jobs' node be this machine. Return the jobs and ranks that are asked."""
    asked: list[tuple[str, int]] = []

    def run(project: str, name: str, words: list[str], *, rank: int = 0) -> Iterator[ExecChunk]:
        asked.append((name, rank))
        env = {**os.environ, "PATH": f"{prelude}{os.environ['PATH']}"}
        done = subprocess.run(words, capture_output=True, env=env)
        yield ExecChunk(data=done.stdout + done.stderr, exit_code=None)
        yield ExecChunk(data=b"", exit_code=done.returncode)

    monkeypatch.setattr(FakeClient, "exec", lambda self, *words, **how: run(*words, **how))
    return asked


def test_the_command_examines_the_node_of_a_job(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_exec(client, monkeypatch)
    answer = CliRunner().invoke(cli, ["doctor", "now", "-o", "json"], prog_name="cavvy")
    told = json.loads(answer.stdout)
    assert told["place"] == "now"
    assert "python" in {each["name"] for each in told["findings"]}


@pytest.mark.parametrize(("name", "asked"), [("ssh/big", ("id-of-now", 1)), ("ssh/other", None)])
def test_a_node_is_examined_through_a_job_on_it(
    client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    asked: tuple[str, int] | None,
) -> None:
    idle = SimpleNamespace(job_id="", rank=0, project="default", phase="kept")
    busy = SimpleNamespace(job_id="id-of-now", rank=1, project="default", phase="running")
    hosts = [SimpleNamespace(name="ssh/other", holders=[idle])]
    hosts += [SimpleNamespace(name="ssh/big", holders=[idle, busy])]
    monkeypatch.setattr(maintenance_wire, "list_hosts", lambda client: hosts)
    seen = answer_exec(client, monkeypatch)
    found = CliRunner().invoke(cli, ["doctor", name], prog_name="cavvy")
    assert seen == ([] if asked is None else [asked])
    assert ("a node is examined through a job" in found.output) is (asked is None)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("exit 3", "the examination failed"),
        ("echo 'cavvy-doctor:{}'", "the examination failed"),
        ("echo 'cavvy-doctor:[[[['", "the examination failed"),
        (
            'echo \'cavvy-doctor:{"now": 1, "findings": [{"name": "x", "state": "?", "found": ""}]}\'',
            "unknown state",
        ),
        ("head -c 3000000 /dev/zero", "more than 1 MiB"),
    ],
)
def test_a_hostile_node_is_refused(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, told: str
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    answer_exec(client, monkeypatch, f"{tmp_path}:")
    found = CliRunner().invoke(cli, ["doctor", "now"], prog_name="cavvy")
    assert (found.exit_code, told in found.output) == (1, True), found.output


def test_texts_of_a_node_cannot_control_the_terminal_and_its_clock_is_compared(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"name": "driver", "state": "lack", "found": "\x1b]0;x\x07", "fix": "\x1b[2Jrm"},
        {"name": "clock", "state": "ok", "found": "synchronised"},
    ]
    (tmp_path / "answer").write_text(f"cavvy-doctor:{json.dumps({'now': 5, 'findings': rows})}\n")
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    python.chmod(0o755)
    answer_exec(client, monkeypatch, f"{tmp_path}:")
    found = CliRunner().invoke(cli, ["doctor", "now"], prog_name="cavvy")
    assert found.exit_code == 1
    assert "\x1b" not in found.output
    assert "timedatectl set-ntp true" in found.output


def test_the_program_needs_only_the_standard_library_of_an_old_python() -> None:
    source = Path(doctor.__file__).read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "cavvy" in line or line.startswith("from .")]
    ast.parse(source, feature_version=(3, 8))
