"""Finds what installed packages of others declare, without importing them."""

import os
import sys
from collections.abc import Sequence
from functools import lru_cache

# how the folders with the metadata of an installed package end
_METADATA = (".dist-info", ".egg-info", ".egg")


def list_declared(group: str) -> Sequence[tuple[str, str]]:
    """Return the names and values of the entry points of a group. Most installations have none, and
    importing importlib.metadata takes longer than searching the folders in `sys.path`. Therefore
    these folders are searched first.
    """
    if not any(_may_declare(folder, group) for folder in sys.path):
        return []
    from importlib.metadata import entry_points

    return [(point.name, point.value) for point in entry_points(group=group)]


def _may_declare(folder: str, group: str) -> bool:
    """Return whether any package in this folder of `sys.path` may declare such entry points."""
    folder = folder or os.curdir
    if os.path.isfile(folder):  # packages in a zip file, which only importlib.metadata can read
        return True
    try:
        changed_ns = os.stat(folder).st_mtime_ns
    except OSError:
        return False
    return _has_declaration(os.path.abspath(folder), changed_ns, group)


@lru_cache(maxsize=64)
def _has_declaration(folder: str, changed_ns: int, group: str) -> bool:
    """Read the folder's packages. The answer is kept for as long as none is added or removed, since
    a server would otherwise read hundreds of files for each request that names a provider.
    """
    try:
        names = [name for name in os.listdir(folder) if name.endswith(_METADATA)]
    except OSError:
        return False
    return any(
        name.endswith(".egg") or _names_group(os.path.join(folder, name, "entry_points.txt"), group)
        for name in names
    )


def _names_group(path: str, group: str) -> bool:
    try:
        with open(path, "rb") as file:
            # only the line of a group: Cavvy's own entry points lead to modules with such names
            return f"[{group}]".encode() in file.read()
    except OSError:
        return False
