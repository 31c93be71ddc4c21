"""Finds the job formats of managed services for `cavvy export`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import Struct

# Returns the catalog's offers for one node, the cheapest first.
FindOffers = Callable[[ResourceSpec], Sequence[Offer]]


class JobFormat(Struct, frozen=True, kw_only=True):
    """The job format of one service.

    `write` returns the text for a task. `write` raises Refused if the service cannot run the task.
    """

    title: str
    write: Callable[[TaskSpec, FindOffers], str]


def list_formats() -> Sequence[str]:
    """Return the names of all formats, such as `aws-batch`."""
    return sorted(path.parent.name.replace("_", "-") for path in _folder().glob("*/export.py"))


def find_format(name: str) -> JobFormat | None:
    """Import the format with this name; return None if no such format exists."""
    if name not in list_formats():
        return None
    module = import_module(f"cavvy.providers.formats.{name.replace('-', '_')}.export")
    found: JobFormat = module.FORMAT
    return found


def _folder() -> Path:
    return Path(__file__).parent
