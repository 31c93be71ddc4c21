"""Determines the options that give a container access to its node's accelerators and RDMA
network."""

from __future__ import annotations

import glob
import shutil

from ..config import AgentConfig

# The device files of each vendor's accelerators, below /dev. If the work has all devices of the
# node, the vendor is the first one in this table whose first file exists.
FILES = {
    "nvidia": ("nvidiactl",),
    "amd": ("kfd", "dri"),
    "aws": ("neuron[0-9]*",),
    "google": ("accel[0-9]*", "vfio/*"),
    "intel": ("accel/accel[0-9]*", "dri"),
}
# The device files of RDMA (InfiniBand, RoCE, EFA), and of NVIDIA's GDRCopy driver
FABRIC = ("infiniband", "gdrdrv")
# where engines look for descriptions of devices in the Container Device Interface (CDI)
SPECS = ("/etc/cdi", "/var/run/cdi")


def find_vendor(config: AgentConfig, dev: str = "/dev") -> str:
    """Return the vendor of the accelerators that the work may use, or "" if there are no
    accelerators or their vendor is unknown."""
    if config.devices is None and not config.vendor:
        return next(iter(list_vendors(dev)), "")
    return (config.vendor or "nvidia") if config.devices != [] else ""


def find_certain_vendor(config: AgentConfig, dev: str = "/dev") -> str:
    """Return the vendor of the accelerators that the work may use. Returns "" if the work may use
    no accelerators, if their vendor is unknown, or if the node has accelerators of several
    vendors."""
    if config.devices == [] or config.vendor:
        return "" if config.devices == [] else config.vendor
    found = list_vendors(dev)
    return found[0] if config.devices is None and len(found) == 1 else ""


def list_vendors(dev: str = "/dev") -> list[str]:
    """Return the vendors of all accelerators of this node. TPUs since v5e appear only as VFIO
    groups. Devices other than TPUs can also have VFIO groups, so a group counts as a TPU only if
    the node has no other accelerator.
    """
    found = [name for name, files in FILES.items() if _list_files(files[:1], dev)]
    return found or (["google"] if _list_files(("vfio/[0-9]*",), dev) else [])


def make_device_flags(engine: str, config: AgentConfig, dev: str = "/dev") -> list[str]:
    """Return the options of podman or docker for accelerators and RDMA devices, or [] if the node
    has neither."""
    vendor = find_vendor(config, dev)
    fabric = _pass_on(_list_files(FABRIC, dev))
    if vendor != "nvidia":
        group = ["--group-add", "video"] if vendor == "amd" else []
        return [*_pass_on(_list_files(FILES.get(vendor, ()), dev)), *group, *fabric]
    if engine.endswith("podman"):
        names = ["all"] if config.devices is None else config.devices
        return [*_pass_on([f"nvidia.com/gpu={name}" for name in names]), *fabric]
    chosen = "all" if config.devices is None else '"device={}"'.format(",".join(config.devices))
    return ["--gpus", chosen, *fabric]


def make_specs_command(engine: str, config: AgentConfig) -> list[str]:
    """Return the command that writes the CDI description of this node's NVIDIA GPUs for podman. The
    command is [] if it is not needed, or if NVIDIA's toolkit is not installed.
    """
    program = shutil.which("nvidia-ctk")
    known = any(glob.glob(folder + "/nvidia*") for folder in SPECS)
    if program is None or known or not engine.endswith("podman"):
        return []
    return [program, "cdi", "generate", f"--output={SPECS[1]}/nvidia.yaml"]


def _list_files(patterns: tuple[str, ...], dev: str) -> list[str]:
    return [path for name in patterns for path in sorted(glob.glob(f"{dev}/{name}"))]


def _pass_on(names: list[str]) -> list[str]:
    return [part for name in names for part in ("--device", name)]
