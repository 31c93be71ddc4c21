"""Detects the tool for which a task file was written, and translates the file into a task.

`load_task` and `parse_task`, which `cli` and `api` call, return a task that is ready to run, or
raise SpecError with every problem of the file. The package `spec` reads Cavvy's own files. A file
of another tool is recognised by its keys, and `importers` translates it into tasks.
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
from cavvy.spec.translation import Dialect, KeptKey, LocalPath, Translation
from cavvy.task_files.detect import (
    compose_readable,
    find_batch_system,
    find_by_path,
    find_dialect,
    is_compose,
    name_reason,
    names_no_tool,
)

if TYPE_CHECKING:
    from cavvy.importers.scripts import ScriptTask
    from cavvy.spec.fields.params import WrittenValue
    from cavvy.spec.tree import Node, ScalarNode

__all__ = [
    "Dialect",
    "KeptKey",
    "LoadedTask",
    "ParsedTask",
    "ReadOptions",
    "Translation",
    "find_local",
    "load_file",
    "load_script",
    "load_task",
    "load_tasks",
    "parse_file",
    "parse_task",
    "parse_tasks",
]


# For some keys of Cavvy's task file, the keys of other tools that have the same meaning. If the
# command line overrides the Cavvy key, these keys are replaced, too.
_OVERRIDDEN = {
    "image": ("resources.image_id", "image", "registry_auth"),
    "resources.gpu": ("resources.accelerators", "resources.gpu"),
    "resources.regions": ("resources.infra", "resources.zone", "availability_zones"),
    "run": ("run", "commands"),
    "workdir": ("workdir", "repos"),
}


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Options from the command line for reading a file.

    `dialect` names the file's tool. If `dialect` is "", the tool is detected from the file's keys,
    name or folder. `text`, if given, is read instead of the file. `overrides` is a YAML table with
    keys of the task file; its values replace the file's values. If `serves` is true, the file must
    describe a service, and otherwise a job. If `takes_folder` is true, `text` is a command, which
    gets the current folder as its working folder.
    """

    dialect: str = ""
    overrides: str = ""
    text: str | None = None
    serves: bool = False
    takes_folder: bool = False


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
        if found.kind == Dialect.CAVVY and not loaded:  # what was left out of the whole file
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
    own = found.kind == Dialect.CAVVY
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
    """Read and translate a file. The returned text of a dstack file includes the keys of the
    profile that dstack would apply.
    """
    text = read_file(file) if options.text is None else options.text
    if options.text is None and is_compose(text, options.dialect):
        return _load_compose(text, file, params, now, options)
    found = _parse(text, file, params, now, options)
    if options.text is not None or found.kind != Dialect.DSTACK or not found.tasks:
        return text, found
    from cavvy.importers import add_profile

    profiled = add_profile(text)
    if profiled.note is not None:
        found = _parse(profiled.text, file, params, now, options)
        found = replace(found, kept=(*found.kept, profiled.note))
    return profiled.text, found


def _load_compose(
    text: str, file: Path, params: Mapping[str, Scalar], now: datetime | None, options: ReadOptions
) -> tuple[str, Translation]:
    """Read a Compose file, whose services become tasks of a Cavvy file. Returns the text of that
    file, since only this machine has the files and variables that the Compose file names.
    """
    from cavvy.importers import translate_compose
    from cavvy.spec.overrides import read_variables
    from cavvy.spec.tree import check_single, compose_all

    notes = ProblemNotes(str(file), text.removeprefix("\ufeff"), now)
    guess = f"{file} was read as a file of Docker Compose"
    try:
        _refuse_params(Dialect.COMPOSE, notes, params, options.overrides)
        root = check_single(compose_all(notes.text, notes), notes)
        notes.check()
        assert root is not None
        named = read_variables(options.overrides)
        made = translate_compose(root, file.resolve().parent, os.environ, named, notes)
    except SpecError as error:
        raise SpecError(error.problems, guess) from None
    whole = "\n---\n".join(made.texts) + "\n"
    found = _parse(whole, file, {}, now, replace(options, dialect="cavvy"))
    found = replace(
        found, guess=guess, kept=(*found.kept, *made.kept), notes=(*found.notes, *made.notes)
    )
    return whole, found


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
) -> "ScriptTask | None":
    """Return the task of a script of Python or of a shell in the current folder, or None if the
    file is no script. `processes` is how many GPUs its job has. Raises ValueError for a head that
    cannot be read, and OSError.
    """
    from cavvy.importers import read_script

    return read_script(Path(path), arguments, Path.cwd(), processes=processes)


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
    own = found.kind == Dialect.CAVVY
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
    if found.kind == Dialect.CAVVY:
        return found.task
    from cavvy.importers import make_ready

    return make_ready(found.task, found)


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
    from cavvy.spec.graph import list_filled
    from cavvy.spec.overrides import apply_overrides, list_overridden, read_sweep

    text = text.removeprefix("\ufeff")
    notes = ProblemNotes(str(file), text, now)
    submits = isinstance(file, Path)
    changed = options.overrides
    if system := find_batch_system(text, _named_dialect(options.dialect, notes)):
        return _parse_script(system, file, notes, params, options)
    documents = compose_readable(notes)
    neutral = submits and not len(notes) and names_no_tool(documents)
    dialect = _named_dialect(options.dialect, notes) or (
        find_by_path(Path(file)) if neutral else None
    )
    if (kind := dialect or find_dialect(documents)) is not Dialect.CAVVY:
        why = "" if dialect else name_reason(documents, kind)
        try:
            found = _parse_other(kind, documents, notes, params, changed)
        except SpecError as error:
            raise SpecError(error.problems, _say_guess(str(file), "file", kind, why)) from None
        found = replace(found, guess=_say_guess(str(file), found.what, kind, why))
    else:
        # `${{` is Cavvy's own syntax, which shells refuse.
        neutral = neutral and dialect is None and "${{" not in text
        sweep = read_sweep(changed)
        filled = list_filled(documents)
        if len(filled) > 1:
            found = _parse_graph(filled, notes, params, changed)
        else:
            found = _parse_own(documents, notes, params, sweep, is_neutral=neutral)
    gone = {key for own in list_overridden(changed) for key in _OVERRIDDEN.get(own, ())}
    kept = (
        replace(each, refused=each.refused and not (submits and each.until_submitted))
        for each in found.kept
        if each.key not in gone
    )
    tasks = tuple(spread_task(apply_overrides(task, changed, now)) for task in found.tasks)
    found = replace(found, tasks=tasks, kept=tuple(kept))
    if found.kind == Dialect.CAVVY:
        from cavvy.spec.fields.params import list_unreplaced

        unreplaced = (note for task in tasks for note in list_unreplaced(task))
        found = replace(found, notes=(*found.notes, *unreplaced))
    if not isinstance(file, Path):
        return found
    if options.takes_folder:
        return _take_folder(found, Path.cwd(), Path.cwd())
    return _find_own_folder(found, documents, file.resolve().parent)


def _parse_script(
    system: Dialect,
    file: str | Path,
    notes: ProblemNotes,
    params: Mapping[str, Scalar],
    options: ReadOptions,
) -> Translation:
    """Read a batch script, which runs in the current folder, as with its tool's own command."""
    from cavvy.importers import translate_script
    from cavvy.planner.objections import spread_task
    from cavvy.spec.overrides import apply_overrides
    from cavvy.spec.problems import slug

    _refuse_params(system, notes, params, options.overrides)
    found = translate_script(system, notes.text, notes)
    guess = _say_guess(str(file), found.what, system, "")
    try:
        notes.check()
    except SpecError as error:
        raise SpecError(error.problems, guess) from None
    (task,) = found.tasks
    task = replace(task, name=task.name or slug(Path(notes.file).stem) or "task")
    task = spread_task(apply_overrides(task, options.overrides, notes.now))
    found = replace(found, tasks=(task,), guess=guess)
    if isinstance(file, Path):
        found = _take_folder(found, Path.cwd(), file.resolve().parent)
    return found


def _say_guess(file: str, what: str, kind: Dialect, why: str) -> str:
    """Return for which tool the file is read. `why` is the key that only this tool has, or ""."""
    reason = f", because of the key `{why}`; `--as cavvy` reads it as a Cavvy file" if why else ""
    return f"{file} was read as a {what} of {kind}{reason}"


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
    if found.kind == Dialect.KUBERNETES or (found.kind != Dialect.CAVVY and task.image):
        return found  # the files are in the image
    if isinstance(root, MapNode) and root.get("workdir") is not None:
        return found
    beside = folder
    folder, named = find_named(task, beside)
    if not named:
        return found
    if found.kind in (Dialect.SKYPILOT, Dialect.DSTACK):
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


def _named_dialect(name: str, notes: ProblemNotes) -> Dialect | None:
    """Return the tool with this name, or None if the name is empty. Raises SpecError for an unknown
    name.
    """
    found = next((each for each in Dialect if each.lower() == name.lower()), None)
    if name and found is None:
        notes.outside(
            f"--as {name}",
            "unknown tool",
            expected="skypilot, dstack, kubernetes, slurm, pbs, compose or cavvy",
        )
        notes.check()
    return found


def _parse_own(
    documents: "Sequence[Node]",
    notes: ProblemNotes,
    params: Mapping[str, Scalar],
    sweep: "Mapping[str, Sequence[WrittenValue]] | None",
    *,
    is_neutral: bool,
) -> Translation:
    """Read a Cavvy file. `is_neutral` means that no key of the file identifies a tool. If the file
    is invalid and `is_neutral` is true, the error mentions that the file may be a SkyPilot file.
    """
    text, now = notes.text, notes.now
    try:
        task = parse_own(documents, notes, notes.file, params, sweep)
    except SpecError as error:
        if not is_neutral:
            raise
        try:
            _parse_other(
                Dialect.SKYPILOT, documents, ProblemNotes(notes.file, text, now), params, ""
            )
        except SpecError:
            raise error from None
        hint = SpecProblem(
            file=notes.file,
            line=0,
            column=0,
            message=(
                "the file is valid for SkyPilot, but it was read as a Cavvy file because it has no "
                "key that only SkyPilot has"
            ),
            suggestion="use `--as skypilot` to read the file as a SkyPilot file",
        )
        raise SpecError([*error.problems, hint]) from None
    from cavvy.spec.batch_section import find_batch_files
    from cavvy.spec.engine_section import find_engine_files

    files = {**find_engine_files(documents), **find_batch_files(documents)}
    local = (
        LocalPath(source=str(source), inside=inside) for inside, source in sorted(files.items())
    )
    return Translation(kind=Dialect.CAVVY, what="task", tasks=(task,), local=tuple(local))


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
            found.append(_parse_own([document], apart, own, None, is_neutral=False))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    tasks = tuple(task for each in found for task in each.tasks)
    check_graph(tasks, documents, list_overridden(overrides), notes)
    notes.check()
    return Translation(kind=Dialect.CAVVY, what="graph", tasks=tasks)


def _parse_other(
    dialect: Dialect,
    documents: "Sequence[Node]",
    notes: ProblemNotes,
    params: Mapping[str, Scalar],
    overrides: str,
) -> Translation:
    """Read a file of another tool by the rules of that tool. Files of other tools have environment
    variables instead of parameters, so any entry in `params` is an error.
    """
    from cavvy.importers import translate
    from cavvy.spec.overrides import read_variables
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import check_single, compose_all

    repeated: list[ScalarNode] = []
    if dialect is Dialect.DSTACK:
        notes = ProblemNotes(notes.file, notes.text, notes.now)
        documents = compose_all(notes.text, notes, repeated=repeated)
        if not documents:
            notes.check()
    _refuse_params(dialect, notes, params, overrides)
    if dialect is Dialect.DSTACK:
        check_single(documents, notes)
    found = translate(dialect, documents, notes, read_variables(overrides))
    notes.check()
    stem = slug(Path(notes.file).stem.removesuffix(".dstack").removesuffix(".sky")) or "task"
    if found.what == "pipeline":
        from cavvy.spec.graph import chain

        tasks = tuple(chain(found.tasks, stem))
    else:
        tasks = tuple(replace(task, name=task.name or stem) for task in found.tasks)
    twice = (
        KeptKey(
            line=key.mark.line,
            column=key.mark.column,
            key=key.text,
            reason="the key appears twice; Cavvy uses the value in this line",
        )
        for key in repeated
    )
    return replace(found, tasks=tasks, kept=(*found.kept, *twice))


def _refuse_params(
    dialect: Dialect, notes: ProblemNotes, params: Mapping[str, Scalar], overrides: str
) -> None:
    """Refuse the values of parameters, which files of other tools do not have."""
    from cavvy.spec.overrides import read_sweep

    for name in params:
        hint = (
            f"a {dialect} file has environment variables instead of parameters; set one with --env "
            f"{name}=VALUE"
        )
        notes.outside(
            f"--param {name}", f"this {dialect} file declares no parameter {name}", suggestion=hint
        )
    for name in read_sweep(overrides) or {}:
        message = f"this {dialect} file declares no parameter {name}"
        hint = "use --array, and compute the values from CAVVY_ARRAY_INDEX"
        notes.outside(f"--sweep {name}", message, suggestion=hint)
