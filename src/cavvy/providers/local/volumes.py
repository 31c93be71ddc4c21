"""The named volumes of this machine: folders, one for each project and name, which the agents of
jobs make (`agent/data/mounts.py`).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from cavvy.domain.volumes import VolumeFolder
from cavvy.trees import remove_tree, walk_tree

_REMOVED = ".removed-"  # no volume has a name that begins with a dot
_ongoing = set[Path]()  # what this process removes now, which no other removal touches


def list_names(home: Path) -> Sequence[tuple[str, str]]:
    """Return the project and the name of each volume."""
    top = str(home / "volumes")
    return [(project, name) for project in _list(top) for name in _list(f"{top}/{project}")]


def list_folders(home: Path, project: str) -> Sequence[VolumeFolder]:
    """Return the volumes of a project with their sizes, by name."""
    above = str(home / "volumes" / project)
    return [_count(f"{above}/{name}") for name in _list(above)]


def _list(above: str) -> Sequence[str]:
    """Return the names of the folders that are no leftovers of removals."""
    try:
        with os.scandir(above) as entries:
            found = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return sorted(each for each in found if not each.startswith("."))


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


def _count(top: str) -> VolumeFolder:
    """Count the files and bytes on the disk. Files that are removed meanwhile count as none."""
    files = size = 0
    changed = 0.0
    for folder, _, others in walk_tree(top):
        with suppress(OSError):
            changed = max(changed, os.lstat(folder).st_mtime)
        for name in others:
            with suppress(OSError):
                about = os.lstat(os.path.join(folder, name))
                files, size = files + 1, size + about.st_blocks * 512
                changed = max(changed, about.st_mtime)
    return VolumeFolder(
        name=os.path.basename(top),
        files=files,
        size_bytes=size,
        changed_at=datetime.fromtimestamp(int(changed), UTC),
    )
