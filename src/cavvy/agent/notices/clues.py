"""Explains common failures from the end of the task's output: a file or a Python package that the
task does not have.
"""

from __future__ import annotations

import os
import re
import shutil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import WorkConfig

_KEPT = 4096  # bytes at the end of the output
_NO_MODULE = re.compile(rb"No module named '?([A-Za-z_][\w.-]*)")
_NO_COMMAND = re.compile(
    rb"(?:^|[\s:'\"])(python[\d.]*|pip[\d.]*)['\"]?: (?:command )?not found"
    rb"|env: '?\W*(python[\d.]*|pip[\d.]*)\W*: No such file"
)
_NO_FILE = re.compile(
    rb"can't open file"
    rb"|No such file or directory"
    rb"|cannot open|can't cd to"
    rb"|Cannot find module"
    rb"|Could not open requirements file"
    rb"|file or directory not found"
    rb"|does not appear to be a Python project"
    rb"|No `?pyproject\.toml"
    rb"|no makefile found|No rule to make target"
    rb"|Could not import module"
)

_NO_PATH = re.compile(
    rb"can't open file|No such file or directory|Could not open requirements file"
)


class FailureClues:
    """Keeps the end of the task's output. Call `feed` with each piece of output."""

    def __init__(self) -> None:
        self._end = b""

    def feed(self, data: bytes) -> None:
        self._end = (self._end + data[-_KEPT:])[-_KEPT:]

    def explain(self, work: WorkConfig, path: str) -> str:
        """Return what the failed task probably lacks and how to add it, or "" without a clue.
        `path` is the PATH of the task."""
        return explain_output(self._end, work, path)


def explain_output(end: bytes, work: WorkConfig, path: str) -> str:
    """Return what a failed task probably lacks and how to add it, or "" without a clue. `end` is
    the end of the task's output."""
    empty = work.workdir is None and work.git is None
    if modules := _NO_MODULE.findall(end):
        name = modules[-1].decode("ascii", "replace").partition(".")[0]
        return _explain_module(name, work, path, empty)
    if found := _NO_COMMAND.search(end):
        return _explain_command((found[1] or found[2]).decode(), work, path)
    if empty and _NO_FILE.search(end):
        return (
            "the task started in an empty folder, because it has no `workdir`: `workdir: .` in the "
            "task file, or --workdir ., submits the files next to it"
        )
    if work.workdir is not None and _NO_PATH.search(end):
        return (
            "if the missing file is one of yours: files that .gitignore or .cavvyignore excludes "
            "are not submitted, and paths are relative to the submitted folder"
        )
    return ""


def _explain_module(name: str, work: WorkConfig, path: str, empty: bool) -> str:
    if work.image:
        text = f"the image {work.image} has no Python module {name}"
    elif work.setup:
        text = f"the job's own Python environment, which `setup` fills, has no module {name}"
    else:
        text = f"{_find_python(work, path)} has no module {name}"
    text += ": `pip install PACKAGE` in `setup` installs one for the job"
    if work.path and not (work.image or work.setup):
        text += ", or submit the job from a shell in which the environment with it is active"
    own = f"; if {name} is a file of yours, `workdir: .` submits the files next to the task file"
    return text + own * empty


def _explain_command(name: str, work: WorkConfig, path: str) -> str:
    if work.image:
        return f"the image {work.image} has no {name}"
    kind = "pip" if name.startswith("pip") else "python"
    other = kind if name == f"{kind}3" else f"{kind}3"
    if shutil.which(other, path=path):
        return f"the task's PATH has `{other}`, but no `{name}`"
    return f"the task's PATH has no `{name}`: {path}"


def _find_python(work: WorkConfig, path: str) -> str:
    """Return which Python the task probably used, such as "`python3` (/usr/bin/python3)"."""
    names = ("python3", "python") if "python3" in work.run else ("python", "python3")
    for name in names:
        if (found := shutil.which(name, path=path)) is not None:
            return f"the task's `{name}`, {os.path.abspath(found)},"
    return "the task's Python"
