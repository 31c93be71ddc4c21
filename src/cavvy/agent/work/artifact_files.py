"""Reads the pictures that programs log to MLflow (`log_figure`, `log_image`), whose clients write
them into the folder of artifacts themselves.
"""

from __future__ import annotations

import os
import re
import stat

from ..allowed_folders import check_regular
from .examples import LARGEST
from .tracking_server import ARTIFACTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Shown = Callable[[str, str, bytes, float, float], object]

ENDS = (".png", ".jpg", ".jpeg", ".gif", ".webp")
MOST_PICTURES = 5000  # of a job
MOST_AT_ONCE = 16  # that a search reads
SETTLED_S = 1.0  # since a picture was written until it is read
# `log_image` names files KEY%step%STEP%timestamp%TIME%ID.png, and a small version of each likewise;
# in older versions, `+` stands for `%`
_STEPPED = re.compile(r"(.+?)[%+]step[%+](\d{1,15})[%+]timestamp[%+]")
_SMALL = re.compile(r"[%+]compressed\.\w+\Z")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def is_picture(folder: str, name: str) -> bool:
    """Return whether a file is a picture in the folder of artifacts."""
    return (
        name.lower().endswith(ENDS)
        and f"/{ARTIFACTS}/" in f"{folder}/"
        and _SMALL.search(name) is None
    )


def name_picture(folder: str, name: str) -> tuple[str, float]:
    """Return the name of a picture, from its path below the artifacts of its run, and its step."""
    _, _, below = f"{folder}/".partition("/artifacts/")
    path = f"{below}{os.path.splitext(name)[0]}"
    stepped = _STEPPED.match(path)
    return (stepped[1], float(stepped[2])) if stepped is not None else (path, 0.0)


class ArtifactReader:
    """Passes on each picture once, and again when it was written again. Without a step in its name,
    each version counts as a step."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._seen: set[tuple[int, int, int]] = set()
        self._versions: dict[str, int] = {}
        self._left = MOST_AT_ONCE

    def begin(self) -> None:
        """Begin a search."""
        self._left = MOST_AT_ONCE

    def look(self, folder: str, here: int, name: str, since: float, now: float) -> None:
        """Read a picture in a folder, of which the descriptor is given, if it was written since a
        time. Raises OSError."""
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if (
            key in self._seen
            or len(self._seen) >= MOST_PICTURES
            or self._left <= 0
            or not stat.S_ISREG(status.st_mode)
            or not since <= status.st_mtime <= now - SETTLED_S
        ):
            return
        self._left -= 1
        self._seen.add(key)
        if not 0 < status.st_size <= LARGEST:
            return
        file = check_regular(os.open(name, _READ, dir_fd=here), name)
        try:
            data = os.read(file, LARGEST)
        finally:
            os.close(file)
        known, step = name_picture(folder, name)
        version = self._versions[known] = self._versions.get(known, -1) + 1
        self._shown(known, "image", data, step or float(version), now - status.st_mtime)
