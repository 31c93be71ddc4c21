"""Task files of Cavvy, SkyPilot and dstack: which tool a file is for, and its meaning as a task.

`cli` and `api` call `load_task` and `parse_task`, which give a task that is ready to run or raise
SpecError, which says everything that is wrong with the file. `spec` reads Cavvy's own files;
another tool's are recognised by their keys, checked by their own rules and translated into tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.tasks import Scalar, Task
from cavvy.importers.detect import Dialect, find_dialect, may_be_skypilot
from cavvy.importers.kept_keys import KeptKey, Translation
from cavvy.spec import SpecError, check_uses, parse_own, read_file
from cavvy.spec.problems import ProblemNotes, SourceMark

if TYPE_CHECKING:
    from cavvy.spec.tree import Node, ScalarNode

__all__ = [
    "Dialect",
    "KeptKey",
    "LoadedTask",
    "Translation",
    "load_file",
    "load_task",
    "parse_file",
    "parse_task",
    "translate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """A task with the file it was read from; relative paths of the task are meant from `folder`.

    `source` is the rest of what was read: the tool, and the keys that are kept.
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
    text = read_file(file)
    found = _parse(text, str(path), params, now, to_run=True)
    task = _make_ready(found, ProblemNotes(str(path), text.removeprefix("\ufeff"), now))
    loaded = LoadedTask(task=task, text=text, folder=file.resolve().parent, source=found)
    check_uses(loaded.folder, task, str(path))
    return loaded


def load_file(
    path: str | Path, params: Mapping[str, Scalar] = {}, *, now: datetime | None = None
) -> Translation:
    """Read a file to look at it: what it means, and what of it nothing here does yet. Raises
    SpecError.
    """
    file = Path(path)
    found = parse_file(read_file(file), file=str(path), params=params, now=now)
    for task in found.tasks:
        check_uses(file.resolve().parent, task, str(path))
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
    return _make_ready(_parse(text, file, params, now, to_run=True), ProblemNotes(file, text, now))


def _make_ready(found: Translation, notes: ProblemNotes) -> Task:
    """The one task of a file, with all that its commands want to find. Raises SpecError."""
    for each in found.refused:
        hint = (
            "`cavvy validate` shows all that is kept; delete what can go, or say it as a Cavvy "
            "file does"
        )
        message = f"`{each.key}` of this {found.kind} file is not honoured: {each.reason}"
        notes.add(SourceMark(line=each.line, column=each.column), message, suggestion=hint)
    notes.check()
    assert found.task is not None  # what describes no task is refused
    if found.kind == Dialect.CAVVY:
        return found.task
    from cavvy.importers.translation_header import add_translation_header

    return add_translation_header(found.task, found.kind, found.before)


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
    notes = ProblemNotes(file, text, now)
    documents = compose_all(text, notes)
    dialect = find_dialect(documents)
    if dialect is not Dialect.CAVVY:
        return _parse_other(dialect, documents, notes, file, params)
    theirs = not len(notes) and may_be_skypilot(documents)
    try:
        task = parse_own(documents, notes, file, params)
    except SpecError:
        # No key names the tool, and the file is wrong as Cavvy's: it may be right as SkyPilot's.
        found = _try_skypilot(documents, ProblemNotes(file, text, now), params) if theirs else None
        if found is None or (to_run and found.refused):
            raise
        return found
    return Translation(kind=Dialect.CAVVY, what="task", tasks=(task,))


def _try_skypilot(
    documents: "Sequence[Node]", notes: ProblemNotes, params: Mapping[str, Scalar]
) -> Translation | None:
    try:
        return _parse_other(Dialect.SKYPILOT, documents, notes, notes.file, params)
    except SpecError:
        return None


def _parse_other(
    dialect: Dialect,
    documents: "Sequence[Node]",
    notes: ProblemNotes,
    file: str,
    params: Mapping[str, Scalar],
) -> Translation:
    """A file of another tool: its own rules hold, and its variables are no parameters."""
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import compose_all

    repeated: list[ScalarNode] = []
    if dialect is Dialect.DSTACK:
        notes = ProblemNotes(file, notes.text, notes.now)
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
        KeptKey(
            line=key.mark.line,
            column=key.mark.column,
            key=key.text,
            reason="it is there twice; this one counts",
        )
        for key in repeated
    )
    return replace(found, tasks=tasks, kept=(*found.kept, *twice))


def translate(dialect: Dialect, documents: "Sequence[Node]", notes: ProblemNotes) -> Translation:
    """What another tool's file means here; what is wrong with it is noted."""
    from cavvy.importers.yaml11 import recast

    trees = [recast(each, notes) for each in documents]
    if dialect is Dialect.SKYPILOT:
        from cavvy.importers.skypilot.tasks import translate as translate_skypilot

        return translate_skypilot(trees, notes)
    from cavvy.importers.dstack.tasks import translate as translate_dstack

    return translate_dstack(trees[0], notes)
