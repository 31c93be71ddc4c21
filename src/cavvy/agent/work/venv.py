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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .view import WorkView

# A program that stands in for a missing pip, so that no pip of another Python is found on PATH.
NO_PIP = """#!/bin/sh
echo "cavvy: this node has no pip for the job's virtual environment: install python3-venv or uv \
on the node, or name an image" >&2
exit 1
"""
PUT_PIP = """mkdir -p "$0/bin"
for name in pip pip3; do printf %s "$1" >"$0/bin/$name"; chmod 755 "$0/bin/$name"; done"""
WITHOUT_PIP = 3  # exit code of make_venv.py if there is no pip


def use_venv(env: dict[str, str], folder: str) -> None:
    """Add the environment at `folder`, which need not exist yet, at the beginning of the PATH."""
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    env["VIRTUAL_ENV"] = folder


def make_venv(folder: str, env: dict[str, str], view: WorkView | None = None) -> None:
    """Replace the environment with a new one, created with uv if uv is installed. The environment
    uses the first suitable Python on the job's PATH, else the agent's own Python. The task
    chooses the programs that run here, so they see only what `view` shows.

    If no Python is suitable, the environment contains only a program `pip` that explains the
    problem. Raises OSError.
    """
    source = (pkgutil.get_data(__package__ or "", "make_venv.py") or b"").decode()
    uv = shutil.which("uv", path=f"{env['PATH']}:{env.get('HOME', '')}/.local/bin") or ""
    code = 1
    for python in _list_pythons(env["PATH"]):
        _make_anew(folder)
        code = run([python, "-I", "-c", source, folder, uv], env, view)
        if code in (0, WITHOUT_PIP):
            break
    if code and not (uv and _repair(uv, folder, env, code, view)):
        run(["/bin/sh", "-c", PUT_PIP, folder, NO_PIP], env, view)


def _list_pythons(path: str) -> Iterator[str]:
    found = shutil.which("python3", path=path)
    if found is not None:
        yield found
    yield getattr(sys, "_base_executable", sys.executable)


def _make_anew(folder: str) -> None:
    """Make the folder empty. A view shows only folders that exist."""
    remove_tree(folder)
    os.mkdir(folder)


def _repair(
    uv: str, folder: str, env: dict[str, str], code: int, view: WorkView | None = None
) -> bool:
    """Let uv install the missing pip or, if `code` shows that the environment does not exist,
    create the whole environment. Return whether the repair succeeded.
    """
    if code == WITHOUT_PIP:
        command = [uv, "pip", "install", "--quiet", "--python", folder + "/bin/python", "pip"]
    else:
        _make_anew(folder)
        command = [uv, "venv", "--quiet", "--seed", folder]
    return run(command, env, view) == 0
