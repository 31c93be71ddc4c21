"""Checks before the work starts whether this node's Neuron driver supports the node's chips."""

from __future__ import annotations

from ..disk import read_text
from .driver import parse

DRIVER = "/sys/module/neuron/version"
MACHINE = "/sys/class/dmi/id/product_name"  # on EC2, the instance type

# The newest driver that supports Inf1: "Correction: Neuron Driver support for Inf1 — version 2.24"
# (awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/announcements, November 2026)
NEWEST_FOR_INF1 = (2, 24)


def read_driver() -> str | None:
    """Return the version of this node's Neuron driver, or None if it is unknown."""
    return read_text(DRIVER) or None


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
