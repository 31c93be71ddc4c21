"""Finds the vendors whose accelerators a task's packages and image were built for.

The planner also uses this module, so the module reads no files. A package that runs on accelerators
of several vendors, or on CPUs, belongs to no vendor.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

VENDORS = {
    "nvidia": "NVIDIA",
    "amd": "AMD",
    "aws": "AWS (Trainium, Inferentia)",
    "google": "Google (TPU)",
    "intel": "Intel",
}
# Names of packages, local versions and package indexes of each vendor's builds, in arguments of pip
# and lines of requirement files. Sources, read in November 2026: pytorch.org/get-started (`+cu`,
# `+rocm`, `+xpu`), docs.jax.dev/en/latest/installation.html, docs.cupy.dev/en/stable/install.html,
# awsdocs-neuron.readthedocs-hosted.com (setup), docs.habana.ai (installation guide).
PACKAGES = {
    "nvidia": r"\S*(\+cu|/whl/(nightly/)?cu)\d{2,3}\b|nvidia-[a-z-]+-cu\d+|cupy-cuda\d+|"
    r"jax\[cuda\S*\]|jax-cuda\d+-\S+|tensorflow\[and-cuda\]|(tensorrt|pycuda)(?![\w/])|"
    r"(cudf|cuml|cugraph|raft|dask-cudf)-cu\d+|onnxruntime-gpu",
    "amd": r"\S*(\+rocm|/whl/(nightly/)?rocm)\d|(pytorch-triton|tensorflow|onnxruntime)-rocm|"
    r"cupy-rocm-\S+|jax\[rocm\S*\]|jax-rocm\d+-\S+",
    "aws": r"(torch|jax|tensorflow|mxnet|transformers)-neuronx?|neuronx?-(cc|distributed)|"
    r"libneuronxla|optimum-neuron|\S*pip\.repos\.neuron\.amazonaws\.com",
    "google": r"(jax|torch_xla|torch-xla)\[tpu\]|libtpu(-nightly)?|\S*/libtpu-releases",
    "intel": r"\S*(\+xpu|/whl/(nightly/)?xpu\b)|habana-\S+|optimum-habana|\S*vault\.habana\.ai",
}
# https://docs.nvidia.com/ngc, https://hub.docker.com/u/rocm, https://gallery.ecr.aws/neuron,
# https://docs.habana.ai, and tags such as `2.6.0-cuda12.4-cudnn9-runtime` of pytorch/pytorch
IMAGES = {
    "nvidia": r"(^|/)nvidia/cuda[:@]|^nvcr\.io/nvidia/|:[\w.-]*(?<![a-z])cu(da)?-?\d{2}",
    "amd": r"(^|/)rocm/|:[\w.-]*rocm",
    "aws": r"^public\.ecr\.aws/neuron/|-neuronx?[:@]|:[\w.-]*neuronx?",
    "google": r"[/-]tpu(vm)?[:@]|:[\w.-]*\btpu(vm)?\b",
    "intel": r"^vault\.habana\.ai/",
}
# Inf1 runs only packages of the first Neuron generation, and later chips only those of the second:
# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch (November 2026)
_FIRST = re.compile(r"(torch|tensorflow|mxnet)-neuron(?!x)|neuron-cc")
_SECOND = re.compile(r"\S+-neuronx|neuronx-")
# A setup that chooses its packages on the node, by conditions or by looking for programs of drivers
_CHOOSES = re.compile(
    r"(^|[\s;&|(!])(if|case|for|while|test|\[\[?)\s|\|\||nvidia-smi|rocm-?smi|rocminfo|neuron-ls",
    re.MULTILINE,
)
_INSTALLS = re.compile(r"\b(pip3?|uv)\s+(\S+\s+)*?(install|add|sync|download)\b")
_FILE = re.compile(r"(?:^|\s)(?:-r|--requirements?)[\s=]+(\S+)")


def find_packages(text: str) -> dict[str, list[str]]:
    """Return, for each vendor, the arguments of those setup commands that install the vendor's
    packages. If the setup contains conditions, such as `if`, it is unknown which packages are
    installed, and the result is {}.
    """
    text = _strip(text)
    if _CHOOSES.search(text):
        return {}
    commands = re.split(r"&&|[;\n]", text)
    return _sort(word for line in commands if _INSTALLS.search(line) for word in line.split())


def find_required(text: str) -> dict[str, list[str]]:
    """Return, for each vendor, the lines of a requirements file that name the vendor's packages.
    Lines with a condition (`; sys_platform == …`) are left out.
    """
    lines = [line for line in _strip(text).split("\n") if ";" not in line]
    return _sort(word for line in lines for word in line.split())


def list_requirement_files(setup: str) -> list[str]:
    """Return the paths of the requirements files that a setup installs, or [] if conditions in the
    setup can decide which packages are installed."""
    text = _strip(setup)
    if _CHOOSES.search(text):
        return []
    commands = [line for line in re.split(r"&&|[;\n]", text) if _INSTALLS.search(line)]
    return [path.strip("'\"") for line in commands for path in _FILE.findall(line)]


def find_image_vendor(image: str) -> str | None:
    """Return the vendor whose accelerators an image was built for, or None if the image's
    name shows no vendor."""
    found = [vendor for vendor, pattern in IMAGES.items() if re.search(pattern, image)]
    return found[0] if len(found) == 1 else None


def explain_packages(found: dict[str, list[str]], vendor: str, *, inf1: bool | None) -> str | None:
    """Return why packages cannot use a vendor's accelerators, or None if no reason is known. `inf1`
    is true if the accelerators are Inferentia of the first generation, and None if their generation
    is unknown.
    """
    if not found:
        return None
    if vendor not in found:
        names = " and ".join(VENDORS[name] for name in found)
        return (
            f"{next(iter(found.values()))[0]} needs {names} accelerators, but the machine has "
            f"{VENDORS.get(vendor, vendor)} accelerators: install the build for this vendor, or "
            "request other accelerators"
        )
    if inf1 is None:
        return None
    wrong, right = (_SECOND, _FIRST) if inf1 else (_FIRST, _SECOND)
    neuron = found.get("aws", [])
    misfits = [name for name in neuron if wrong.match(name)]
    if not misfits or any(right.match(name) for name in neuron):
        return None
    where = "Inf1 (Inferentia)" if inf1 else "Inf2, Trn1 or later chips, but only on Inf1"
    return f"{misfits[0]} does not run on {where}: install the packages of the chip's generation"


def explain_image(image: str, vendor: str) -> str | None:
    """Return why an image cannot use a vendor's accelerators. Returns None if the image can use
    them, as far as its name shows.
    """
    wanted = find_image_vendor(image)
    if wanted is None or wanted == vendor:
        return None
    return (
        f"the image {image} was built for {VENDORS[wanted]} accelerators, but the machine has "
        f"{VENDORS.get(vendor, vendor)} accelerators: name another image, or request "
        f"{VENDORS[wanted]} accelerators"
    )


def _strip(text: str) -> str:
    """Remove comments, and join lines that a backslash continues."""
    return re.sub(r"(^|\s)#[^\n]*", r"\1", re.sub(r"\\\n", " ", text))


def _sort(words: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        name = word.strip("'\"")
        for vendor, pattern in PACKAGES.items():
            if re.match(rf"({pattern})", name, re.IGNORECASE):
                found.setdefault(vendor, []).append(name)
    return found
