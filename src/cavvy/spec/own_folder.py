"""Decides whether the folder of a task file is submitted although the file has no `workdir`: if the
task's commands or LoRA adapters name a file of this folder.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from cavvy.domain.tasks import TaskSpec
from cavvy.spec.workdir import (
    MOST_OWN_BYTES,
    MOST_OWN_FILES,
    OWN_FOLDER,
    FreezeError,
    list_folder,
)

_COLLECTIONS = frozenset(("Desktop", "Documents", "Downloads"))  # folders of a home folder
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_WRITTEN = re.compile(r">>?\s*[^\s;|&()]+")  # a file that the command creates
_WORD = re.compile(r"[^\s'\"`;|&()<>=,]+")
_QUOTED = re.compile(r"'([^'\n]{1,200})'|\"([^\"\n]{1,200})\"")
_ATTRIBUTE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # of a module, as in `uvicorn app:app`
# For some commands, the files that they read although the command does not name them.
_PROJECT_FILES = {
    "make": ("Makefile", "makefile", "GNUmakefile"),
    "just": ("justfile",),
    "pip install": ("pyproject.toml", "setup.py"),
    "uv run": ("pyproject.toml",),
    "uv sync": ("pyproject.toml",),
    "poetry install": ("pyproject.toml",),
    "pixi run": ("pixi.toml", "pyproject.toml"),
    "npm install": ("package.json",),
    "npm run": ("package.json",),
    "cargo build": ("Cargo.toml",),
    "cargo run": ("Cargo.toml",),
}


def list_named(task: TaskSpec, folder: Path) -> list[tuple[str, str]]:
    """Return the files and folders of `folder` that the task's commands and adapters name, each
    with the key that names it. Files that the task receives or creates do not count.
    """
    own = [each.target for each in task.inputs] + [each.source for each in task.outputs]
    own += [each.path for each in task.volumes]
    if task.checkpoint is not None:
        own.append(task.checkpoint.path)
    own = [os.path.normpath(path) for path in own]
    return [
        (name, key)
        for key, commands in _list_commands(task)
        for name in _list_names(commands, folder)
        if not any(name == path or name.startswith(f"{path}/") for path in own)
    ]


def find_named(task: TaskSpec, folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Return the folder whose files the task's commands name, with these files as in `list_named`:
    `folder`, which contains the task file, or the current folder if it contains `folder`, as for
    `cavvy run configs/train.yaml`.
    """
    above = [each for each in (Path.cwd(),) if each in folder.parents]
    for each in (folder, *above):
        if named := list_named(task, each):
            return each, named
    return folder, []


def explain_unfit(folder: Path) -> str:
    """Return why the folder is not submitted without `workdir`, and what to do. Return "" if the
    folder can be submitted, unless it is too large."""
    reason = _find_unfit(folder)
    return f"{reason}; {OWN_FOLDER}" if reason else ""


def _find_unfit(folder: Path) -> str:
    folder, home = folder.resolve(), Path.home().resolve()
    shared = (Path(each).resolve() for each in (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    if folder == home:
        return "it is your home folder"
    own = folder.parent == home and folder.name in _COLLECTIONS
    if own or folder in home.parents or folder in shared:
        return "it is not the folder of one project"
    return ""


def explain_unsent(folder: Path) -> str | None:
    """Return why a command without a task file does not get this folder, "" if it gets the folder,
    or None if the folder has no files that would be submitted."""
    if reason := _find_unfit(folder):
        return reason
    try:
        found, _ = list_folder(folder, most_bytes=MOST_OWN_BYTES, most_files=MOST_OWN_FILES)
    except (FreezeError, OSError) as error:
        return f"{error}; --workdir . submits it" if _say_key(folder) else str(error)
    return "" if found else None


def choose_named(folder: Path, named: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], str]:
    """Return the first of the files and folders in `named` that would be submitted with the folder,
    and "". If none would be submitted, return the first and the reason."""
    if reason := explain_unfit(folder):
        return named[0], reason
    try:
        found, _ = list_folder(folder, most_bytes=MOST_OWN_BYTES, most_files=MOST_OWN_FILES)
    except (FreezeError, OSError) as error:
        return named[0], f"{error}{_say_key(folder)}"
    paths = [each.path for each, _ in found]
    for name, key in named:
        if any(path == name or path.startswith(f"{name}/") for path in paths):
            return (name, key), ""
    reason = f"an ignore file excludes {named[0][0]}; change .gitignore or .cavvyignore"
    return named[0], reason


def _say_key(folder: Path) -> str:
    """Return that `workdir` submits a large folder, or "" if the folder is also too large for
    that."""
    try:
        list_folder(folder)
    except (FreezeError, OSError):
        return ""
    return "; or write `workdir: .` to submit it"


def _list_commands(task: TaskSpec) -> Iterator[tuple[str, str]]:
    """Yield the texts that may name files, each with its key."""
    yield from (("setup", task.setup or ""), ("run", task.run))
    for each in task.replica_groups:
        yield f"service.groups.{each.name}.setup", each.setup or ""
        yield f"service.groups.{each.name}.run", each.run or ""
    if task.service is not None and task.service.adapters is not None:
        for name, source in task.service.adapters.sources.items():
            yield f"service.adapters.{name}", source


def _list_names(commands: str, folder: Path) -> Iterator[str]:
    """Yield the files and folders of `folder` that the commands name, relative to `folder`."""
    text = _WRITTEN.sub(" ", _COMMENT.sub("", commands))
    quoted = [one or two for one, two in _QUOTED.findall(text)]
    yield from (each for each in quoted if " " in each and os.path.isfile(folder / each))
    words = [""] + [each for each in _WORD.findall(text) if "$" not in each and "://" not in each]
    for before, word in pairwise(words):
        if word.startswith(("/", "~")):
            continue
        for name in _list_meanings(before, word):
            if os.path.exists(folder / name):
                yield name


def _list_meanings(before: str, word: str) -> Iterable[str]:
    """Return the paths that a word may mean. `before` is the previous word."""
    for command in (word, f"{before} {word}"):
        if command in _PROJECT_FILES and command != "pip install":
            return _PROJECT_FILES[command]
    if re.fullmatch(r"\.(\[[\w-]*\]?)?", word) and before in ("install", "-e", "--editable"):
        return _PROJECT_FILES["pip install"]
    module = word if before == "-m" else (found[1] if (found := _ATTRIBUTE.fullmatch(word)) else "")
    if module:
        path = module.replace(".", "/")
        return (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py")
    name = os.path.normpath(word.partition("::")[0])  # pytest's names of tests have ::
    is_path = "/" in word or "." in word or before == "cd"
    return (name,) if is_path and name != "." and not name.startswith("..") else ()
