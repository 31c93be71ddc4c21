"""Finds the job formats of managed services for `cavvy export`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import Struct
from cavvy.providers.formats import services

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
    return sorted(module.name.replace("_", "-") for module in iter_modules(services.__path__))


def find_format(name: str) -> JobFormat | None:
    """Import the format with this name; return None if no such format exists."""
    if name not in list_formats():
        return None
    module = import_module(f"{services.__name__}.{name.replace('-', '_')}")
    found: JobFormat = module.FORMAT
    return found
