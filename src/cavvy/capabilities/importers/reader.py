"""Reads files of other tools: finds the tool, translates the file, and says what it is."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.capabilities.importers.detect import (
    find_batch_system,
    find_by_path,
    find_dialect,
    is_compose,
    name_reason,
    names_no_tool,
    refuse_accelerate,
    refuse_compose,
    refuse_devcontainer,
)
from cavvy.capabilities.importers.dialects import Dialect
from cavvy.domain.slurm_options import TAKEN_OPTIONS
from cavvy.domain.tasks import Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.problems import ProblemNotes, SourceMark, SpecError, SpecProblem
from cavvy.spec.translation import KeptKey, Translation
from cavvy.spec.tree import MAX_CHARACTERS, ScalarNode, compose_all
from cavvy.task_files.foreign import LineTask, ScriptTask, Substitute, TaskSource, find_tool

if TYPE_CHECKING:
    from cavvy.domain.node_pools import NodePool

# For some keys of Cavvy's task file, the keys of other tools that have the same meaning. If the
# command line overrides the Cavvy key, these keys are replaced, too.
_OVERRIDDEN = {
    "image": ("resources.image_id", "image", "registry_auth", "srun --container-image"),
    "resources.gpu": (
        *("resources.accelerators", "resources.gpu"),
        *("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--constraint"),
    ),
    "after": ("--dependency",),
    "resources.regions": ("resources.infra", "resources.zone", "availability_zones"),
    "run": ("run", "commands"),
    "workdir": ("workdir", "repos"),
}


class ForeignReader:
    """Reads the files of the tools in `Dialect`, scripts and notebooks."""

    def translate(self, source: TaskSource) -> Translation | None:
        """Translate a text, unless it is one of Cavvy."""
        named = _read_name(source)
        if system := find_batch_system(source.text, named, source.notes.file):
            return _translate_script(system, source)
        refuse_devcontainer(source)
        refuse_compose(source)
        refuse_accelerate(source)
        kind, why = _choose(source, named)
        if kind is Dialect.CAVVY:
            return None
        file = source.notes.file
        try:
            found = _translate_documents(kind, source)
        except SpecError as error:
            raise SpecError(error.problems, _say_guess(file, "file", kind, why)) from None
        gone = _list_replaced(source.options.overrides)
        kept = tuple(each for each in found.kept if each.key not in gone)
        return replace(found, kept=kept, guess=_say_guess(file, found.what, kind, why))

    def substitute(self, source: TaskSource) -> Substitute | None:
        """Return a Cavvy file for a file of Compose, and a file of dstack with the keys of the
        profile that dstack would apply: only this machine has the files that they name.
        """
        if is_compose(source.text, source.options.dialect):
            return _substitute_compose(source)
        named = _read_name(source)
        if find_batch_system(source.text, named, source.notes.file):
            return None
        refuse_compose(source)
        if _choose(source, named)[0] is not Dialect.DSTACK:
            return None
        found = self.translate(source)
        if found is None or not found.tasks:
            return None
        from cavvy.capabilities.importers.dstack.profiles import add_profile

        profiled = add_profile(source.text)
        kept = () if profiled.note is None else (profiled.note,)
        return Substitute(text=profiled.text, kept=kept)

    def explain(self, source: TaskSource) -> SpecProblem | None:
        """Return a remark on a text that is no valid Cavvy file, but a valid one of SkyPilot."""
        if source.path is None or source.options.dialect or "${{" in source.text:
            return None  # `${{` is Cavvy's own syntax, which shells refuse
        if not names_no_tool(source.documents):
            return None
        options = replace(source.options, overrides="")
        again = TaskSource(source.text, source.path, source.params, source.notes.now, options)
        try:
            _translate_documents(Dialect.SKYPILOT, again)
        except SpecError:
            return None
        return SpecProblem(
            file=source.notes.file,
            line=0,
            column=0,
            message=(
                "the file is valid for SkyPilot, but it was read as a Cavvy file because it has no "
                "key that only SkyPilot has"
            ),
            suggestion="use `--as skypilot` to read the file as a SkyPilot file",
        )

    def make_ready(self, task: TaskSpec, found: Translation) -> TaskSpec:
        """Return the task with the variables and the shell that its commands expect."""
        if found.kind == Dialect.KUBERNETES:
            return task
        if found.kind in (Dialect.SLURM, Dialect.PBS):
            from cavvy.capabilities.importers.slurm.batch_script import make_ready

            return make_ready(task, found)
        from cavvy.capabilities.importers.translation_header import add_translation_header
        from cavvy.domain.tasks import take_role

        groups = []
        for group in task.replica_groups:
            alone = take_role(task, group)
            ready = add_translation_header(alone, found.kind, found.before, found.after)
            groups.append(replace(group, run=ready.run))
        task = add_translation_header(task, found.kind, found.before, found.after)
        return replace(task, replica_groups=tuple(groups)) if groups else task

    def read_script(
        self, path: Path, arguments: Sequence[str], here: Path, *, processes: int
    ) -> ScriptTask | None:
        """Return the task of a script, a notebook or a Makefile, or None for another file."""
        from cavvy.capabilities.importers import scripts

        if not path.is_file():  # a pipe is read once, as a task file
            return None
        text = scripts.read_start(path)
        if not scripts.is_script(path, text):
            return None
        return scripts.read_script(path, text, arguments, here, processes=processes)

    def read_line(self, words: Sequence[str]) -> LineTask | None:
        """Return the task of a line of `ray job submit`, or None for another command."""
        from cavvy.capabilities.importers.ray_lines import read_ray_line

        return read_ray_line(words)

    def read_pool(self, text: str, *, file: str, project: str) -> "NodePool | None":
        """Return the pool of a file of `sky jobs pool apply`, or of a fleet of dstack."""
        from cavvy.capabilities.importers.pools import read_pool

        return read_pool(text, file=file, project=project)


READER = ForeignReader()
# With these options a job has a fixed number of nodes: the least of a range.
_WHOLE = frozenset({"pool", "machine"})


def _read_name(source: TaskSource) -> Dialect | None:
    """Return the tool that the options name. Raises SpecError for an unknown name."""
    name = find_tool(source.options.dialect, source.make_notes())
    return next((each for each in Dialect if each == name), None)


def _choose(source: TaskSource, named: Dialect | None) -> tuple[Dialect, str]:
    """Return for which tool the documents of a source are, and the key that says so, or ""."""
    documents = source.documents
    if named is None and source.path is not None and not len(source.notes):
        named = find_by_path(source.path) if names_no_tool(documents) else None
    if named is not None:
        return named, ""
    kind = find_dialect(documents)
    return kind, "" if kind is Dialect.CAVVY else name_reason(documents, kind)


def _list_replaced(overrides: str) -> set[str]:
    from cavvy.spec.overrides import list_overridden

    return {key for own in list_overridden(overrides) for key in _OVERRIDDEN.get(own, ())}


def _goes_to_slurm(overrides: str) -> bool:
    """Return whether the options choose only Slurm clusters."""
    from cavvy.capabilities.importers.readers import child, items

    for root in compose_all(overrides, ProblemNotes("the options", overrides)) if overrides else ():
        names = child(child(root, "resources"), "providers")
        found = [each.text for each in items(names) if isinstance(each, ScalarNode)]
        if isinstance(names, ScalarNode):
            found = [names.text]
        return found == ["slurm"]
    return False


def _translate_script(system: Dialect, source: TaskSource) -> Translation:
    """Read a batch script, which runs in the current folder, as with its tool's own command."""
    _check_script(source)
    from cavvy.capabilities.importers.translators import translate_script
    from cavvy.spec.overrides import list_overridden
    from cavvy.spec.problems import slug

    notes = source.notes
    _refuse_params(system, notes, source.params, source.options.overrides)
    found = translate_script(system, notes.text, notes)
    guess = _say_guess(notes.file, found.what, system, "")
    try:
        notes.check()
    except SpecError as error:
        raise SpecError(error.problems, guess) from None
    (task,) = found.tasks
    if _WHOLE & list_overridden(source.options.overrides):
        task = replace(task, elastic=None)
    gone = _list_replaced(source.options.overrides)
    kept = tuple(each for each in found.kept if not (each.refused and each.key in gone))
    if system is Dialect.SLURM and _goes_to_slurm(source.options.overrides):
        # sbatch of the cluster gets what names something of it
        kept = tuple(each for each in kept if each.key.removeprefix("--") not in TAKEN_OPTIONS)
    task = replace(task, name=task.name or slug(Path(notes.file).stem) or "task")
    return replace(found, tasks=(task,), kept=kept, guess=guess, takes_folder=True)


def _check_script(source: TaskSource) -> None:
    """Raises SpecError for a text that no shell reads, or that is too long."""
    text, notes = source.text, source.make_notes()
    if len(text) > MAX_CHARACTERS:
        expected = f"at most {MAX_CHARACTERS:,}; the script can start others of its folder"
        notes.outside(notes.file, f"the file has {len(text):,} characters", expected=expected)
    elif "\0" in text:
        before = text.partition("\0")[0]
        mark = SourceMark(line=before.count("\n") + 1, column=len(before.rpartition("\n")[2]) + 1)
        notes.add(mark, "a script cannot contain a NUL byte", suggestion="delete the NUL byte")
    notes.check()


def _substitute_compose(source: TaskSource) -> Substitute:
    """Read a Compose file, whose services become tasks of a Cavvy file."""
    from cavvy.capabilities.importers.compose.files import translate
    from cavvy.capabilities.importers.compose.merging import join_files
    from cavvy.spec.overrides import read_variables
    from cavvy.spec.tree import check_single, compose_all

    notes = source.make_notes()
    guess = f"{notes.file} was read as a file of Docker Compose"
    overrides = source.options.overrides
    try:
        _refuse_params(Dialect.COMPOSE, notes, source.params, overrides)
        root = check_single(compose_all(notes.text, notes), notes)
        notes.check()
        assert root is not None
        joined = join_files(root, notes)
    except SpecError as error:
        raise SpecError(error.problems, guess) from None
    folder, named = Path(notes.file).resolve().parent, read_variables(overrides)
    if joined is not None:
        root, notes, guess = joined.root, joined.notes, f"{guess}; {joined.said}"
    try:
        made = translate(root, folder, os.environ, named, notes)
    except SpecError as error:
        problems = joined.place(error.problems) if joined else error.problems
        raise SpecError(problems, guess) from None
    kept = tuple(joined.place_keys(made.kept)) if joined else made.kept
    whole = "\n---\n".join(made.texts) + "\n"
    return Substitute(text=whole, tool=Dialect.CAVVY, guess=guess, kept=kept, notes=made.notes)


def _say_guess(file: str, what: str, kind: Dialect, why: str) -> str:
    """Return for which tool the file is read. `why` is the key that only this tool has, or ""."""
    reason = f", because of the key `{why}`; `--as cavvy` reads it as a Cavvy file" if why else ""
    return f"{file} was read as a {what} of {kind}{reason}"


def _translate_documents(dialect: Dialect, source: TaskSource) -> Translation:
    """Read a file of another tool by the rules of that tool. Files of other tools have environment
    variables instead of parameters, so any entry in `params` is an error.
    """
    from cavvy.capabilities.importers.translators import translate
    from cavvy.spec.overrides import read_variables
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import check_single, compose_all

    notes, documents, overrides = source.notes, source.documents, source.options.overrides
    repeated: list[ScalarNode] = []
    if dialect is Dialect.DSTACK:
        notes = ProblemNotes(notes.file, notes.text, notes.now)
        documents = compose_all(notes.text, notes, repeated=repeated)
        if not documents:
            notes.check()
    _refuse_params(dialect, notes, source.params, overrides)
    if dialect is Dialect.DSTACK:
        only = check_single(documents, notes)
        documents = documents if only is None else (only,)
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
