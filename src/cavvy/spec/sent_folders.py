"""Finds the local folders of a task that its file may have chosen against the user: folders outside
of the file's repository, and folders with credentials.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import cavvy
from cavvy.domain.values import Struct
from cavvy.spec.overrides import list_overridden
from cavvy.spec.repository import find_top
from cavvy.spec.uses import NAME
from cavvy.spec.workdir import FolderSnapshot

_OWN = Path(cavvy.__file__).resolve().parent  # as the server of an engine is
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
    file, and `snapshot` has the files of the parts, in their order. A private key needs one unless
    git tracks it: all who have the repository have such a key already. If the user has `named` the
    working folder, it needs none, unless it leads elsewhere by a link of a repository. A working
    folder that the file does not name is Cavvy's `own` choice between the file's folder and the
    current one: it is asked for if it has credentials. Other files and folders need one outside of
    the repository and of a named working folder.
    """
    tops, found = _list_tops(folder), list[DoubtfulFolder]()
    for (inside, path), part in zip(parts.items(), snapshot.parts or (snapshot,), strict=True):
        real, below = path.resolve(), part.folder.resolve()
        if inside and real.is_relative_to(_OWN):
            continue
        link = find_exit(path) if named and not inside else None
        if (named and not inside and link is None) or real.name == inside == NAME:
            tops.append(real)
            continue
        files = [each for each in part.entries if each.link is None]
        secret = next((each.path for each in files if _is_secret(below / each.path)), None)
        key = next((each.path for each in files if each.has_key and not each.is_tracked), None)
        is_outside = not any(map(real.is_relative_to, tops if inside else tops[:1]))
        if secret is not None:
            why = f"contains credentials, such as {secret}"
        elif key is not None:
            why = f"contains a private key that git does not track, {key}"
        elif link is not None:
            why = f"is where {link} leads, a link out of its repository"
        elif is_outside and (inside or not own):
            why = f"is outside of {tops[0]}, to which the task file belongs"
        else:
            continue
        found.append(
            DoubtfulFolder(
                real=real, files=len(files), size=part.size, why=why, is_workdir=not inside
            )
        )
    return found


def name_places(paths: Iterable[str]) -> set[Path]:
    """Return the places that the user names with these paths, and not where a link there leads."""
    named = {Path(os.path.abspath(os.path.expanduser(each))) for each in paths}
    return {each.parent.resolve() / each.name for each in named}


def _list_tops(folder: Path) -> list[Path]:
    """Return the folders whose files a task file of `folder` may name: its repository or, without
    one, its own folder and the current one, from which paths of other tools may start.
    """
    top, here = find_top(folder), Path.cwd().resolve()
    home = Path.home().resolve()
    is_loose = not (top / ".git").exists() and top.is_relative_to(here)
    return [top, here] if is_loose and here not in (home, *home.parents) else [top]


def find_exit(path: Path) -> Path | None:
    """Return the link in a path that leads out of the repository or, without one, out of the
    current folder in which the path stands. Both may be another person's, who chooses where their
    links lead. Links of the home folder, and of what is above it, are the user's own.
    """
    stands = Path(os.path.abspath(path))
    homes = (Path.home(), *Path.home().parents)
    for link in (stands, *stands.parents):
        if link in homes:
            return None
        if link.is_symlink():
            top = find_top(link.parent)
            here = Path.cwd().resolve()
            tops = [top, *([here] if top.is_relative_to(here) and here not in homes else [])]
            if not any(map(link.resolve().is_relative_to, tops)):
                return link
    return None


def _is_secret(path: Path) -> bool:
    home = Path.home().resolve()
    return is_credentials(f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path))
