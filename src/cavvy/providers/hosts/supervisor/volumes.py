"""The named volumes on this host: the folders `ROOT/volumes/PROJECT/NAME`.

The folders above a volume belong to this installation, and the volume's files to jobs. So no link
below them is followed, and only folders count as volumes.
"""

from __future__ import annotations

import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)


def make_volumes(root: str, project: str, names: list[str]) -> None:
    """Create the volumes of a project that are missing. Raises ValueError, OSError."""
    for name in names:
        path = _find(root, project, name)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        if not _is_folder(path):
            os.mkdir(path, 0o755)


def list_volumes(root: str) -> dict[str, list[str]]:
    """Return the names of the volumes by project. Raises OSError."""
    projects = _list_folders(root + "/volumes")
    return {each: _list_folders(f"{root}/volumes/{each}") for each in projects}


def count_volumes(root: str, project: str) -> list[Fields]:
    """Return the volumes of a project with their files, the bytes that these take on the disk, and
    when the newest of them was changed. Raises ValueError, OSError."""
    above = os.path.dirname(_find(root, project, "any"))
    return [dict(_count(f"{above}/{name}"), name=name) for name in _list_folders(above)]


def find_volume(root: str, project: str, name: str) -> str | None:
    """Return the path of a volume, or None if there is none. Raises ValueError."""
    path = _find(root, project, name)
    return path if _is_folder(path) else None


def _find(root: str, project: str, name: str) -> str:
    """Return where a volume is, or would be. Raises ValueError."""
    for each in (project, name):
        if not NAME.fullmatch(each):
            raise ValueError(f"{each!r} cannot be in the path of a volume")
    return f"{root}/volumes/{project}/{name}"


def _list_folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            found = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(each for each in found if NAME.fullmatch(each))


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _count(top: str) -> Fields:
    """Count files and bytes. Files that are removed meanwhile, and folders that cannot be listed,
    count as none."""
    files = size = 0
    changed = 0.0
    todo = [top]
    while todo:
        folder = todo.pop()
        try:
            changed = max(changed, os.lstat(folder).st_mtime)
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            continue
        for each in found:
            try:
                if each.is_dir(follow_symlinks=False):
                    todo.append(each.path)
                    continue
                about = each.stat(follow_symlinks=False)
            except OSError:
                continue
            files, size = files + 1, size + about.st_blocks * 512
            changed = max(changed, about.st_mtime)
    return {"files": files, "size_bytes": size, "changed_at": changed}
