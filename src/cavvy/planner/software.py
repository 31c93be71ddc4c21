"""Rejects offers whose accelerators the task's packages or image cannot use."""

from functools import lru_cache

from cavvy.agent.images.vendors import explain_image, explain_packages, find_packages
from cavvy.catalog.accelerators import AcceleratorKind, find_accelerator
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec

_find_packages = lru_cache(maxsize=256)(find_packages)


def explain_software(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return why the task's setup or image cannot use the offer's accelerators. Returns None if
    they can, as far as the task shows. Only the node can check the driver and the files that the
    setup reads.
    """
    known = find_accelerator(offer.accelerator) if offer.accelerator else None
    if known is None or known.accelerator.kind is AcceleratorKind.FPGA:
        return None
    chip = known.accelerator
    reason = explain_packages(
        _find_packages(task.setup or ""), chip.vendor, inf1=chip.name == "Inferentia"
    )
    if reason:
        return Objection("setup", f"{chip.name}: {reason}")
    if task.image and (reason := explain_image(task.image, chip.vendor)):
        return Objection("image", f"{chip.name}: {reason}")
    return None
