"""Finds the installed capabilities."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from cavvy.frame.capability import Capability
from cavvy.frame.entry_points import list_declared

_GROUP = "cavvy.capabilities"
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "capabilities")


class Found(NamedTuple):
    """The capabilities that can be used, in the order of their names, and why others cannot: a
    sentence for each name.
    """

    capabilities: Sequence[Capability]
    faults: Mapping[str, str]


@cache
def find_capabilities() -> Found:
    """Return the installed capabilities: the folders of `cavvy.capabilities`, and what packages of
    others declare. A capability that cannot be imported, or needs one that is missing, is left out;
    the others work without it.
    """
    modules = {name: f"{_GROUP}.{name}.capability" for name in _list_own()}
    faults = {}
    for name, module in list_declared(_GROUP):
        if name in modules:
            faults[f"{name} ({module})"] = f"another capability has the name {name}"
        else:
            modules[name] = module
    return _choose(modules, faults, _read)


def list_file_tools() -> Sequence[str]:
    """Return the names of the other tools whose task files are read."""
    found = find_capabilities().capabilities
    return [name for each in found for files in each.task_files for name in files.tools]


def load(place: str) -> Any:
    """Return what a description names as MODULE:NAME, or a module. Raises what the import
    raises.
    """
    module, _, name = place.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def load_all(pick: Callable[[Capability], Iterable[str]]) -> Iterator[tuple[Capability, Any]]:
    """Yield each capability with what it contributes at the places that `pick` returns. What cannot
    be imported is left out, and the log says why: the rest works without it.
    """
    for capability in find_capabilities().capabilities:
        for place in pick(capability):
            try:
                yield capability, load(place)
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                say_left_out(capability, place, error)


def read_rows(table: str, pick: Callable[[Capability], str]) -> Iterator[Mapping[str, str]]:
    """Yield the rows of `TABLE.csv` in the packages that `pick` returns, of capabilities that name
    one.
    """
    for capability in find_capabilities().capabilities:
        if package := pick(capability):
            import csv
            from pkgutil import get_data

            try:
                text = (get_data(package, f"{table}.csv") or b"").decode()
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                say_left_out(capability, f"its {table}.csv", error)
            else:
                yield from csv.DictReader(text.splitlines())


def say_left_out(capability: Capability, what: str, why: object) -> None:
    """Write to the log that something of a capability is not used, and keep it for the status."""
    from cavvy.frame.faults import note_fault  # its logging is an import that commands need not

    note_fault(capability.name, f"works without {what}", why)


def _list_own() -> Sequence[str]:
    try:
        entries = list(os.scandir(_FOLDER))
    except FileNotFoundError:  # every capability was taken out
        return []
    files = (os.path.join(entry.path, "capability.py") for entry in entries)
    return [os.path.basename(os.path.dirname(file)) for file in files if os.path.exists(file)]


def _read(name: str, module: str) -> Capability:
    """Return the description in a module. Raises ValueError if it is none, and what its import
    raises.
    """
    found = getattr(import_module(module), "CAPABILITY", None)
    if not isinstance(found, Capability):
        raise ValueError(f"{module} defines no CAPABILITY of the type cavvy.frame.Capability")
    if found.name != name:
        raise ValueError(f"{module}: its name is {found.name!r}, expected {name!r}")
    return found


def _choose(
    modules: Mapping[str, str],
    faults: dict[str, str],
    read: Callable[[str, str], Capability],
) -> Found:
    """Read the modules, and leave out what cannot be read or lacks what it needs."""
    read_ones = {}
    for name, module in sorted(modules.items()):
        try:
            read_ones[name] = read(name, module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of others raises anything
            faults[name] = f"{type(error).__name__}: {error}"
    while lacking := {
        name: missing
        for name, each in read_ones.items()
        if (missing := [need for need in each.needs if need not in read_ones])
    }:
        for name, missing in lacking.items():
            faults[name] = f"it needs {' and '.join(missing)}, which is not installed"
            del read_ones[name]
    return Found(tuple(read_ones.values()), faults)
