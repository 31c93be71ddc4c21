"""The user's files: parse, check, explain.

`load_task` and `parse_task` give a task or raise SpecError, which says everything that is wrong
with the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.tasks import Scalar, Task
from cavvy.spec.peers.detect import Dialect, find_dialect, may_be_skypilot
from cavvy.spec.peers.kept import Kept, Translation
from cavvy.spec.problems import Mark, Notes, Problem, SpecError

if TYPE_CHECKING:
    from cavvy.spec.tree import Node, ScalarNode

__all__ = [
    "Kept",
    "LoadedTask",
    "Problem",
    "SpecError",
    "Translation",
    "load_file",
    "load_task",
    "parse_file",
    "parse_task",
]


_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task with the file it was read from; relative paths of the task are meant from `folder`.

    `source` is what was read, the task aside: whose file, and what is kept of it.
    """

    task: Task
    text: str
    folder: Path
    source: Translation


def load_task(
    path: str | Path, params: Mapping[str, Scalar] = {}, *, now: datetime | None = None
) -> LoadedTask:
    """Read a task file, of Cavvy, SkyPilot or dstack, that is to be run.

    `params` are the overrides, as typed or as values. With `now`, times in the past are refused.
    Raises SpecError.
    """
    file = Path(path)
    text = _read(file)
    found = _parse(text, str(path), params, now, to_run=True)
    task = _make_ready(found, Notes(str(path), text.removeprefix("\ufeff"), now))
    loaded = LoadedTask(task=task, text=text, folder=file.resolve().parent, source=found)
    _check_uses(loaded.folder, task, str(path))
    return loaded


def load_file(
    path: str | Path, params: Mapping[str, Scalar] = {}, *, now: datetime | None = None
) -> Translation:
    """Read a file to look at it: what it means, and what of it nothing here does yet. Raises
    SpecError.
    """
    file = Path(path)
    found = parse_file(_read(file), file=str(path), params=params, now=now)
    for task in found.tasks:
        _check_uses(file.resolve().parent, task, str(path))
    return found


def parse_task(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
) -> Task:
    """The task that `text` describes, ready to run; a file without `name` gives its own.

    Another tool's file must ask for nothing that is only kept. Raises SpecError with every problem.
    """
    return _make_ready(_parse(text, file, params, now, to_run=True), Notes(file, text, now))


def _make_ready(found: Translation, notes: Notes) -> Task:
    """The one task of a file, with all that its commands want to find. Raises SpecError."""
    for each in found.refused:
        hint = (
            "`cavvy validate` shows all that is kept; delete what can go, or say it as a Cavvy "
            "file does"
        )
        message = f"`{each.key}` of this {found.kind} file is not honoured: {each.reason}"
        notes.add(Mark(line=each.line, column=each.column), message, suggestion=hint)
    notes.check()
    assert found.task is not None  # what describes no task is refused
    if found.kind == Dialect.CAVVY:
        return found.task
    from cavvy.spec.peers.prologue import add_prologue

    return add_prologue(found.task, found.kind, found.before)


def parse_file(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
) -> Translation:
    """What `text` means, whichever tool it was written for. Raises SpecError with every problem."""
    return _parse(text, file, params, now, to_run=False)


def _parse(
    text: str, file: str, params: Mapping[str, Scalar], now: datetime | None, *, to_run: bool
) -> Translation:
    from cavvy.spec.tree import compose_all

    text = text.removeprefix("\ufeff")
    notes = Notes(file, text, now)
    documents = compose_all(text, notes)
    dialect = find_dialect(documents)
    if dialect is not Dialect.CAVVY:
        return _parse_other(dialect, documents, notes, file, params)
    theirs = not len(notes) and may_be_skypilot(documents)
    try:
        task = _parse_own(documents, notes, file, params)
    except SpecError:
        # No key says whose it is, and as ours it is wrong: it may be right as SkyPilot's.
        found = _try_skypilot(documents, Notes(file, text, now), params) if theirs else None
        if found is None or (to_run and found.refused):
            raise
        return found
    return Translation(kind=Dialect.CAVVY, what="task", tasks=(task,))


def _try_skypilot(
    documents: "Sequence[Node]", notes: Notes, params: Mapping[str, Scalar]
) -> Translation | None:
    try:
        return _parse_other(Dialect.SKYPILOT, documents, notes, notes.file, params)
    except SpecError:
        return None


def _parse_own(
    documents: "Sequence[Node]", notes: Notes, file: str, params: Mapping[str, Scalar]
) -> Task:
    from cavvy.spec.fields.params import read_params, substitute
    from cavvy.spec.fields.task import TASK
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import MapNode, check_single

    root = check_single(documents, notes) if documents else None
    if root is None:
        notes.check()
        raise AssertionError("a file without a tree has a problem")
    values = read_params(root, params, notes)
    if isinstance(root, MapNode):
        # The declarations themselves are read as they stand.
        entries = tuple(
            (k, v if k.text == "params" else substitute(v, values, notes)) for k, v in root.entries
        )
        root = replace(root, entries=entries)
    task = TASK.read(root, notes)
    notes.check()
    assert task is not None
    settled = {name: written.value for name, written in values.items() if written is not None}
    return replace(task, name=task.name or slug(Path(file).stem) or "task", params=settled)


def _parse_other(
    dialect: Dialect,
    documents: "Sequence[Node]",
    notes: Notes,
    file: str,
    params: Mapping[str, Scalar],
) -> Translation:
    """A file of another tool: its own rules hold, and its variables are no parameters."""
    from cavvy.spec.peers import translate
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import compose_all

    repeated: list[ScalarNode] = []
    if dialect is Dialect.DSTACK:
        notes = Notes(file, notes.text, notes.now)
        documents = compose_all(notes.text, notes, repeated=repeated)
        if not documents:
            notes.check()
    for name in params:
        hint = f"delete it, or change the variable in the file: a {dialect} file has no parameters"
        notes.outside(
            f"--param {name}", f"this {dialect} file declares no parameter {name}", suggestion=hint
        )
    found = translate(dialect, documents, notes)
    notes.check()
    stem = slug(Path(file).stem.removesuffix(".dstack").removesuffix(".sky")) or "task"
    tasks = tuple(replace(task, name=task.name or stem) for task in found.tasks)
    twice = (
        Kept(
            line=key.mark.line,
            column=key.mark.column,
            key=key.text,
            reason="it is there twice; this one counts",
        )
        for key in repeated
    )
    return replace(found, tasks=tasks, kept=(*found.kept, *twice))


def _check_uses(home: Path, task: Task, file: str) -> None:
    """Raises SpecError where the folder would be frozen without a file that the setup uses."""
    if not task.setup_uses or task.workdir is None or task.workdir.path is None:
        return
    from cavvy.spec.ignore import list_files
    from cavvy.spec.uses import explain_unused

    folder = home / task.workdir.path
    try:
        paths = set(list_files(folder)) if folder.is_dir() else None
    except OSError:
        paths = None
    if paths is None:
        return  # freezing the folder says what is wrong with it
    problems = [
        Problem(file=file, line=0, column=0, message=message, suggestion=hint)
        for message, hint in explain_unused(paths, task.setup_uses)
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
        message, hint = "there is no such file", "`cavvy init` writes a starter"
    except IsADirectoryError:
        message, hint = "this is a folder", f"name the file in it, such as {file / 'task.yaml'}"
    except (OSError, ValueError) as error:
        message, hint = f"the file cannot be read: {getattr(error, 'strerror', None) or error}", ""
    raise SpecError([Problem(file=str(file), line=0, column=0, message=message, suggestion=hint)])
