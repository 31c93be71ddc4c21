"""Gives the work the Python of the shell that submitted the job, on the server's machine."""

from __future__ import annotations

import os
import shutil
import sys

# a file that marks an environment -> the variable that names the environment's folder
MARKS = {"pyvenv.cfg": "VIRTUAL_ENV", "conda-meta": "CONDA_PREFIX"}


def use_shell(env: dict[str, str], path: str, hidden: str = "") -> None:
    """Put the folders of the submitting shell's PATH before the PATH in `env`, and set the variable
    of its virtual or conda environment. The environment in the folder `hidden` is left out.
    """
    folders = [each for each in path.split(":") if os.path.isabs(each) and os.path.isdir(each)]
    folders += env["PATH"].split(":")
    env["PATH"] = ":".join(
        each for each in dict.fromkeys(folders) if not hidden or not _is_of(each, hidden)
    )
    python = find_python(env["PATH"])
    root = os.path.dirname(os.path.dirname(python))
    for mark, variable in MARKS.items():
        if python and os.path.exists(f"{root}/{mark}"):
            env[variable] = root


def find_python(path: str) -> str:
    """Return the full path of the Python on this PATH, or "" if there is none."""
    found = shutil.which("python3", path=path) or shutil.which("python", path=path)
    return os.path.abspath(found) if found else ""


def own_environment() -> str:
    """Return the folder of the virtual or conda environment in which this agent is installed, or ""
    if the agent is not installed in an environment."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    return root if any(os.path.exists(f"{root}/{mark}") for mark in MARKS) else ""


def _is_of(folder: str, environment: str) -> bool:
    """Return whether a folder of PATH has the programs of this environment. The folder with the
    command `conda` does not count."""
    if os.path.basename(folder) == "condabin":
        return False
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(environment)
