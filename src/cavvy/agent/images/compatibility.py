"""Compares the work's packages and image with this node's accelerators and their driver, before the
setup installs anything.
"""

from __future__ import annotations

import os

from ..allowed_folders import AllowedFolders, LeadsOutside
from ..config import AgentConfig
from ..documents import WorkConfig
from . import driver, neuron, rocm
from .devices import find_certain_vendor, find_vendor
from .vendors import (
    explain_image,
    explain_packages,
    find_packages,
    find_required,
    list_requirement_files,
)

LONGEST = 1 << 20  # characters of a requirements file that are read


def find_misfit(config: AgentConfig, work: WorkConfig, folder: str) -> str | None:
    """Return the reason why the packages and the image of the work cannot use this node's
    accelerators, or None if no reason is known. `folder` contains the working folder's files.
    """
    vendor = find_certain_vendor(config)
    if not vendor or not work.accelerators_per_node:
        return None
    inf1 = neuron.is_inf1() if vendor == "aws" else None
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
        return rocm.find_rocm_objection(names, rocm.read_driver())
    if vendor == "aws":
        return neuron.find_neuron_objection(neuron.read_driver(), inf1=inf1)
    return None


def find_image_misfit(
    config: AgentConfig, variables: dict[str, str], labels: dict[str, str]
) -> str | None:
    """Return the reason why the image with these variables and labels cannot run on this node's
    NVIDIA driver. Returns None if no reason is known, or if the accelerators are not from NVIDIA.
    """
    if config.devices == [] or find_vendor(config) not in ("nvidia", ""):
        return None
    return driver.find_objection(variables, labels, driver.read_driver())


def _read(folder: str, path: str) -> str:
    """Return the text of a requirements file, or "" if the file is unreadable (pip reports why)."""
    try:
        file = AllowedFolders([folder]).open_file(os.path.normpath(os.path.join(folder, path)))
    except (OSError, LeadsOutside):
        return ""
    with open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read(LONGEST)
