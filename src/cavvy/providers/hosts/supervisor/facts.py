"""Reads the raw facts of this host, which the control plane interprets."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import sys

from .files import FileLock, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

SMI = [
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,mig.mode.current",
    "--format=csv,noheader,nounits",
]
# which GPUs NVLink joins across hosts and within this host; old drivers know only the second
SMI_FABRIC = [
    "nvidia-smi",
    "--query-gpu=fabric.clusterUuid,fabric.cliqueId",
    "--format=csv,noheader",
]
SMI_LINKS = ["nvidia-smi", "topo", "-m"]
# what the driver counts about faulty memory: rows of UUID and counts; older drivers fail
SMI_HEALTH = {
    "errors": "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total",
    "remaps": "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure",
}
# the profiles of instances, where on a GPU they may be, and the instances
SMI_MIG = {"profiles": "-lgip", "places": "-lgipp", "instances": "-lgi"}
MIG_RECORDS = "/run/cavvy-mig"  # as in the agent's `mig.py`
# nvidia-smi takes several seconds if the driver is not loaded
SMI_TIMEOUT_S = 20.0
TRY_TIMEOUT_S = 5.0  # time limit for an agent that tries to separate work
# The files that describe AMD's and Intel's GPUs, and this process's control groups.
FACT_FILES = (
    "/sys/class/kfd/kfd/topology/nodes/*/properties",
    "/sys/class/kfd/kfd/topology/nodes/*/name",
    "/sys/class/kfd/kfd/topology/nodes/*/vram_size",
    "/sys/class/kfd/kfd/topology/nodes/*/mem_banks/*/properties",
    "/sys/class/drm/renderD*/device/product_name",
    "/sys/class/drm/card[0-9]*/device/vendor",
    "/sys/class/drm/card[0-9]*/device/device",
    "/sys/class/drm/card[0-9]*/device/tile*/physical_vram_size_bytes",
    "/sys/class/drm/card[0-9]*/lmem_total_bytes",
    "/proc/self/cgroup",
)
GROUP_FILES = (
    "cpu.max",
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "memory.max",
    "memory.limit_in_bytes",
)


def read_facts(root: str, undivided: dict[str, str]) -> Fields:
    """Return the raw facts of this host. `undivided` is what `mig_mode.divide_marked` returns."""
    disk = os.statvfs(root)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": os.uname().sysname,
        "architecture": os.uname().machine,
        "hostname": os.uname().nodename,
        "user": find_user(),
        "python": sys.version.split()[0],
        "address": find_address(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": pages >> 20,
        "disk_gib": disk.f_bavail * disk.f_frsize >> 30,
        "smi": {**ask_smi(), "undivided": undivided},
        "files": read_fact_files(),
        "links": read_fact_links(),
        "usable": [path for path in ("/dev/kfd",) if os.access(path, os.R_OK | os.W_OK)],
        "engine": next((name for name in ("podman", "docker") if shutil.which(name)), ""),
    }


def try_agent(agent: list[str], option: str, root: str, environ: dict[str, str]) -> str:
    """Start an agent that tries to hide Cavvy's folder on this host from a job. Return what the
    agent prints, or "?" if it fails: with the option `--separates`, what prevents the separation of
    jobs; with `--protects`, what namespaces can do. The agent does not hide the installation's
    folder `root` from jobs.
    """
    command = [*agent, option, os.path.dirname(os.path.dirname(root)), root]
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command,
            stdin=null,
            stdout=subprocess.PIPE,
            stderr=null,
            env=environ,
            timeout=TRY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "?"
    return done.stdout.decode(errors="replace").strip()


def find_address() -> str:
    """Return this host's address on the SSH connection from the control plane, or "" if it is
    unknown."""
    return (
        os.environ.get("CAVVY_NODE_ADDRESS")
        or (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2]
    )


def find_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # KeyError: the user id has no name, as in some containers
        return os.environ.get("USER") or str(os.getuid())


def ask_smi() -> Fields:
    """Return the output of nvidia-smi: {"rows"}, or {"error"} if nvidia-smi fails, or {} if
    nvidia-smi is not installed. If MIG splits a GPU, the result has a "listing" of the instances.
    If nvidia-smi can tell, the result has the "fabric" and the "links" of the GPUs.
    """
    if shutil.which(SMI[0]) is None:
        return {}
    found = run_smi(SMI)
    if "text" not in found:
        return found
    rows = [[cell.strip() for cell in line.split(",")] for line in found["text"].splitlines()]
    facts = {"rows": rows, "fabric": run_smi(SMI_FABRIC).get("text", "")}
    for name, query in SMI_HEALTH.items():
        facts[name] = run_smi([SMI[0], query, SMI[2]]).get("text", "")
    facts["links"] = run_smi(SMI_LINKS).get("text", "") if len(rows) > 2 else ""
    if not any(row[4:5] == ["Enabled"] for row in rows):
        return facts
    facts["mig"] = read_mig()
    listed = run_smi([SMI[0], "-L"])
    return {**facts, "listing": listed["text"]} if "text" in listed else listed


def read_mig() -> dict[str, str]:
    """Return what nvidia-smi tells about the MIG instances of this host, and the records of those
    that agents have made (see the agent's `mig.py`). Return only the records if agents of this user
    cannot make instances, which only root can.
    """
    records = os.environ.get("CAVVY_MIG_FOLDER", MIG_RECORDS)
    if os.geteuid() != 0:
        return {"made": read_records(records)}
    os.makedirs(records, mode=0o755, exist_ok=True)
    with FileLock(records + "/lock"):  # no agent makes or removes an instance meanwhile
        found = {
            name: run_smi([SMI[0], "mig", option]).get("text", "")
            for name, option in SMI_MIG.items()
        }
        return {**found, "made": read_records(records)}


def read_records(folder: str) -> str:
    found = [read_text(path) for path in glob.glob(glob.escape(folder) + "/*.json")]
    return "\n".join(filter(None, found))


def run_smi(command: list[str]) -> Fields:
    """Return the output of nvidia-smi as {"text"}, or {"error"} if nvidia-smi fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        return {"error": text[-500:] or f"exit code {done.returncode}"}
    return {"text": text}


def read_fact_files() -> dict[str, str]:
    paths = [path for pattern in FACT_FILES for path in glob.glob(pattern)]
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, inner = line.split(":", 2)
        for mount in (
            [""]
            if not controllers
            else [c for c in controllers.split(",") if c in ("cpu", "memory")]
        ):
            parts = [part for part in inner.split("/") if part]
            for depth in range(len(parts) + 1):
                folder = "/".join(["/sys/fs/cgroup", *([mount] if mount else []), *parts[:depth]])
                paths += [f"{folder}/{name}" for name in GROUP_FILES]
    found = {path: read_text(path) for path in paths if os.path.exists(path)}
    return {path: text for path, text in found.items() if text}


def read_fact_links() -> dict[str, str]:
    """Return the targets of the links in /sys to the graphics cards' devices. The links' targets
    contain the cards' PCI addresses.
    """
    return {path: os.path.realpath(path) for path in glob.glob("/sys/class/drm/card[0-9]*/device")}
