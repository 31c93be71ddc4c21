"""Reads a task file, Cavvy's own or that of another tool, as a task.

`load_task` and `parse_task`, which `cli` and `api` call, return a task that is ready to run, or
raise SpecError with every problem of the file. The package `spec` reads Cavvy's own files;
capabilities read those of other tools (`foreign.TaskReader`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from cavvy.domain.tasks import Scalar, TaskSpec, Workdir
from cavvy.domain.values import Struct, replace
from cavvy.spec import SpecError, check_uses, parse_own, read_file
from cavvy.spec.problems import ProblemNotes, SourceMark, SpecProblem
from cavvy.spec.translation import CAVVY, KeptKey, LocalPath, Translation
from cavvy.task_files.foreign import (
    LineTask,
    ReadOptions,
    ScriptTask,
    TaskSource,
    find_tool,
    get_reader,
    list_readers,
)

if TYPE_CHECKING:
    from cavvy.spec.fields.params import WrittenValue
    from cavvy.spec.tree import Node

__all__ = [
    "CAVVY",
    "KeptKey",
    "LoadedTask",
    "ParsedTask",
    "ReadOptions",
    "Translation",
    "find_local",
    "load_file",
    "load_line",
    "load_script",
    "load_task",
    "load_tasks",
    "parse_file",
    "parse_task",
    "parse_tasks",
]


_AS_SUBMITTED = ReadOptions()
_GRAPHS = ("graph", "pipeline", "job group")  # files whose tasks are submitted together


class LoadedTask(Struct, frozen=True, kw_only=True):
    """A task, and the file from which it was read. Relative paths in the task are relative to
    `folder`. `source` is the complete result of reading the file, including the tool and the keys
    that were not translated.
    """

    task: TaskSpec
    text: str
    folder: Path
    source: Translation
    overrides: str = ""


class ParsedTask(Struct, frozen=True, kw_only=True):
    """A task, and what a submission of this task alone consists of: its text, its parameters, and
    the options with which the text is read. The text in the options has the task at the lines that
    it has in the whole file.
    """

    task: TaskSpec
    text: str
    params: Mapping[str, Scalar]
    source: Translation
    options: ReadOptions


def load_task(
    path: str | Path,
    params: Mapping[str, Scalar] = {},
    *,
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> LoadedTask:
    """Read a task file of Cavvy, SkyPilot or dstack that is to be run. `params` overrides
    parameters of the file; the values are strings or have the types of the parameters. If `now` is
    given, times in the file that are before `now` are refused. Raises SpecError with every problem.
    """
    text, found = _load(Path(path), params, now, options)
    return _finish(path, text, found, now, options)


def load_tasks(
    path: str | Path,
    params: Mapping[str, Scalar] = {},
    *,
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> Sequence[LoadedTask]:
    """Read the tasks of a file, which may have several documents with one task each. Otherwise like
    `load_task`. The text of each task is a file of its own, with overrides for what only the whole
    file says.
    """
    text, found = _load(Path(path), params, now, options)
    if not _is_graph(found):
        return (_finish(path, text, found, now, options),)
    loaded: list[LoadedTask] = []
    for alone, values, changed in _split(text, found, params, options):
        each = load_task(path, values, now=now, options=changed)
        source = replace(each.source, guess=found.guess)
        if found.kind == CAVVY and not loaded:  # what was left out of the whole file
            source = replace(source, kept=found.kept, notes=(*source.notes, *found.notes))
        loaded.append(replace(each, text=alone, source=source))
    return loaded


def parse_tasks(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> Sequence[ParsedTask]:
    """Read the tasks of a text, which may have several documents with one task each. Otherwise like
    `parse_task`, with the problems of all tasks.
    """
    found = _parse(text, file, params, now, options)
    if not _is_graph(found):
        task = _make_ready(found, ProblemNotes(file, text, now), options)
        return (
            ParsedTask(
                task=task,
                text=text,
                params=params,
                source=found,
                options=replace(options, text=text),
            ),
        )
    parsed: list[ParsedTask] = []
    problems: list[SpecProblem] = []
    for alone, values, changed in _split(text, found, params, options):
        try:
            source = _parse(changed.text or "", file, values, now, changed)
            task = _make_ready(source, ProblemNotes(file, changed.text or "", now), changed)
        except SpecError as error:
            problems += error.problems
            continue
        each = ParsedTask(task=task, text=alone, params=values, source=source, options=changed)
        parsed.append(each)
    if problems:
        raise SpecError(problems, found.guess)
    return parsed


def _is_graph(found: Translation) -> bool:
    return len(found.tasks) > 1 and not found.refused and found.what in _GRAPHS


def _split(
    text: str, found: Translation, params: Mapping[str, Scalar], options: ReadOptions
) -> Iterator[tuple[str, Mapping[str, Scalar], ReadOptions]]:
    """Yield the text of each task alone, its parameters, and the options to read it. The text in
    the options keeps the numbers of its lines.
    """
    from cavvy.spec.graph import add_overrides, split_text

    parts = list(split_text(text.removeprefix("\ufeff")))[-len(found.tasks) :]
    own = found.kind == CAVVY
    for task, (numbered, alone) in zip(found.tasks, parts, strict=True):
        overrides = options.overrides if own else add_overrides(options.overrides, task)
        changed = replace(options, dialect=found.kind, text=numbered, overrides=overrides)
        yield alone, {name: each for name, each in params.items() if name in task.params}, changed


def _finish(
    path: str | Path,
    text: str,
    found: Translation,
    now: datetime | None,
    options: ReadOptions,
) -> LoadedTask:
    notes = ProblemNotes(str(path), text.removeprefix("\ufeff"), now)
    task = _make_ready(found, notes, options)
    loaded = LoadedTask(
        task=task,
        text=text,
        folder=Path(path).resolve().parent,
        source=found,
        overrides=_add_folder(options.overrides, found.own_folder),
    )
    check_uses(loaded.folder, task, str(path))
    return loaded


def load_file(
    path: str | Path,
    params: Mapping[str, Scalar] = {},
    *,
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> Translation:
    """Read a file to show its meaning and the parts that Cavvy does not support yet. Raises
    SpecError.
    """
    _, found = _load(Path(path), params, now, options)
    for task in found.tasks:
        check_uses(Path(path).resolve().parent, task, str(path))
    return found


def _load(
    file: Path, params: Mapping[str, Scalar], now: datetime | None, options: ReadOptions
) -> tuple[str, Translation]:
    """Read and translate a file. Returns the text that was read, too, which is another one if the
    file's meaning depends on this machine.
    """
    text = read_file(file) if options.text is None else options.text
    found = None
    if options.text is None:
        source = TaskSource(text, file, params, now, options)
        asked = (reader.substitute(source) for reader in list_readers())
        found = next((each for each in asked if each is not None), None)
    if found is None:
        return text, _parse(text, file, params, now, options)
    changed = replace(options, dialect=found.tool or options.dialect)
    read = _parse(found.text, file, params, now, changed)
    read = replace(
        read,
        guess=found.guess or read.guess,
        kept=(*read.kept, *found.kept),
        notes=(*read.notes, *found.notes),
    )
    return found.text, read


def parse_task(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> TaskSpec:
    """Read the task that `text` describes, ready to run. If the text has no `name`, the task is
    named after `file`.

    Raises SpecError with every problem, including the unsupported keys that the work needs.
    """
    found = _parse(text, file, params, now, options)
    return _make_ready(found, ProblemNotes(file, text, now), options)


def load_script(
    path: str | Path, arguments: Sequence[str], *, processes: int = 1
) -> ScriptTask | None:
    """Return the task of a script of Python or of a shell in the current folder, or None if the
    file is no script. `processes` is how many GPUs its job has. Raises ValueError for a head that
    cannot be read, and OSError.
    """
    for reader in list_readers():
        found = reader.read_script(Path(path), arguments, Path.cwd(), processes=processes)
        if found is not None:
            return found
    return None


def load_line(words: Sequence[str]) -> LineTask | None:
    """Return the task of a command that submits a job to another tool, or None for another command.
    Raises ValueError for what a job here lacks.
    """
    for reader in list_readers():
        found = reader.read_line(words)
        if found is not None:
            return found
    return None


def find_local(path: str, folder: Path) -> Path:
    """Resolve a local path in a file of another tool. The path is relative to the file's folder. If
    the path does not exist in the file's folder, the path is relative to the current folder.
    """
    given = Path(path).expanduser()
    here = Path.cwd() / given
    return here if not (folder / given).exists() and here.exists() else folder / given


def _make_ready(found: Translation, notes: ProblemNotes, options: ReadOptions) -> TaskSpec:
    """Return the only task of a file, with the variables and the shell that its commands expect.
    Raises SpecError if the file needs a key that is not supported.
    """
    from cavvy.spec.fields.arrays import list_misfits
    from cavvy.spec.fields.resources import TOPOLOGY_HINT, object_to_topology
    from cavvy.spec.fields.task import PARTS_HINT, list_excess, object_to_parts

    for each in found.refused:
        hint = (
            "`cavvy validate` lists all unsupported keys; delete those that the work does not "
            "need, or write a Cavvy file"
        )
        message = f"`{each.key}` of this {found.kind} file is not supported: {each.reason}"
        mark = SourceMark(line=each.line, column=each.column)
        notes.add(mark, message, suggestion=hint if found.tasks else "")
    if len(found.tasks) > 1 and not found.refused:
        hint = "`cavvy run` submits them together"
        notes.outside(notes.file, f"the file has {len(found.tasks)} tasks", suggestion=hint)
    serves = found.task is not None and found.task.service is not None
    own = found.kind == CAVVY
    if serves and not options.serves:
        notes.outside(
            "service",
            "the file describes a service, not a job",
            suggestion=f"`cavvy serve {notes.file}` starts the service"
            + ("; without `service`, the commands run as a job" if own else ""),
        )
    if options.serves and found.task is not None and not serves:
        notes.outside(
            "service",
            "the file describes a job, not a service of Cavvy",
            expected="a section such as `service: {port: 8000}`",
            suggestion="docs/guides/serve.md shows an example; `cavvy run FILE` runs a job",
        )
    if found.task is not None:
        for name, count, most in list_excess(found.task):
            message = f"{count:,} entries are too many"
            notes.outside(name, message, expected=f"at most {most:,} entries")
        if problem := object_to_parts(found.task.resources, found.task.nodes):
            notes.outside("nodes", problem, suggestion=PARTS_HINT)
        if problem := object_to_topology(found.task.topology, found.task.nodes):
            notes.outside("topology", problem, suggestion=TOPOLOGY_HINT)
        for key, message, hint in (*list_misfits(found.task), *_list_beside_pool(found.task)):
            notes.outside(key, message, suggestion=hint)
    try:
        notes.check()
    except SpecError as error:
        raise SpecError(error.problems, found.guess) from None
    assert found.task is not None  # A file that describes no task was already refused above.
    if found.kind == CAVVY:
        return found.task
    return get_reader(found.kind).make_ready(found.task, found)


def _list_beside_pool(task: TaskSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that exclude a pool: one may be in the file and the other among the options,
    whose keys are checked alone.
    """
    for key in ("machine", "keep") if task.pool is not None else ():
        if getattr(task, key):
            hint = "delete it, or leave out the option"
            yield key, f"`{key}` has no meaning with `pool`", hint


def parse_file(
    text: str,
    *,
    file: str = "task.yaml",
    params: Mapping[str, Scalar] = {},
    now: datetime | None = None,
    options: ReadOptions = _AS_SUBMITTED,
) -> Translation:
    """Translate `text`, which may be for any supported tool. Raises SpecError with all problems."""
    return _parse(text, file, params, now, options)


def _parse(
    text: str,
    file: str | Path,
    params: Mapping[str, Scalar],
    now: datetime | None,
    options: ReadOptions,
) -> Translation:
    """Translate a string. If `file` is a `Path`, the task is going to be submitted. The name of
    this file may show which tool it belongs to. If `file` is a string, the string is only a name
    for messages.
    """
    from cavvy.planner.objections import spread_task
    from cavvy.spec.overrides import apply_overrides, read_sweep

    source = TaskSource(text, file, params, now, options)
    changed = options.overrides
    submits = source.path is not None
    found = _translate(source)
    if found is None:
        sweep = read_sweep(changed)
        if len(source.documents) > 1:
            found = _parse_graph(source.documents, source.notes, params, changed)
        else:
            found = _parse_own(source, sweep)
    kept = (
        replace(each, refused=each.refused and not (submits and each.until_submitted))
        for each in found.kept
    )
    tasks = tuple(spread_task(apply_overrides(task, changed, now)) for task in found.tasks)
    found = replace(found, tasks=tasks, kept=tuple(kept))
    if found.kind == CAVVY:
        from cavvy.spec.fields.params import list_unreplaced

        unreplaced = (note for task in tasks for note in list_unreplaced(task))
        found = replace(found, notes=(*found.notes, *unreplaced))
    if any(task.env for task in tasks):
        from cavvy.spec.fields.task import list_without_effect

        lost = dict.fromkeys(note for task in tasks for note in list_without_effect(task))
        found = replace(found, notes=(*found.notes, *lost))
    if source.path is None:
        return found
    beside = source.path.resolve().parent
    if options.takes_folder or found.takes_folder:
        return _take_folder(found, Path.cwd(), Path.cwd() if options.takes_folder else beside)
    return _find_own_folder(found, source.documents, beside)


def _translate(source: TaskSource) -> Translation | None:
    """Translate a text for another tool. Returns None for one of Cavvy."""
    find_tool(source.options.dialect, source.make_notes())
    found = (reader.translate(source) for reader in list_readers())
    return next((each for each in found if each is not None), None)


def _find_own_folder(found: Translation, documents: "Sequence[Node]", folder: Path) -> Translation:
    """If a task without a working folder names a file of `folder`, which contains the task file, or
    of the current folder above it, submit this folder, or note why it is not submitted: other tools
    submit nothing. A key `workdir` without a value means that no folder is submitted.
    """
    from cavvy.spec.own_folder import choose_named, explain_unfit, find_named
    from cavvy.spec.tree import MapNode

    task, root = found.task, documents[0] if documents else None
    if task is None or task.workdir is not None or found.local:
        return found
    if found.kind != CAVVY and task.image:
        return found  # the files are in the image
    if isinstance(root, MapNode) and root.get("workdir") is not None:
        return found
    beside = folder
    folder, named = find_named(task, beside)
    if not named:
        return found
    if found.kind != CAVVY:
        own = "." if folder == Path.cwd() else quote(str(folder))
        name, key = named[0]
        unfit = explain_unfit(folder)
        how = f"{folder} cannot be one, because {unfit}" if unfit else f"--workdir {own} submits it"
        note = (
            f"`{key}` names {name}, but a {found.kind} file without a working folder starts in an "
            f"empty one; {how}"
        )
        return replace(found, notes=(*found.notes, note))
    (name, key), unfit = choose_named(folder, named)
    if unfit:
        note = (
            f"`{key}` names {name}, but the work starts in an empty folder: {folder} is not "
            f"submitted without `workdir`, because {unfit}"
        )
    else:
        path = os.path.relpath(folder, beside)
        note = (
            f"`{key}` names {name}, so the folder {folder} is submitted, as `workdir: {path}` says"
        )
        task = replace(task, workdir=Workdir(path=path))
        found = replace(found, tasks=(task,), own_folder=path)
    return replace(found, notes=(*found.notes, note))


def _take_folder(found: Translation, folder: Path, beside: Path) -> Translation:
    """Submit the current folder with a command or a script, or note why it is not submitted. The
    path of the folder is relative to `beside`.
    """
    from cavvy.spec.own_folder import explain_unsent

    task = found.task
    if task is None or task.workdir is not None:
        return found
    unsent = explain_unsent(folder)
    if unsent is None:
        return found
    if unsent:
        note = (
            f"the command starts in an empty folder: {folder} is not submitted, because {unsent}; "
            "--workdir FOLDER submits another folder"
        )
        return replace(found, notes=(*found.notes, note))
    path = os.path.relpath(folder, beside)
    return replace(found, tasks=(replace(task, workdir=Workdir(path=path)),), own_folder=path)


def _add_folder(overrides: str, folder: str) -> str:
    """Add the working folder, if there is one, to the text of overrides."""
    if not folder:
        return overrides
    import yaml

    table = yaml.safe_load(overrides) if overrides else {}
    return str(yaml.safe_dump({**table, "workdir": folder}, sort_keys=False))


def _parse_own(
    source: TaskSource, sweep: "Mapping[str, Sequence[WrittenValue]] | None"
) -> Translation:
    """Read a Cavvy file. If the file is invalid, the error mentions for which other tool it may
    be.
    """
    documents, notes = source.documents, source.notes
    try:
        return _make_own(documents, parse_own(documents, notes, notes.file, source.params, sweep))
    except SpecError as error:
        remarks = [found for each in list_readers() if (found := each.explain(source)) is not None]
        if not remarks:
            raise
        raise SpecError([*error.problems, *remarks]) from None


def _make_own(documents: "Sequence[Node]", task: TaskSpec) -> Translation:
    from cavvy.spec.batch_section import find_batch_files
    from cavvy.spec.engine_section import find_engine_files

    files = {**find_engine_files(documents), **find_batch_files(documents)}
    local = (
        LocalPath(source=str(source), inside=inside) for inside, source in sorted(files.items())
    )
    return Translation(kind=CAVVY, what="task", tasks=(task,), local=tuple(local))


def _parse_graph(
    documents: "Sequence[Node]", notes: ProblemNotes, params: Mapping[str, Scalar], overrides: str
) -> Translation:
    """Read a Cavvy file with several tasks. Raises SpecError with the problems of all of them."""
    from cavvy.spec.graph import check_graph, split_params
    from cavvy.spec.overrides import list_overridden

    found: list[Translation] = []
    problems: list[SpecProblem] = []
    for document, own in zip(documents, split_params(documents, params), strict=True):
        apart = ProblemNotes(notes.file, notes.text, notes.now)
        try:
            task = parse_own([document], apart, apart.file, own, None)
            found.append(_make_own([document], task))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    tasks = tuple(task for each in found for task in each.tasks)
    check_graph(tasks, documents, list_overridden(overrides), notes)
    notes.check()
    return Translation(kind=CAVVY, what="graph", tasks=tasks)
