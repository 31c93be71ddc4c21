"""The user's files: parse, check, explain.

`load_task` and `parse_task` give a task or raise SpecError, which says everything that is wrong with the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from remuda.domain.tasks import Scalar, Task
from remuda.spec.problems import Notes, Problem, SpecError

__all__ = ["LoadedTask", "Problem", "SpecError", "load_task", "parse_task"]


_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task with the file it was read from; relative paths of the task are meant from `folder`."""

    task: Task
    text: str
    folder: Path


def load_task(path: str | Path, params: Mapping[str, Scalar] = {}, *, now: datetime | None = None) -> LoadedTask:
    """Read a task file.

    `params` are the overrides, as typed or as values. With `now`, times in the past are refused. Raises SpecError.
    """
    file = Path(path)
    text = _read(file)
    task = parse_task(text, file=str(path), params=params, now=now)
    loaded = LoadedTask(task=task, text=text, folder=file.resolve().parent)
    if task.setup_uses and task.workdir is not None and task.workdir.path is not None:
        _check_uses(loaded.folder / task.workdir.path, task.setup_uses, str(path))
    return loaded


def parse_task(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
) -> Task:
    """The task that `text` describes; a file without `name` gives its own. Raises SpecError with every problem."""
    from remuda.spec.fields.params import read_params, substitute
    from remuda.spec.fields.task import TASK
    from remuda.spec.problems import slug
    from remuda.spec.tree import MapNode, compose

    text = text.removeprefix("\ufeff")
    notes = Notes(file, text, now)
    root = compose(text, notes)
    if root is None:
        notes.check()
        raise AssertionError("a file without a tree has a problem")
    values = read_params(root, params, notes)
    if isinstance(root, MapNode):
        # The declarations themselves are read as they stand.
        entries = tuple((k, v if k.text == "params" else substitute(v, values, notes)) for k, v in root.entries)
        root = replace(root, entries=entries)
    task = TASK.read(root, notes)
    notes.check()
    assert task is not None
    settled = {name: written.value for name, written in values.items() if written is not None}
    return replace(task, name=task.name or slug(Path(file).stem) or "task", params=settled)


def _check_uses(folder: Path, uses: Sequence[str], file: str) -> None:
    """Raises SpecError where the folder would be frozen without a file that the setup uses."""
    from remuda.spec.ignore import list_files
    from remuda.spec.uses import explain_unused

    try:
        paths = set(list_files(folder)) if folder.is_dir() else None
    except OSError:
        paths = None
    if paths is None:
        return  # freezing the folder says what is wrong with it
    problems = [
        Problem(file=file, line=0, column=0, message=message, suggestion=hint)
        for message, hint in explain_unused(paths, uses)
    ]
    if problems:
        raise SpecError(problems)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) <= _MOST_BYTES:
            return content.decode()
        message, hint = "the file has more than 4 MiB", "is this a task file?"
    except UnicodeDecodeError as error:
        message, hint = f"this is not text in UTF-8 (byte {error.start})", "save it as UTF-8"
    except FileNotFoundError:
        message, hint = "there is no such file", "`remuda init` writes a starter"
    except IsADirectoryError:
        message, hint = "this is a folder", f"name the file in it, such as {file / 'task.yaml'}"
    except (OSError, ValueError) as error:
        message, hint = f"the file cannot be read: {getattr(error, 'strerror', None) or error}", ""
    raise SpecError([Problem(file=str(file), line=0, column=0, message=message, suggestion=hint)])
