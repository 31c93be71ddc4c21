"""The named volumes of this machine: folders, one for each project and name, which the agents of
jobs make (`agent/data/mounts.py`). They lie as on hosts, and are listed and counted as there.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from cavvy.domain.volumes import VolumeFolder, find_time
from cavvy.providers.hosts.supervisor import volumes as supervisor
from cavvy.trees import remove_tree

_REMOVED = ".removed-"  # no volume has a name that begins with a dot
_ongoing = set[Path]()  # what this process removes now, which no other removal touches


def list_names(home: Path) -> Sequence[tuple[str, str]]:
    """Return the project and the name of each volume. Raises OSError."""
    found = supervisor.list_volumes(str(home))
    return [(project, name) for project, names in found.items() for name in names]


def list_folders(home: Path, project: str) -> Sequence[VolumeFolder]:
    """Return the volumes of a project with their sizes, by name. Raises OSError."""
    return [
        VolumeFolder(
            name=each["name"],
            files=each["files"],
            size_bytes=each["size_bytes"],
            changed_at=find_time(each["changed_at"]),
        )
        for each in supervisor.count_volumes(str(home), project)
    ]


def remove_folder(home: Path, project: str, name: str) -> bool:
    """Remove a volume with its files. Return whether it was there. Raises OSError; the volume then
    has the files that could not be removed.
    """
    above = home / "volumes" / project
    if not name or name.startswith(".") or os.path.basename(name) != name:
        return False
    if (above / name).is_symlink() or not (above / name).is_dir():
        return False
    gone = above / f"{_REMOVED}{token_hex(6)}"
    _ongoing.add(gone)
    try:
        (above / name).rename(gone)
        remove_tree(gone)
    except OSError:
        with suppress(OSError):  # a job may have made the volume anew
            gone.rename(above / name)
        raise
    finally:
        _ongoing.discard(gone)
    for each in above.glob(f"{_REMOVED}*"):  # what an interrupted removal has left
        if each not in _ongoing:
            remove_tree(each, ignore_errors=True)
    return True
