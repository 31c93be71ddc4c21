"""Translates the documents or the script of a file, whose tool is known, into tasks. The translator
of a tool is loaded only for its files.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cavvy.capabilities.importers.dialects import Dialect
from cavvy.spec.translation import Translation

if TYPE_CHECKING:
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
        from cavvy.capabilities.importers.kubernetes.files import translate as translate_kubernetes

        return translate_kubernetes(documents, notes)
    from cavvy.capabilities.importers.readers import set_variables
    from cavvy.capabilities.importers.shapes import recast

    trees = [recast(each, notes) for each in documents]
    if dialect is Dialect.SKYPILOT:
        from cavvy.capabilities.importers.skypilot.tasks import is_header
        from cavvy.capabilities.importers.skypilot.tasks import translate as translate_skypilot

        first = len(trees) > 1 and is_header(trees[0])
        trees[first:] = [set_variables(each, "envs", variables) for each in trees[first:]]
        return translate_skypilot(trees, notes)
    from cavvy.capabilities.importers.dstack.tasks import translate as translate_dstack

    return translate_dstack(set_variables(trees[0], "env", variables), notes)


def translate_script(dialect: Dialect, text: str, notes: "ProblemNotes") -> Translation:
    """Translate a batch script of Slurm or PBS. Mistakes are added to `notes`."""
    if dialect is Dialect.PBS:
        from cavvy.capabilities.importers.pbs.batch_script import translate as translate_pbs

        return translate_pbs(text, notes)
    from cavvy.capabilities.importers.slurm.batch_script import translate as translate_slurm

    return translate_slurm(text, notes)
