"""The Python for nodes, packed once for all tests: a server packs it into its state folder, which
takes 2.5 CPU seconds, and each user of the tests has a new folder.
"""

import functools
import hashlib
import os
import shutil
from pathlib import Path

from tests.system.packages import CACHE

from cavvy.providers.hosts import bundles


def give_python(home: Path) -> None:
    """Put the packed Python into a new state folder, as an earlier server has left it there."""
    packed = _pack()
    folder = home / "bundles"
    for each in (home, folder):
        each.mkdir(mode=0o700, parents=True)
    for file in packed.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:  # another file system
            shutil.copy(file, folder / file.name)


@functools.cache
def _pack() -> Path:
    """The folder with the file, which processes that pack at the same time replace as a whole."""
    code = hashlib.sha256(Path(bundles.__file__).read_bytes()).hexdigest()[:20]
    folder = CACHE / f"python-{code}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    bundles.pack_python(folder)
    return folder
