"""Files of SkyPilot and dstack: recognised by their keys, checked by their own rules, translated
into our tasks.

`spec.parse_task` and `spec.load_file` call `translate` for a file that `detect.find_dialect` finds
to be another's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cavvy.spec.peers.detect import Dialect, find_dialect
from cavvy.spec.peers.kept import Kept, Translation
from cavvy.spec.problems import Notes

if TYPE_CHECKING:
    from cavvy.spec.tree import Node

__all__ = ["Dialect", "Kept", "Translation", "find_dialect", "translate"]


def translate(dialect: Dialect, documents: "Sequence[Node]", notes: Notes) -> Translation:
    """What another tool's file means here; what is wrong with it is noted."""
    from cavvy.spec.peers.yaml11 import recast

    trees = [recast(each, notes) for each in documents]
    if dialect is Dialect.SKYPILOT:
        from cavvy.spec.peers.skypilot.tasks import translate as translate_skypilot

        return translate_skypilot(trees, notes)
    from cavvy.spec.peers.dstack.tasks import translate as translate_dstack

    return translate_dstack(trees[0], notes)
