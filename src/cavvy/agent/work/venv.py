"""Creates the virtual environment of a setup, in which the setup can install packages with pip
without changing the node's own Python.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator

from .folder import run
from .trees import remove_tree

# A program that stands in for a missing pip, so that no pip of another Python is found on PATH.
NO_PIP = """#!/bin/sh
echo "cavvy: this node has no pip for the job's virtual environment: install python3-venv or uv \
on the node, or name an image" >&2
exit 1
"""
WITHOUT_PIP = 3  # exit code of make_venv.py if there is no pip


def use_venv(env: dict[str, str], folder: str) -> None:
    """Add the environment at `folder`, which need not exist yet, at the beginning of the PATH."""
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    env["VIRTUAL_ENV"] = folder


def make_venv(folder: str, env: dict[str, str]) -> None:
    """Replace the environment with a new one, created with uv if uv is installed. The environment
    uses the first suitable Python on the job's PATH, else the agent's own Python.

    If no Python is suitable, the environment contains only a program `pip` that explains the
    problem. Raises OSError.
    """
    remove_tree(folder)
    source = (pkgutil.get_data(__package__ or "", "make_venv.py") or b"").decode()
    uv = shutil.which("uv", path=f"{env['PATH']}:{env.get('HOME', '')}/.local/bin") or ""
    code = 1
    for python in _list_pythons(env["PATH"]):
        code = run([python, "-I", "-c", source, folder, uv], env)
        if code in (0, WITHOUT_PIP):
            break
        remove_tree(folder)
    if code and not (uv and _repair(uv, folder, env, code)):
        os.makedirs(folder + "/bin", exist_ok=True)
        for name in ("pip", "pip3"):
            with open(f"{folder}/bin/{name}", "w") as file:
                file.write(NO_PIP)
            os.chmod(file.name, 0o755)


def _list_pythons(path: str) -> Iterator[str]:
    found = shutil.which("python3", path=path)
    if found is not None:
        yield found
    yield getattr(sys, "_base_executable", sys.executable)


def _repair(uv: str, folder: str, env: dict[str, str], code: int) -> bool:
    """Let uv install the missing pip or, if `code` shows that the environment does not exist,
    create the whole environment. Return whether the repair succeeded.
    """
    if code == WITHOUT_PIP:
        command = [uv, "pip", "install", "--quiet", "--python", folder + "/bin/python", "pip"]
    else:
        command = [uv, "venv", "--quiet", "--seed", folder]
    return run(command, env) == 0
