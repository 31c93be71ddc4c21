"""Examines what GPU jobs need on a machine, and prints the findings as one line of JSON.

`cavvy doctor` runs this file as a program of its own, with the Python that a job gets, on this
machine or in a job's environment on a node. So the file imports only the standard library.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import NamedTuple
from urllib.parse import urlsplit

OK, NOTE, LACK = "ok", "note", "lack"
MARK = "cavvy-doctor:"  # begins the line with the findings; a node's shell may print other lines
LEAST_FREE = 5 << 30  # bytes; the wheels of a framework with CUDA need about as much
LEAST_SHM = 1 << 30  # bytes; workers of a data loader exchange batches here
TIMEOUT_S = 20.0
FRAMEWORK_S = 60.0  # to import a framework from a slow disk
# PCI vendors, and the classes of display controllers and of processing accelerators
NVIDIA, AMD = "0x10de", "0x1002"
GPU_CLASSES = ("0x03", "0x12")
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
# The first driver branch of each major version of CUDA (NVIDIA, CUDA Compatibility, table 1). Code
# built for a later minor version runs on each driver of the major version.
DRIVERS = {11: 450, 12: 525, 13: 580}
# the newest wheels of PyTorch for each major version of CUDA
WHEELS = {11: "cu118", 12: "cu126", 13: "cu130"}
TOOLKIT_PAGE = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/"
PLUGIN = (
    "kubectl create -f https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/main/"
    "deployments/static/nvidia-device-plugin.yml"
)


class Finding(NamedTuple):
    """What was found about one thing. `fix` is the command that mends a lack, or ""."""

    name: str
    state: str
    found: str
    fix: str = ""


class Gpus(NamedTuple):
    """What the NVIDIA driver says; `cuda` is the newest version of CUDA that it supports."""

    number: int = 0
    cuda: tuple[int, int] = (0, 0)
    capabilities: tuple[str, ...] = ()


class ExaminedMachine:
    """Reads files below `root` and runs programs with the variables `environ`."""

    def __init__(self, environ: dict[str, str], root: str = "/") -> None:
        self.environ, self.root = environ, root

    def path(self, name: str) -> str:
        return os.path.join(self.root, name.lstrip("/"))

    def read(self, name: str) -> str:
        """Return the text of a file, or "" if it cannot be read."""
        try:
            with open(self.path(name), errors="replace") as file:
                return file.read(1 << 16).strip()
        except OSError:
            return ""

    def find(self, program: str) -> str:
        return shutil.which(program, path=self.environ.get("PATH", os.defpath)) or ""

    def run(self, words: list[str], limit_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Return the exit code and the output of a program; without an answer in time, 124."""
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                env=self.environ,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, f"no answer in {limit_s:.0f} s"
        except OSError as error:
            return 126, str(error)
        return done.returncode, done.stdout.decode("utf-8", "replace").strip()

    @property
    def contained(self) -> bool:
        marks = ("/.dockerenv", "/run/.containerenv")
        kubernetes = "KUBERNETES_SERVICE_HOST" in self.environ
        return kubernetes or any(os.path.exists(self.path(each)) for each in marks)

    def install(self, *packages: str, apt: str = "", dnf: str = "") -> str:
        """Return the command that installs packages with the package manager of this system."""
        for program, words, other in (("apt-get", "install -y", apt), ("dnf", "install -y", dnf)):
            if self.find(program):
                return f"sudo {program} {words} {other or ' '.join(packages)}"
        return "install " + " ".join(packages)

    def vendors(self) -> set[str]:
        """Return the PCI vendors of the GPUs in this machine."""
        found = set()
        for folder in glob.glob(self.path("/sys/bus/pci/devices/*")):
            inner = folder[len(self.root.rstrip("/")) :]
            if self.read(f"{inner}/class").startswith(GPU_CLASSES):
                found.add(self.read(f"{inner}/vendor"))
        return found


def examine(machine: ExaminedMachine, ports: list[int]) -> list[Finding]:
    """Return the findings. `ports` are those that the server's settings name."""
    driver, gpus = check_driver(machine)
    return [
        driver,
        *check_toolkit(machine, gpus),
        *check_rocm(machine),
        *check_containers(machine, gpus),
        *check_plugin(machine),
        *check_frameworks(machine, gpus),
        check_python(machine),
        *check_ports(ports),
        check_clock(),
        *check_disk(machine),
        *check_proxy(machine),
    ]


def check_driver(machine: ExaminedMachine) -> tuple[Finding, Gpus]:
    smi = machine.find("nvidia-smi")
    if not smi:
        if NVIDIA not in machine.vendors():
            return Finding("driver", NOTE, "no NVIDIA GPU"), Gpus()
        fix = machine.install("the NVIDIA driver", apt="nvidia-driver", dnf="nvidia-driver")
        if machine.find("ubuntu-drivers"):
            fix = "sudo ubuntu-drivers install"
        if machine.contained:
            fix = "start the container with its GPUs: docker run --gpus all IMAGE"
        return Finding("driver", LACK, "an NVIDIA GPU without a driver", fix), Gpus()
    code, text = machine.run([smi])
    if code != 0:
        return Finding("driver", LACK, first_line(text), _mend_driver(machine, text)), Gpus()
    _, listed = machine.run(
        [smi, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    )
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    cuda = read_version(re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+)\.(\d+)", text))
    names = ", ".join(f"{count} x {name}" for name, count in count_up([row[0] for row in rows]))
    driver = rows[0][2] if rows else "of unknown version"
    found = f"{driver}, CUDA {cuda[0]}.{cuda[1]}, {names or 'no GPU'}"
    if not rows:
        return Finding("driver", LACK, found, "sudo dmesg | grep -i nvrm"), Gpus()
    return Finding("driver", OK, found), Gpus(len(rows), cuda, tuple(row[1] for row in rows))


def _mend_driver(machine: ExaminedMachine, text: str) -> str:
    if "mismatch" in text:  # the driver was updated, but the old kernel module is still loaded
        return "sudo reboot"
    if machine.contained:
        return "restart the container; if this does not help, run `cavvy doctor` outside of it"
    if "communicate" in text:
        return "sudo modprobe nvidia || sudo dkms autoinstall"
    return "sudo dmesg | grep -i nvrm"


def check_toolkit(machine: ExaminedMachine, gpus: Gpus) -> list[Finding]:
    """Look for CUDA's compiler and cuDNN, which only some programs need: wheels bring their own."""
    if not gpus.number:
        return []
    nvcc = machine.find("nvcc") or machine.path("/usr/local/cuda/bin/nvcc")
    code, text = machine.run([nvcc, "--version"]) if os.path.exists(nvcc) else (127, "")
    version = read_version(re.search(r"release (\d+)\.(\d+)", text))
    if code != 0:
        fix = machine.install("nvidia-cuda-toolkit")
        found = Finding("toolkit", NOTE, "no nvcc; only tasks that compile CUDA code need it", fix)
    elif version[0] > gpus.cuda[0]:
        fix = f"install a driver of version {DRIVERS.get(version[0], 'newer')} or later, or CUDA "
        what = f"nvcc {version[0]}.{version[1]}, which is newer than the driver's CUDA"
        found = Finding("toolkit", LACK, what, f"{fix}{gpus.cuda[0]}")
    else:
        found = Finding("toolkit", OK, f"nvcc {version[0]}.{version[1]}")
    return [found, _find_cudnn(gpus)]


def _find_cudnn(gpus: Gpus) -> Finding:
    for major in sorted(DRIVERS, reverse=True):
        if version := package_version(f"nvidia-cudnn-cu{major}"):
            return Finding("cudnn", OK, f"{version} in this Python, for CUDA {major}")
    library = ctypes.util.find_library("cudnn")
    if library:
        return Finding("cudnn", OK, f"{library} of the system")
    fix = pip("install", f"nvidia-cudnn-cu{gpus.cuda[0]}")
    return Finding("cudnn", NOTE, "none; wheels of PyTorch and JAX bring their own", fix)


def check_rocm(machine: ExaminedMachine) -> list[Finding]:
    version = machine.read("/opt/rocm/.info/version")
    kfd = machine.path("/dev/kfd")
    if not version and not os.path.exists(kfd) and AMD not in machine.vendors():
        return []
    if not os.path.exists(kfd):
        fix = "sudo modprobe amdgpu"
        if machine.contained:
            fix = "start the container with --device=/dev/kfd --device=/dev/dri"
        return [Finding("rocm", LACK, "an AMD GPU without /dev/kfd, so without its driver", fix)]
    if not os.access(kfd, os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER, then log in again"
        return [Finding("rocm", LACK, "this user may not open /dev/kfd", fix)]
    if not version:
        found = "the driver, without ROCm; wheels of PyTorch bring their own"
        return [Finding("rocm", NOTE, found, machine.install("rocm"))]
    return [Finding("rocm", OK, f"ROCm {version.split('-')[0]}")]


def check_containers(machine: ExaminedMachine, gpus: Gpus) -> list[Finding]:
    """Look for podman or docker, and for what gives their containers NVIDIA GPUs."""
    if machine.contained and not (machine.find("docker") or machine.find("podman")):
        return []
    found = []
    for engine in ("podman", "docker"):
        if not machine.find(engine):
            continue
        code, text = machine.run([engine, "info", "--format", "{{json .}}"])
        if code == 0:
            _, version = machine.run([engine, "--version"])
            found.append(Finding(engine, OK, first_line(version)))
            found += _check_gpus_of(machine, engine, text, gpus)
        else:
            told = "\n".join(line for line in text.splitlines() if not line.startswith("{"))
            found.append(Finding(engine, LACK, first_line(told), _mend_engine(engine, told)))
    if not found:
        fix = machine.install("podman")
        found.append(Finding("container", NOTE, "no podman or docker, which `image` needs", fix))
    return found


def _mend_engine(engine: str, text: str) -> str:
    if "ermission denied" in text:
        return f"sudo usermod -aG {engine} $USER, then log in again"
    return f"sudo systemctl start {engine}" if engine == "docker" else "podman info"


def _check_gpus_of(machine: ExaminedMachine, engine: str, info: str, gpus: Gpus) -> list[Finding]:
    if not gpus.number:
        return []
    described = [
        each
        for folder in ("/etc/cdi", "/var/run/cdi")
        for each in glob.glob(machine.path(f"{folder}/*"))
        if "nvidia" in os.path.basename(each)
    ]
    if described or (engine == "docker" and '"nvidia"' in info):
        return [Finding(f"{engine}-gpus", OK, "containers can use the NVIDIA GPUs")]
    if machine.find("nvidia-ctk"):
        fix = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        if engine == "docker":
            fix = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart "
            fix += "docker"
    else:
        fix = f"{machine.install('nvidia-container-toolkit')} (its packages: {TOOLKIT_PAGE})"
    return [Finding(f"{engine}-gpus", LACK, "containers cannot use the NVIDIA GPUs", fix)]


def check_plugin(machine: ExaminedMachine) -> list[Finding]:
    """Look for GPU nodes of the current Kubernetes cluster whose GPUs no device plugin reports."""
    kubectl = machine.find("kubectl")
    if not kubectl or machine.run([kubectl, "config", "current-context"])[0] != 0:
        return []
    code, text = machine.run([kubectl, "get", "nodes", "-o", "json", "--request-timeout=10s"])
    try:
        items = json.loads(text)["items"] if code == 0 else None
        counts = None if items is None else [count_gpus(each) for each in items]
    except (ValueError, LookupError, TypeError, AttributeError):
        counts = None
    if counts is None:
        return [Finding("device plugin", LACK, first_line(text), "kubectl get nodes")]
    unseen = [name for name, labelled, count in counts if labelled and not count]
    if unseen:
        found = f"{len(unseen)} GPU nodes report no GPUs, such as {unseen[0]}"
        return [Finding("device plugin", LACK, found, PLUGIN)]
    total = sum(count for _, _, count in counts)
    state = OK if total else NOTE
    return [Finding("device plugin", state, f"{total} GPUs on {len(counts)} nodes")]


def count_gpus(node: dict) -> tuple[str, bool, int]:  # type: ignore[type-arg]  # JSON
    """Return a node's name, whether its labels name a GPU, and the GPUs that it reports."""
    meta, status = node["metadata"], node["status"]
    labels = meta.get("labels") or {}
    marks = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
    named = "cloud.google.com/gke-accelerator" in labels
    labelled = named or any(labels.get(mark) == "true" for mark in marks)
    resources = status.get("allocatable") or {}
    kinds = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/")
    counts = [int(count) for name, count in resources.items() if name.startswith(kinds)]
    return str(meta["name"]), labelled, sum(counts)


def check_frameworks(machine: ExaminedMachine, gpus: Gpus) -> list[Finding]:
    found = []
    torch = find_module("torch")
    if torch:
        found.append(_check_torch(machine, gpus, torch))
    if version := package_version("jax"):
        plugins = [f"jax-cuda{major}-plugin" for major in DRIVERS]
        has_gpu = any(map(package_version, plugins))
        if gpus.number and not has_gpu:
            fix = pip("install", f"jax[cuda{gpus.cuda[0]}]")
            found.append(Finding("jax", LACK, f"{version}, a build without CUDA", fix))
        else:
            found.append(Finding("jax", OK, version))
    if version := package_version("tensorflow"):
        found.append(Finding("tensorflow", OK, version))
    if not found:
        found.append(Finding("framework", NOTE, "no PyTorch, JAX or TensorFlow in this Python"))
    return found


def _check_torch(machine: ExaminedMachine, gpus: Gpus, folder: str) -> Finding:
    """Compare the build of PyTorch with the driver and the GPUs. Without a GPU, it is not imported,
    which takes seconds.
    """
    try:
        with open(os.path.join(folder, "version.py"), errors="replace") as file:
            text = file.read(1 << 16)
    except OSError as error:
        return Finding("pytorch", LACK, str(error), pip("install", "--force-reinstall", "torch"))
    values = dict(re.findall(r"^(\w+)\s*(?::[^=\n]+)?=\s*'([^']*)'", text, re.MULTILINE))
    version, cuda, hip = (values.get(name, "") for name in ("__version__", "cuda", "hip"))
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    found = f"{version} for {build}"
    if not gpus.number:
        return Finding("pytorch", OK, found)
    fix = _torch_command(gpus)
    if not cuda:
        return Finding("pytorch", LACK, f"{found}, so it cannot use the NVIDIA GPU", fix)
    if int(cuda.split(".")[0]) > gpus.cuda[0]:
        return Finding("pytorch", LACK, f"{found}, which the driver does not support", fix)
    program = "import torch;print(torch.cuda.is_available(),*torch.cuda.get_arch_list())"
    code, told = machine.run([sys.executable, "-c", program], FRAMEWORK_S)
    words = told.splitlines()[-1].split() if told else []
    if code != 0 or words[:1] not in (["True"], ["False"]):
        problem = told.splitlines()[-1] if told else f"exit code {code}"
        return Finding("pytorch", LACK, f"{found}: {problem}", fix)
    missing = [each for each in gpus.capabilities if not runs_on(each, words[1:])]
    if missing:
        return Finding("pytorch", LACK, f"{found}, without code for compute {missing[0]}", fix)
    if words[0] != "True":
        return Finding("pytorch", LACK, f"{found}: CUDA is not available", "nvidia-smi")
    return Finding("pytorch", OK, found)


def _torch_command(gpus: Gpus) -> str:
    wheels = WHEELS.get(gpus.cuda[0], WHEELS[max(WHEELS)])
    url = f"https://download.pytorch.org/whl/{wheels}"
    return pip("install", "--force-reinstall", "torch", "--index-url", url)


def runs_on(capability: str, built: list[str]) -> bool:
    """Return whether a build has code for a GPU: sm_XY runs on the same major version with the same
    or a higher minor version, compute_XY on all later GPUs (CUDA C++ Programming Guide, "Binary
    Compatibility" and "PTX Compatibility"). A capability that is not a number, such as [N/A], is
    not judged.
    """
    if not re.fullmatch(r"\d+\.\d", capability):
        return True
    major, minor = map(int, capability.split("."))
    for each in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", each)
        if match is None:
            continue
        place = (int(match.group(2)), int(match.group(3)))
        if match.group(4) == "a" and place != (major, minor):
            continue  # code for one GPU only
        if match.group(1) == "compute" and place <= (major, minor):
            return True
        if place[0] == major and place[1] <= minor:
            return True
    return False


def check_python(machine: ExaminedMachine) -> Finding:
    """Describe the Python that runs this program, which is the one that a job gets."""
    version = ".".join(map(str, sys.version_info[:3]))
    active = machine.environ.get("VIRTUAL_ENV") or machine.environ.get("CONDA_PREFIX") or ""
    inside = sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    where = f"the environment {sys.prefix}" if inside else f"{sys.executable}, no environment"
    found = f"Python {version} of {where}"
    if active and os.path.realpath(active) != os.path.realpath(sys.prefix):
        if not os.path.exists(os.path.join(active, "bin", "python3")):
            fix = f"python3 -m venv --clear {active}"
            return Finding("python", LACK, f"{found}; {active} has no working Python", fix)
        fix = f". {active}/bin/activate"
        return Finding("python", LACK, f"{found}, although {active} is active", fix)
    if not inside and not machine.contained:
        fix = "python3 -m venv .venv && . .venv/bin/activate"
        return Finding("python", NOTE, found, fix)
    return Finding("python", OK, found)


def check_ports(ports: list[int]) -> list[Finding]:
    """Check that this machine has the ports that jobs and the server use."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname(), 5).close()
    except OSError as error:
        fix = "sudo ip link set lo up"
        return [Finding("ports", LACK, f"no connection within this machine: {error}", fix)]
    taken = [port for port in ports if not is_free(port)]
    if taken:
        fix = f"sudo ss -ltnp 'sport = :{taken[0]}'"
        found = f"another program uses {', '.join(map(str, taken))}"
        return [Finding("ports", LACK, found, fix)]
    free = ", ".join(map(str, ports))
    return [Finding("ports", OK, f"{free} free" if free else "connections within the machine")]


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def check_clock() -> Finding:
    """Ask the kernel whether a time service keeps the clock (adjtimex(2), which changes nothing
    with modes 0).
    """
    fix = "sudo timedatectl set-ntp true"
    try:
        library = ctypes.CDLL(None)
        state = library.adjtimex(ctypes.create_string_buffer(512))  # at least sizeof(struct timex)
    except (OSError, AttributeError):
        return Finding("clock", NOTE, "this system does not say whether its clock is synchronised")
    if state == TIME_ERROR:
        return Finding("clock", NOTE, "no time service has synchronised the clock", fix)
    return Finding("clock", OK, "synchronised")


def check_disk(machine: ExaminedMachine) -> list[Finding]:
    found = []
    home = machine.environ.get("HOME") or os.path.expanduser("~")
    folders = {"folder": os.getcwd(), "home": home, "temporary": machine.environ.get("TMPDIR", "")}
    seen = set()
    for what, folder in folders.items():
        folder = folder or "/tmp"
        try:
            status, device = os.statvfs(folder), os.stat(folder).st_dev
        except OSError as error:
            found.append(Finding("disk", LACK, f"{folder}: {error.strerror}", f"mkdir -p {folder}"))
            continue
        if device in seen:
            continue
        seen.add(device)
        free = status.f_bavail * status.f_frsize
        text = f"{free / (1 << 30):.1f} GiB free at {folder} ({what})"
        if not os.access(folder, os.W_OK):
            found.append(
                Finding("disk", LACK, f"{folder} cannot be written to", f"ls -ld {folder}")
            )
        elif free < LEAST_FREE:
            fix = f"du -xh -d 2 {folder} | sort -h | tail -20"
            found.append(Finding("disk", LACK, text, fix))
        elif status.f_files and status.f_favail < 10_000:
            fix = f"du -x --inodes -d 2 {folder} | sort -n | tail -20"
            found.append(
                Finding("disk", LACK, f"only {status.f_favail} files free at {folder}", fix)
            )
        else:
            found.append(Finding("disk", OK, text))
    return [*found, *_check_shm(machine)]


def _check_shm(machine: ExaminedMachine) -> list[Finding]:
    try:
        status = os.statvfs(machine.path("/dev/shm"))
    except OSError:
        return []
    size = status.f_blocks * status.f_frsize
    if size >= LEAST_SHM:
        return []
    fix = (
        "start the container with --shm-size=8g"
        if machine.contained
        else ("sudo mount -o remount,size=50% /dev/shm")
    )
    found = f"/dev/shm has only {size >> 20} MiB; workers of data loaders can crash"
    return [Finding("shared memory", LACK, found, fix)]


def check_proxy(machine: ExaminedMachine) -> list[Finding]:
    """Check the proxy that the environment names, and the file with certificates."""
    found = []
    for name in ("https_proxy", "http_proxy"):
        values = {machine.environ.get(each, "") for each in (name, name.upper())} - {""}
        if len(values) > 1:
            fix = f'export {name}="${name.upper()}"'
            found.append(Finding("proxy", LACK, f"{name} and {name.upper()} differ", fix))
        for value in sorted(values)[:1]:
            found.append(_reach_proxy(name, value))
    if found and not (machine.environ.get("no_proxy") or machine.environ.get("NO_PROXY")):
        what = "NO_PROXY is empty, so requests within this machine go to the proxy"
        found.append(Finding("proxy", LACK, what, "export NO_PROXY=localhost,127.0.0.1,::1"))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        path = machine.environ.get(name, "")
        if path and not os.path.isfile(path):
            found.append(Finding("certificates", LACK, f"{name} names no file", f"unset {name}"))
    return found or [Finding("proxy", OK, "none")]


def _reach_proxy(name: str, value: str) -> Finding:
    try:
        parts = urlsplit(value if "//" in value else f"//{value}")
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((host, port), 5).close()
    except (OSError, ValueError) as error:  # the URL may contain a password
        return Finding("proxy", LACK, f"{name} cannot be reached: {error}", f"unset {name}")
    return Finding("proxy", OK, f"{name} is {host}:{port}")


def find_module(name: str) -> str:
    """Return the folder of an installed package, which is not imported, or ""."""
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return ""
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return folders[0] if folders else ""


def package_version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name) or ""
    except PackageNotFoundError:
        return ""


def pip(*words: str) -> str:
    return " ".join([sys.executable, "-m", "pip", *words])


def read_version(match: re.Match[str] | None) -> tuple[int, int]:
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def count_up(names: list[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else "no answer"


def main(arguments: list[str]) -> None:
    findings = examine(ExaminedMachine(dict(os.environ)), [int(each) for each in arguments])
    told = {"now": time.time(), "findings": [each._asdict() for each in findings]}
    print(f"\n{MARK}{json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
