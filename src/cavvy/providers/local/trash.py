"""Deletes the folders of ended gangs."""

import shutil
from contextlib import suppress
from pathlib import Path

from cavvy.agent.work.trees import make_removable


def delete_folder(path: Path) -> None:
    """Delete as much of a folder as possible. Folders that the work has made read-only, as Go does
    with its module cache, are deleted too.
    """
    try:
        shutil.rmtree(path)
    except PermissionError:
        with suppress(OSError):
            make_removable(str(path))
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
