"""Deletes the folders of ended gangs."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def delete_folder(path: Path) -> None:
    """Delete as much of a folder as possible. Folders that the work has made read-only, as Go does
    with its module cache, are deleted too.
    """
    try:
        shutil.rmtree(path)
    except PermissionError:
        with suppress(OSError):
            _make_removable(path)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _make_removable(path: Path) -> None:
    """Let this user list and change a folder and all folders below it. Raises OSError."""
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for inner in (Path(folder, name) for name in names):
            if not inner.is_symlink():
                inner.chmod(0o700)
