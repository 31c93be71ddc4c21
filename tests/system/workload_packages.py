"""A Python of its own for the programs of templates, with the packages of some that are quick to
install; numpy, matplotlib and the like are those of the tests.
"""

import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import numpy
from tests.system.packages import CACHE, install_whole

FOLDER = CACHE / f"workloads-{sys.implementation.cache_tag}"
PYTHON = FOLDER / "bin" / "python"
# The folder outlives this checkout: what it takes from the tests' packages is said to each process.
PACKAGES_OF_TESTS = {"PYTHONPATH": str(Path(numpy.__file__).parents[1])}
QUICK = ("pysam", "pybwa", "imageio-ffmpeg")  # 90 MB


def install() -> str:
    """Why the packages are not to be had, "" where they are."""

    def fill(folder: Path, seconds: float) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=seconds)
        pip = [PYTHON, "-m", "pip", "install", "--quiet", *QUICK]
        subprocess.run(pip, check=True, timeout=seconds, capture_output=True)

    try:
        install_whole(FOLDER, fill, 300.0)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error}: {getattr(error, 'stderr', b'')[-300:]}"
    return ""


def find_python(modules: tuple[str, ...]) -> str | None:
    """A Python that has all these modules."""
    if all(find_spec(module) for module in modules):
        return sys.executable
    install()
    own = [str(path) for path in FOLDER.glob("lib/python*/site-packages")]
    return str(PYTHON) if all(PathFinder.find_spec(each, own) for each in modules) else None
