"""The compute capabilities of NVIDIA's GPUs (developer.nvidia.com/cuda-gpus), for dstack's key
`compute_capability`.
"""

import re

# Patterns of the catalog's names, with the capability. The first pattern that matches counts.
_CAPABILITIES = (
    (r"RTX-PRO-\d+|RTX50[5-9]\d\w*", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"G?B200", (10, 0)),
    (r"G?H\d+(-\w+)?", (9, 0)),
    (r"L4|L40S?|RTX\d+-Ada|RTX40[5-9]\d\w*", (8, 9)),
    (r"A100|A800|A30", (8, 0)),
    (r"A\d+G?|RTX30\d\d\w*", (8, 6)),
    (r"T4G?|RTX[4568]000|RTX20\d\d\w*|GTX16\d\d\w*", (7, 5)),
    (r"V100", (7, 0)),
    (r"P100", (6, 0)),
    (r"P\d+|GTX10\d\d\w*", (6, 1)),
    (r"M\d+", (5, 2)),
    (r"K80", (3, 7)),
    (r"K520", (3, 0)),
)


def find_capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability of an accelerator of the catalog, or None if it is unknown."""
    found = (
        capability
        for pattern, capability in _CAPABILITIES
        if re.fullmatch(pattern, name, re.IGNORECASE)
    )
    return next(found, None)


def list_capable(least: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of NVIDIA's accelerators with at least this capability, one for each
    family.
    """
    from cavvy.catalog.accelerators import Vendor, list_accelerators

    return tuple(
        dict.fromkeys(
            each.family or each.name
            for each in list_accelerators()
            if each.vendor is Vendor.NVIDIA and (find_capability(each.name) or (0, 0)) >= least
        )
    )
