"""Translates accelerator names of other tools into requirements with the catalog's names."""

import re

from cavvy.domain.tasks import AcceleratorNeed
from cavvy.domain.values import Struct

# Names that the catalog does not have, and the catalog's name for each. For example, SkyPilot calls
# the MI300X MI300.
_ALIASES = {"mi300": "MI300X"}
# For products with several memory sizes: the size in GiB that SkyPilot means if a file names only
# the product.
BARE_SIZES = {"A100": 40, "V100": 16}
# The names of TPUs at GCP and GKE. dstack writes these names without `tpu-`. The number at the end
# is the number of chips; for the versions in `_CORES`, it is the number of cores, two for each
# chip.
_TPU = re.compile(
    r"(?:tpu-?)?(v[2-7][a-z]?)"
    r"(litepod|-lite-podslice|-lite-device|-podslice|-slice|-device)?(?:-(\d+))?"
)
_CORES = ("v2", "v3", "v4", "v5p")


class TranslatedNeeds(Struct, frozen=True, kw_only=True):
    """The requirements for one accelerator name. `problem` is the reason why Cavvy cannot request
    this accelerator as written, or "" if it can.
    """

    needs: tuple[AcceleratorNeed, ...]
    problem: str = ""


def find_needs(name: str, count: str, memory: str = "") -> TranslatedNeeds:
    """Return the requirements for `count` devices called `name`. `catalog.needs` defines the syntax
    of `count` and `memory`.
    """
    from cavvy.catalog.needs import NeedError, parse_accelerator

    known, chips = _find_name(name)
    if chips is not None:
        count = str(chips)
    text = ":".join(part for part in (known, memory, count) if part)
    try:
        if "|" in name:
            raise NeedError(f"unknown accelerator {name!r}")
        needs = parse_accelerator(text)
        return TranslatedNeeds(needs=needs, problem=_find_problem(known, chips))
    except NeedError as error:
        least = re.match(r"\d{1,6}", count)
        need = AcceleratorNeed(name=name or None, count_min=max(1, int(least[0])) if least else 1)
        return TranslatedNeeds(needs=(need,), problem=str(error))


def _find_name(name: str) -> tuple[str, int | None]:
    """Return the catalog's name, and the number of chips if `name` is the type of a slice of
    TPUs.
    """
    match = _TPU.fullmatch(name.lower())
    if match is None or not (match[3] or name.lower().startswith("tpu")):
        return _ALIASES.get(name.lower(), name), None
    version = match[1] + ("e" if match[1] == "v5" and match[2] and "lite" in match[2] else "")
    if match[3] is None:
        return f"TPU-{version}", None
    return f"TPU-{version}", int(match[3][:6]) // (2 if version in _CORES else 1) or 1


def _find_problem(name: str, chips: int | None) -> str:
    """Return a message if Google has no slice with this number of chips, otherwise ""."""
    from cavvy.catalog.tpu_slices import list_slices

    sizes = [each.chips for each in list_slices() if each.accelerator == name]
    if chips is None or not sizes or chips in sizes:
        return ""
    return f"Google has no slice of {chips} {name} chips; it has {', '.join(map(str, sizes))}"
