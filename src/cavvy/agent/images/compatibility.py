"""Compares the work's packages and image with this node's accelerators and their driver, before the
setup installs anything and before the work starts.

Images declare the CUDA version that they require in the variable NVIDIA_REQUIRE_CUDA or, without
it, in CUDA_VERSION. NVIDIA's base images declare their CUDA version.
"""

from __future__ import annotations

import os
import re
import subprocess

from ..allowed_folders import AllowedFolders, LeadsOutside
from ..config import AgentConfig
from ..disk import read_text
from ..documents import WorkConfig
from .devices import find_certain_vendor, find_vendor
from .vendors import (
    explain_image,
    explain_packages,
    find_packages,
    find_required,
    list_requirement_files,
)

LONGEST = 1 << 20  # characters of a requirements file that are read

DRIVER = "/sys/module/nvidia/version"

# The oldest Linux driver that runs every minor release of a CUDA major version, from "CUDA Minor
# Version Compatibility" and, before 11, from "CUDA Toolkit and Corresponding Driver Versions" of
# docs.nvidia.com/cuda/cuda-toolkit-release-notes.
OLDEST_NVIDIA_DRIVERS = (
    ((13, 0), "580"),
    ((12, 0), "525.60.13"),
    ((11, 0), "450.80.02"),
    ((10, 2), "440.33"),
    ((10, 1), "418.39"),
    ((10, 0), "410.48"),
    ((9, 2), "396.26"),
    ((9, 1), "390.46"),
    ((9, 0), "384.81"),
    ((8, 0), "375.26"),
)


def find_misfit(config: AgentConfig, work: WorkConfig, folder: str) -> str | None:
    """Return the reason why the packages and the image of the work cannot use this node's
    accelerators, or None if no reason is known. `folder` contains the working folder's files.
    """
    vendor = find_certain_vendor(config)
    if not vendor or not work.accelerators_per_node:
        return None
    inf1 = is_inf1() if vendor == "aws" else None
    packages = find_packages(work.setup or "")
    for path in list_requirement_files(work.setup or ""):
        for name, lines in find_required(_read(folder, path)).items():
            packages.setdefault(name, []).extend(lines)
    if reason := explain_packages(packages, vendor, inf1=inf1):
        return reason
    if work.image and work.build is None and (reason := explain_image(work.image, vendor)):
        return reason
    names = [*packages.get(vendor, ()), *([work.image] if work.image else ())]
    if vendor == "amd":
        return find_rocm_objection(names, read_amd_driver())
    if vendor == "aws":
        return find_neuron_objection(read_neuron_driver(), inf1=inf1)
    return None


def find_image_misfit(
    config: AgentConfig, variables: dict[str, str], labels: dict[str, str]
) -> str | None:
    """Return the reason why the image with these variables and labels cannot run on this node's
    NVIDIA driver. Returns None if no reason is known, or if the accelerators are not from NVIDIA.
    """
    if config.devices == [] or find_vendor(config) not in ("nvidia", ""):
        return None
    return find_objection(variables, labels, read_driver())


def _read(folder: str, path: str) -> str:
    """Return the text of a requirements file, or "" if the file is unreadable (pip reports why)."""
    try:
        file = AllowedFolders([folder]).open_file(os.path.normpath(os.path.join(folder, path)))
    except (OSError, LeadsOutside):
        return ""
    with open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read(LONGEST)


NEURON_DRIVER = "/sys/module/neuron/version"


MACHINE = "/sys/class/dmi/id/product_name"  # on EC2, the instance type


# The newest driver that supports Inf1: "Correction: Neuron Driver support for Inf1 — version 2.24"
# (awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/announcements, November 2026)
NEWEST_FOR_INF1 = (2, 24)


def read_neuron_driver() -> str | None:
    """Return the version of this node's Neuron driver, or None if it is unknown."""
    return read_text(NEURON_DRIVER) or None


def is_inf1(machine: str | None = None) -> bool | None:
    """Return whether this node is an Inf1 instance, or None if its type is unknown."""
    kind = (read_text(MACHINE) if machine is None else machine).lower()
    if kind.startswith("inf1."):
        return True
    return False if kind.startswith(("inf", "trn")) else None


def find_neuron_objection(driver: str | None, *, inf1: bool | None) -> str | None:
    """Return the reason why this driver cannot use the node's chips, or None if no reason is
    known."""
    try:
        found = parse(driver or "")
    except ValueError:
        return None
    if not inf1 or found[:2] <= NEWEST_FOR_INF1:
        return None
    return (
        f"this node has Neuron driver {driver}; the newest that supports Inf1 is 2.24: choose "
        "a machine image with driver 2.24 (aws-neuronx-dkms=2.24.*), or another chip"
    )


# Only AMD's own packages of the driver (amdgpu-dkms) have this file. The driver of the Linux kernel
# has no version that could be compared with ROCm's.
AMD_DRIVER = "/sys/module/amdgpu/version"


# The oldest release of the driver that AMD tested with a release of ROCm's user space, from "User
# and kernel-space support matrix" (rocm.docs.amd.com/projects/install-on-linux, 2025-06-26, which
# lists 6.3 and 6.4 with the drivers of ROCm 6.1 and newer, and 6.2 with those of ROCm 6.0 and
# newer). For ROCm 7, AMD supports drivers "up to a year apart"; the driver of ROCm 6.2 is the
# oldest that can be meant. The versions are those of the packages amdgpu-dkms of ROCm 6.0 (6.3.6),
# 6.1 (6.7.0) and 6.2 (6.8.5). AMD also runs older user spaces on newer drivers than it tested.
OLDEST_DRIVERS = (((7, 0), "6.8.5"), ((6, 3), "6.7.0"), ((6, 2), "6.3.6"))


def read_amd_driver() -> str | None:
    """Return the version of this node's AMD driver, or None if it is unknown."""
    return read_text(AMD_DRIVER) or None


def find_rocm(names: list[str]) -> tuple[int, ...] | None:
    """Return the ROCm version in the names of packages or images, such as `torch==2.6.0+rocm6.2.4`
    or `rocm/dev-ubuntu-24.04:6.4`, or None if no name contains a version.
    """
    for name in names:
        found = re.search(r"rocm[-_]?(\d+\.\d+)", name) or re.search(
            r"(?:^|/)rocm/(?:dev-|rocm-)[\w.-]*:(\d+\.\d+)", name
        )
        if found:
            return parse(found[1])
    return None


def find_rocm_objection(names: list[str], driver: str | None) -> str | None:
    """Return the reason why the ROCm version of the packages or images cannot run on this node's
    driver, or None if no reason is known.
    """
    wanted = find_rocm(names)
    if driver is None or wanted is None:
        return None
    try:
        found = parse(driver)
    except ValueError:
        return None
    oldest = next((drivers for rocm, drivers in OLDEST_DRIVERS if rocm <= wanted[:2]), None)
    if oldest is None or found >= parse(oldest):
        return None
    return (
        f"ROCm {'.'.join(map(str, wanted[:2]))} needs AMD's driver amdgpu {oldest} or newer; this "
        f"node has {driver}: choose an older ROCm, or a node with a newer driver"
    )


def read_driver() -> str | None:
    """Return the version of this node's NVIDIA driver, or None if it is unknown."""
    if driver := read_text(DRIVER):
        return driver
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
        return done.stdout.decode("ascii", "replace").split("\n")[0].strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_objection(env: dict[str, str], labels: dict[str, str], driver: str | None) -> str | None:
    """Return the reason why the image's CUDA cannot run on this driver, or None if no reason is
    known."""
    if driver is None or env.get("NVIDIA_DISABLE_REQUIRE", "").lower() in ("1", "true"):
        return None
    wanted = find_cuda(env, labels)
    if wanted is None:
        return None
    oldest = next((drivers for cuda, drivers in OLDEST_NVIDIA_DRIVERS if cuda <= wanted[:2]), None)
    try:
        found = parse(driver)
    except ValueError:
        return None
    if (
        oldest is None
        or found >= parse(oldest)
        or _is_excepted(env.get("NVIDIA_REQUIRE_CUDA", ""), found)
    ):
        return None
    return (
        f"the image needs CUDA {'.'.join(map(str, wanted[:2]))}, which needs NVIDIA driver "
        f"{oldest} or newer; "
        f"this node has {driver}: choose an image with an older CUDA, or a node with a newer driver"
    )


def find_cuda(env: dict[str, str], labels: dict[str, str]) -> tuple[int, ...] | None:
    """Return the lowest CUDA version that an image accepts, or None if the image declares none."""
    found = re.search(r"\bcuda>=([0-9.]+)", env.get("NVIDIA_REQUIRE_CUDA", ""))
    texts = [
        found[1] if found else "",
        env.get("CUDA_VERSION", ""),
        labels.get("com.nvidia.cuda.version", ""),
    ]
    for text in texts:
        try:
            return parse(text)
        except ValueError:
            continue
    return None


def _is_excepted(requirement: str, driver: tuple[int, ...]) -> bool:
    """Return whether the requirement accepts this driver as an exception, such as
    `driver>=470,driver<471`. An image with this exception contains a compatibility package for the
    driver.
    """
    for word in requirement.split():
        terms = [re.fullmatch(r"driver(>=|<)([0-9.]+)", term) for term in word.split(",")]
        bounds = [(term[1], parse(term[2])) for term in terms if term]
        if bounds and all(
            driver >= bound if sign == ">=" else driver < bound for sign, bound in bounds
        ):
            return True
    return False


def parse(text: str) -> tuple[int, ...]:
    """Parse a version such as "12.4". Raises ValueError if the text is not a version."""
    found = re.match(r"\s*(\d+(?:\.\d+)*)", text)
    if found is None:
        raise ValueError(text)
    return tuple(int(part) for part in found[1].split("."))
