"""Decides whether the folder of a task file is submitted although the file has no `workdir`: if the
task's commands name a file of this folder.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from cavvy.domain.tasks import TaskSpec
from cavvy.spec.workdir import FreezeError, list_folder

# Larger folders are submitted only if the task file has `workdir`.
_MOST_BYTES = 1 << 30
_MOST_FILES = 20_000
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_WRITTEN = re.compile(r">>?\s*[^\s;|&()]+")  # a file that the command creates
_WORD = re.compile(r"[^\s'\"`;|&()<>=,]+")
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


def find_named(task: TaskSpec, folder: Path) -> tuple[str, str] | None:
    """Return the first file or folder of `folder` that the task's commands name, and the key of the
    commands, or None if there is none. Files that the task receives or creates do not count.
    """
    own = [each.target for each in task.inputs] + [each.source for each in task.outputs]
    own += [each.path for each in task.volumes]
    if task.checkpoint is not None:
        own.append(task.checkpoint.path)
    own = [os.path.normpath(path) for path in own]
    for key, commands in (("setup", task.setup or ""), ("run", task.run)):
        for name in _list_names(commands, folder):
            if not any(name == path or name.startswith(f"{path}/") for path in own):
                return name, key
    return None


def explain_unfit(folder: Path) -> str:
    """Return why this folder is not submitted without `workdir`, and what to do, or "" if it can be
    submitted.
    """
    folder = folder.resolve()
    home = Path.home().resolve()
    shared = (Path(each).resolve() for each in (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    if folder == home:
        return "it is your home folder; move the task's files into a folder of their own"
    if folder in home.parents or folder in shared:
        return (
            "it is not the folder of one project; move the task's files into a folder of their own"
        )
    try:
        list_folder(folder, most_bytes=_MOST_BYTES, most_files=_MOST_FILES)
    except (FreezeError, OSError) as error:
        return f"{error}; or write `workdir: .` to submit it"
    return ""


def _list_names(commands: str, folder: Path) -> Iterator[str]:
    """Yield the files and folders of `folder` that the commands name, relative to `folder`."""
    text = _WRITTEN.sub(" ", _COMMENT.sub("", commands))
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
