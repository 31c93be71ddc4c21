"""Reads, checks and explains the user's task files.

The package `task_files` calls this package for files in Cavvy's own format.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.tasks import Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.named_files import read_named
from cavvy.spec.problems import ProblemNotes, SpecError, SpecProblem

if TYPE_CHECKING:
    from cavvy.spec.fields.params import WrittenValue
    from cavvy.spec.tree import Node

__all__ = ["SpecError", "SpecProblem", "check_uses", "parse_own", "read_file"]

_MOST_BYTES = 4 << 20


def parse_own(
    documents: "Sequence[Node]",
    notes: ProblemNotes,
    file: str,
    params: Mapping[str, Scalar],
    sweep: "Mapping[str, Sequence[WrittenValue]] | None" = None,
) -> TaskSpec:
    """Read the task of a file in Cavvy's own format. `sweep` replaces the `sweep` of the file.
    Raises SpecError with every problem.
    """
    from cavvy.spec.batch_section import expand_batch
    from cavvy.spec.engine_section import add_edge_run, add_own_command, expand_engine
    from cavvy.spec.fields.arrays import SWEEP
    from cavvy.spec.fields.params import ParamFiller, read_params
    from cavvy.spec.fields.task import TASK
    from cavvy.spec.overrides import elsewhere
    from cavvy.spec.problems import slug
    from cavvy.spec.tree import MapNode, check_single

    notes.place_key = elsewhere
    root = check_single(documents, notes) if documents else None
    if root is None:
        notes.check()
        raise AssertionError("the file could not be parsed, but no problem was recorded")
    if sweep is None and isinstance(root, MapNode) and (node := root.get("sweep")) is not None:
        sweep = SWEEP.read(node, notes)
    values, swept = read_params(root, params, notes, sweep or {})
    if isinstance(root, MapNode):
        filler = ParamFiller(values, notes, root.get("run"), sweep or ())
        # Declarations under `params` and `sweep` contain no expressions that could be replaced.
        entries = tuple(
            (key, value if key.text in ("params", "sweep") else filler.fill_key(key.text, value))
            for key, value in root.entries
        )
        root = expand_batch(replace(root, entries=entries), notes)
        root = add_edge_run(add_own_command(expand_engine(root, notes)))
    task: TaskSpec | None = TASK.read(root, notes)
    notes.check()
    assert task is not None
    settled = {name: written.value for name, written in values.items() if written is not None}
    name = task.name or slug(Path(file).stem) or "task"
    return replace(task, name=name, params=settled, sweep=swept)


def check_uses(home: Path, task: TaskSpec, file: str) -> None:
    """Raise SpecError if the snapshot of the working folder would lack a file that the setup
    uses.
    """
    if not task.setup_uses or task.workdir is None or task.workdir.path is None:
        return
    from cavvy.spec.ignore import list_files
    from cavvy.spec.uses import NAME, explain_unused, is_added

    folder = home / task.workdir.path
    try:
        paths = set(list_files(folder)) if folder.is_dir() else None
    except OSError:
        paths = None
    if paths is None:
        return  # This problem is reported later, when the snapshot is made.
    if is_added(task.setup_uses, folder):
        paths.add(NAME)
    problems = [
        SpecProblem(file=file, line=0, column=0, message=message, suggestion=hint)
        for message, hint in explain_unused(paths, task.setup_uses)
    ]
    if problems:
        raise SpecError(problems)


def read_file(file: Path) -> str:
    """Return the text of a file. Raises SpecError if the file cannot be read."""
    try:
        content = read_named(file, _MOST_BYTES + 1)
        if len(content) <= _MOST_BYTES:
            return content.decode()
        message, hint = "the file is larger than 4 MiB", "is this a task file?"
    except UnicodeDecodeError as error:
        message, hint = (
            f"the file is not valid UTF-8 (at byte {error.start})",
            "save the file as UTF-8",
        )
    except FileNotFoundError:
        close = _find_close(file)
        message = "the file does not exist"
        hint = f"did you mean {close}?" if close else "`cavvy init` writes a starter file"
    except IsADirectoryError:
        message, hint = (
            "this is a folder",
            f"use a file in this folder, for example {file / 'task.yaml'}",
        )
    except (OSError, ValueError) as error:
        message, hint = f"the file cannot be read: {getattr(error, 'strerror', None) or error}", ""
    raise SpecError(
        [SpecProblem(file=str(file), line=0, column=0, message=message, suggestion=hint)]
    )


def _find_close(file: Path) -> Path | None:
    """Return the YAML file with the most similar name in the same folder."""
    from difflib import get_close_matches

    try:
        names = [each.name for each in file.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return None
    stem = [name for name in names if Path(name).stem == file.name]
    close = stem or get_close_matches(file.name, names, n=1)
    return file.with_name(close[0]) if close else None
