"""Translates the task files of other tools into tasks. All other modules call only this file, and
load the rest of the folder only for such a file; `bills` has a door of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.domain.tasks import TaskSpec
from cavvy.spec.translation import Dialect, Translation

if TYPE_CHECKING:
    from cavvy.importers.compose.files import ComposeTasks
    from cavvy.importers.devcontainer import DevContainer
    from cavvy.importers.dstack.profiles import ProfiledText
    from cavvy.importers.scripts import ScriptTask
    from cavvy.spec.problems import ProblemNotes
    from cavvy.spec.tree import Node


def translate(
    dialect: Dialect,
    documents: "Sequence[Node]",
    notes: "ProblemNotes",
    variables: Mapping[str, str] = {},
) -> Translation:
    """Translate a file of another tool. `variables` contains values for the file's environment
    variables. Mistakes are added to `notes`.
    """
    if dialect is Dialect.KUBERNETES:
        from cavvy.importers.kubernetes.files import translate as translate_kubernetes

        return translate_kubernetes(documents, notes)
    from cavvy.importers.readers import set_variables
    from cavvy.importers.shapes import recast

    trees = [recast(each, notes) for each in documents]
    if dialect is Dialect.SKYPILOT:
        from cavvy.importers.skypilot.tasks import is_header
        from cavvy.importers.skypilot.tasks import translate as translate_skypilot

        first = len(trees) > 1 and is_header(trees[0])
        trees[first:] = [set_variables(each, "envs", variables) for each in trees[first:]]
        return translate_skypilot(trees, notes)
    from cavvy.importers.dstack.tasks import translate as translate_dstack

    return translate_dstack(set_variables(trees[0], "env", variables), notes)


def translate_script(dialect: Dialect, text: str, notes: "ProblemNotes") -> Translation:
    """Translate a batch script of Slurm or PBS. Mistakes are added to `notes`."""
    if dialect is Dialect.PBS:
        from cavvy.importers.pbs.batch_script import translate as translate_pbs

        return translate_pbs(text, notes)
    from cavvy.importers.slurm.batch_script import translate as translate_slurm

    return translate_slurm(text, notes)


def translate_compose(
    root: "Node",
    folder: Path,
    environ: Mapping[str, str],
    named: Mapping[str, str],
    notes: "ProblemNotes",
) -> "ComposeTasks":
    """Translate a Compose file in this folder. `environ` contains this machine's variables, and
    `named` those that the command line names. Raises SpecError and OSError.
    """
    from cavvy.importers.compose.files import translate as translate_services

    return translate_services(root, folder, environ, named, notes)


def add_profile(text: str) -> "ProfiledText":
    """Return the text of a dstack file with the keys of the profile that dstack would apply. Raises
    SpecError.
    """
    from cavvy.importers.dstack import profiles

    return profiles.add_profile(text)


def make_ready(task: TaskSpec, source: Translation) -> TaskSpec:
    """Return the task with the variables and the shell that its commands expect."""
    if source.kind == Dialect.KUBERNETES:
        return task
    if source.kind in (Dialect.SLURM, Dialect.PBS):
        from cavvy.importers.slurm.batch_script import make_ready as make_slurm_ready

        return make_slurm_ready(task, source)
    from cavvy.domain.tasks import take_role
    from cavvy.domain.values import replace
    from cavvy.importers.translation_header import add_translation_header

    groups = []
    for group in task.replica_groups:
        alone = take_role(task, group)
        ready = add_translation_header(alone, source.kind, source.before, source.after)
        groups.append(replace(group, run=ready.run))
    task = add_translation_header(task, source.kind, source.before, source.after)
    return replace(task, replica_groups=tuple(groups)) if groups else task


def read_devcontainer(path: Path, environ: Mapping[str, str]) -> "DevContainer":
    """Read a `devcontainer.json`. `environ` contains this machine's variables, which the file may
    name. Raises SpecError and OSError.
    """
    from cavvy.importers import devcontainer

    return devcontainer.read_file(path, environ)


def read_script(
    path: Path, arguments: Sequence[str], here: Path, *, processes: int
) -> "ScriptTask | None":
    """Return the task of a script in the folder `here`, or None if the file is no script.
    `processes` is how many GPUs its job has. Raises ValueError for a head that cannot be read, and
    OSError.
    """
    from cavvy.importers import scripts

    text = path.read_text("utf-8")
    if not scripts.is_script(path, text):
        return None
    return scripts.read_script(path, text, arguments, here, processes=processes)
