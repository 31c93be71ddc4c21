"""Checks before the work starts whether this node's NVIDIA driver supports an image's CUDA version.

Images declare the CUDA version that they require in the variable NVIDIA_REQUIRE_CUDA or, without
it, in CUDA_VERSION. NVIDIA's base images declare their CUDA version.
"""

from __future__ import annotations

import re
import subprocess

from ..disk import read_text

DRIVER = "/sys/module/nvidia/version"

# The oldest Linux driver that runs every minor release of a CUDA major version, from "CUDA Minor
# Version Compatibility" and, before 11, from "CUDA Toolkit and Corresponding Driver Versions" of
# docs.nvidia.com/cuda/cuda-toolkit-release-notes.
OLDEST_DRIVERS = (
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
    oldest = next((drivers for cuda, drivers in OLDEST_DRIVERS if cuda <= wanted[:2]), None)
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
