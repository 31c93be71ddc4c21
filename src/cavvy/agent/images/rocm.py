"""Checks before the work starts whether this node's AMD driver supports the work's ROCm version."""

from __future__ import annotations

import re

from ..disk import read_text
from .driver import parse

# Only AMD's own packages of the driver (amdgpu-dkms) have this file. The driver of the Linux kernel
# has no version that could be compared with ROCm's.
DRIVER = "/sys/module/amdgpu/version"

# The oldest release of the driver that AMD tested with a release of ROCm's user space, from "User
# and kernel-space support matrix" (rocm.docs.amd.com/projects/install-on-linux, 2025-06-26, which
# lists 6.3 and 6.4 with the drivers of ROCm 6.1 and newer, and 6.2 with those of ROCm 6.0 and
# newer). For ROCm 7, AMD supports drivers "up to a year apart"; the driver of ROCm 6.2 is the
# oldest that can be meant. The versions are those of the packages amdgpu-dkms of ROCm 6.0 (6.3.6),
# 6.1 (6.7.0) and 6.2 (6.8.5). AMD also runs older user spaces on newer drivers than it tested.
OLDEST_DRIVERS = (((7, 0), "6.8.5"), ((6, 3), "6.7.0"), ((6, 2), "6.3.6"))


def read_driver() -> str | None:
    """Return the version of this node's AMD driver, or None if it is unknown."""
    return read_text(DRIVER) or None


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
