"""Reads the resources that a machine has for jobs: CPUs and memory within this user's limits, free
disk space, and accelerators.

Finds Apple's GPU, which is part of the chip and uses the machine's memory.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from re import sub

from cavvy.domain.values import Struct, replace
from cavvy.providers.hosts.amd import find_amd
from cavvy.providers.hosts.devices import (
    DeviceReading,
    HostDevice,
    MachineSources,
    read_number,
    read_text,
)
from cavvy.providers.hosts.intel import find_intel
from cavvy.providers.hosts.nvidia import find_nvidia, open_nvml, read_islands
from cavvy.providers.hosts.supervisor.facts import SMI_LINKS, read_mig, run_smi

_MIB = 1 << 20
_PAIR = 2  # of two devices, a job gets one or both, with or without NVLink


class ThisMachine(Struct, frozen=True, kw_only=True):
    """A machine's hardware. `notes` explain to users why devices were omitted."""

    hostname: str  # contains only [a-z0-9.-]
    cpus: float
    memory_mib: int
    disk_gib: int
    architecture: str = ""  # the CPU architecture, as printed by `uname -m`
    devices: Sequence[HostDevice] = ()
    notes: Sequence[str] = ()
    islands: tuple[tuple[str, ...], ...] = ()  # IDs of devices that NVLink joins

    def limit(
        self, *, cpus: float | None, memory_gib: float | None, accelerators: bool
    ) -> "ThisMachine":
        """Return the machine, limited to the part that jobs may use. None means no limit."""
        return replace(
            self,
            cpus=self.cpus if cpus is None else min(self.cpus, cpus),
            memory_mib=self.memory_mib
            if memory_gib is None
            else min(self.memory_mib, round(memory_gib * 1024)),
            devices=self.devices if accelerators else (),
            islands=self.islands if accelerators else (),
        )


def discover(sources: MachineSources) -> ThisMachine:
    """Read all facts again. The call blocks until the drivers answer."""
    found = [find(sources) for find in (find_nvidia, find_amd, find_intel, find_apple)]
    devices = [device for each in found for device in each.devices]
    whole = [device for device in devices if not device.profiles]
    groups = _cgroups(sources)
    return ThisMachine(
        hostname=sub(r"[^a-z0-9.-]+", "-", sources.hostname.lower()).strip("-.") or "localhost",
        cpus=min(
            [float(sources.cpus()), *(limit for path in groups for limit in _cpu_limits(path))]
        ),
        memory_mib=min(
            [sources.memory_mib(), *(limit for path in groups for limit in _memory_limits(path))]
        ),
        disk_gib=sources.disk_gib(),
        architecture=sources.architecture,
        devices=devices,
        islands=read_islands(sources.links(), whole) if len(whole) > _PAIR else (),
        notes=[note for each in found for note in each.notes],
    )


def this_machine(home: Path) -> MachineSources:
    """Return the sources of facts about the real machine. `home` is the folder where jobs work."""
    return MachineSources(
        environ=os.environ,
        system=os.uname().sysname,
        architecture=os.uname().machine,
        hostname=socket.gethostname(),
        cpus=_usable_cpus,
        memory_mib=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB,
        disk_gib=lambda: shutil.disk_usage(home).free >> 30,
        nvml=open_nvml,
        links=lambda: run_smi(SMI_LINKS).get("text", ""),
        mig=read_mig,
        sysctl=_sysctl,
        usable=lambda path: os.access(path, os.R_OK | os.W_OK),
    )


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sysctl(name: str) -> str:
    done = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False
    )
    return done.stdout.strip()


def _cgroups(sources: MachineSources) -> list[Path]:
    """Return the folders of this process's control groups and all their parents, for cgroups v1 and
    v2."""
    mount = sources.root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in read_text(sources.root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = (
            [""]
            if not controllers
            else [name for name in controllers.split(",") if name in {"cpu", "memory"}]
        )
        for name in names:
            inner = PurePosixPath(path.lstrip("/"))
            folders += [mount / name / part for part in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


def _cpu_limits(group: Path) -> list[float]:
    words = read_text(
        group / "cpu.max"
    ).split()  # cgroups v2: "QUOTA PERIOD" or "max PERIOD", in microseconds
    if len(words) == 2 and words[0].isdigit():
        return [int(words[0]) / int(words[1])]
    quota, period = (
        read_number(group / "cpu.cfs_quota_us"),
        read_number(group / "cpu.cfs_period_us"),
    )
    return [quota / period] if quota and period and quota > 0 else []


def _memory_limits(group: Path) -> list[int]:
    limits = (read_number(group / "memory.max"), read_number(group / "memory.limit_in_bytes"))
    return [limit // _MIB for limit in limits if limit]


def find_apple(sources: MachineSources) -> DeviceReading:
    """Return one GPU if Apple made the chip, otherwise return no GPU."""
    if sources.system != "Darwin":
        return DeviceReading()
    try:
        chip = sources.sysctl("machdep.cpu.brand_string")
        memory_mib = int(sources.sysctl("hw.memsize")) >> 20
    except (OSError, ValueError) as error:
        return DeviceReading(
            notes=[f"Apple: sysctl does not answer, so no GPU is offered ({error})"]
        )
    if not chip.startswith("Apple"):
        return DeviceReading()
    return DeviceReading(
        devices=[
            HostDevice(id="apple-0", index=0, vendor="apple", product=chip, memory_mib=memory_mib)
        ]
    )
