"""Temporary folders inside a state folder, which hold copies of the database with all secrets."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


@contextmanager
def work_folder(home: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder below `home`, and delete it afterwards. Also delete the folders of earlier
    commands that were killed. Raises OSError.
    """
    for left in home.glob(f"{prefix}-*"):
        _delete_unused(left)
    folder = Path(mkdtemp(prefix=f"{prefix}-", dir=home))
    # the lock shows other commands that this command is running
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _delete_unused(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is a file or a link, or was deleted meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
