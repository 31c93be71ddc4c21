"""Finds the local folders of a task that its file may have chosen against the user: folders outside
of the file's repository, and folders with credentials.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cavvy.domain.values import Struct
from cavvy.spec.overrides import list_overridden
from cavvy.spec.repository import find_top
from cavvy.spec.workdir import FolderSnapshot

CREDENTIAL_FILES = ("netrc", "git-credentials", "pypirc", "npmrc", "pgpass")
_FOLDERS = (
    *("ssh", "aws", "azure", "kube", "gnupg", "docker", "oci", "kaggle", "huggingface"),
    *("config/gcloud", "config/gh", "config/rclone", "cache/huggingface(?=/token)"),
)
CREDENTIALS = re.compile(
    r"(?:~|/root|/home/[^/]+|/Users/[^/]+)/\."
    rf"(?P<folder>{'|'.join((*CREDENTIAL_FILES, *_FOLDERS))})(?P<file>/(?!.*\.pub$).*|)"
)


def is_credentials(path: str) -> bool:
    """Return whether a local path is a file or folder with credentials."""
    return CREDENTIALS.fullmatch(path) is not None


class DoubtfulFolder(Struct, frozen=True, kw_only=True):
    """A local file or folder that leaves this machine only after a question. `why` continues a
    sentence about it.
    """

    real: Path  # without links
    files: int
    size: int  # in bytes
    why: str
    is_workdir: bool


def is_named(overrides: str, own_folder: str) -> bool:
    """Return whether the user has named the working folder, in overrides of the task file. Cavvy
    itself adds a folder to them that the file does not name (`own_folder`).
    """
    return not own_folder and "workdir" in list_overridden(overrides)


def find_doubtful(
    parts: Mapping[str, Path],
    folder: Path,
    snapshot: FolderSnapshot,
    *,
    named: bool = False,
    own: bool = False,
) -> list[DoubtfulFolder]:
    """Return those of the `parts` of a task that need a question. `folder` is that of the task's
    file, and `snapshot` has the files of the parts, in their order. If the user has `named` the
    working folder, it needs none. A working folder that the file does not name is Cavvy's `own`
    choice between the file's folder and the current one: it is asked for if it has credentials.
    """
    top, found = find_top(folder), list[DoubtfulFolder]()
    for (inside, path), part in zip(parts.items(), snapshot.parts or (snapshot,), strict=True):
        if named and not inside:
            continue
        real, below = path.resolve(), part.folder.resolve()
        files = [each for each in part.entries if each.link is None]
        secret = next((each.path for each in files if _is_secret(below / each.path)), None)
        if secret is not None:
            why = f"contains credentials, such as {secret}"
        elif not inside and not own and not real.is_relative_to(top):
            why = f"is outside of {top}, to which the task file belongs"
        else:
            continue
        found.append(
            DoubtfulFolder(
                real=real, files=len(files), size=part.size, why=why, is_workdir=not inside
            )
        )
    return found


def _is_secret(path: Path) -> bool:
    home = Path.home().resolve()
    return is_credentials(f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path))
