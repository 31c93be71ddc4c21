"""Stores files that a node sends to this machine; used by `cavvy cp`.

The node may be compromised, so everything that it sends is checked. Files are written only inside
the folder that the user named, and never through a symbolic link.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar
from unicodedata import category

from msgspec import Meta, ValidationError, convert

from cavvy.cli.view.failure import CommandFailure, escape_controls
from cavvy.domain.values import Struct
from cavvy.spec.ignore import RULE_FILES

PART = ".cavvy-part"  # suffix of an incomplete file
_LONGEST = 255  # bytes of a file name on Linux's and most other file systems
_MODES = 0o777  # permission bits, without setuid, setgid and sticky
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PART = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# maximum timestamp in seconds since 1970, because file systems cannot store later times
_LATEST_S = 1 << 40
# Files and folders that shells and editors obey: direnv, mise, VS Code, JetBrains, containers. The
# others say to git and to Cavvy what leaves this machine, and what runs.
_OBEYED = {".envrc", ".mise.toml", "mise.toml", ".vscode", ".idea", ".devcontainer"}
_OBEYED |= {*RULE_FILES, ".gitattributes", ".gitmodules"}
_OBEYED |= {"devcontainer.json", ".devcontainer.json", "cavvy.yaml", "cavvy.yml"}
# what git expects in a repository without a `.git`
_BARE = ("HEAD", "objects", "refs")
_IN_THE_WAY = {errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENOTDIR}
_T = TypeVar("_T")


class CopyItem(Struct, frozen=True, kw_only=True):
    """One file, folder or link to copy. `path` is relative to the copied file or folder, whose own
    path is "".
    """

    path: str
    mode: Annotated[int, Meta(ge=0, lt=1 << 32)]
    size: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    mtime: Annotated[float, Meta(gt=-_LATEST_S, lt=_LATEST_S)]
    link: str | None = None

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)


def name_part(name: str) -> str:
    """Return the name of an incomplete file that gets the name `name` when it is complete. If the
    suffix makes the name too long, a hash of the name replaces the name.
    """
    written = os.fsencode(name)
    return (
        name if len(written + PART.encode()) <= _LONGEST else sha256(written).hexdigest()
    ) + PART


def understand(said: object, kind: type[_T]) -> _T:
    """Convert a node's answer to the type `kind`. Raises CommandFailure."""
    try:
        return convert(said, kind)
    except ValidationError as error:
        raise CommandFailure(f"the node sent an invalid answer: {error}") from error


def read_item(path: str, said: dict[str, Any]) -> CopyItem:
    """Return the attributes of a file, from an answer of a node. Raises CommandFailure."""
    item = understand({**said, "path": path}, CopyItem)
    if not isfinite(item.mtime):
        raise _refuse(path, "the file's time is not a number")
    return item


def read_unlisted(said: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the path of each folder that the node could not list, with the reason, from a node's
    answer. Agents of older versions do not report these folders. Raises CommandFailure.
    """
    return understand(said.get("unlisted", []), list[tuple[str, str]])


def read_listing(top: CopyItem, data: bytes) -> list[CopyItem]:
    """Return all entries below a folder, each parent before its children, from a node's answer.
    Raises CommandFailure.
    """
    try:
        said = understand(json.loads(data), list[tuple[str, dict[str, Any]]])
    except (ValueError, RecursionError) as error:
        raise CommandFailure(f"the node sent an invalid list of files: {error}") from error
    items, kinds = [top], {"": stat.S_IFDIR}
    for path, facts in said:
        item = read_item(path, facts)
        problem = _find_problem(item, kinds)
        if problem:
            raise _refuse(path, problem)
        kinds[path] = item.kind
        items.append(item)
    return items


def _find_problem(item: CopyItem, kinds: dict[str, int]) -> str:
    """Return why the entry must not be written, or "" if it may be written. `kinds` maps the path
    of each earlier entry to its kind.
    """
    parts = item.path.split("/")
    if item.path.startswith("/"):
        return "the name is an absolute path"
    if not {"", ".", ".."}.isdisjoint(parts):
        return "the name has an empty component, `.` or `..`"
    try:
        if b"\0" in os.fsencode(item.path + (item.link or "")):
            return "the name has a NUL character"
    except UnicodeEncodeError:
        return "the name is not valid text"
    if item.path in kinds:
        return "the name is listed twice"
    if kinds.get("/".join(parts[:-1])) != stat.S_IFDIR:
        return "the parent folder of the file is not in the list"
    if (item.link is not None) != (item.kind == stat.S_IFLNK):
        return "the type and the link target of the file contradict each other"
    return ""


def _refuse(path: str, problem: str) -> CommandFailure:
    return CommandFailure(
        f"the node sent {escape_controls(path)!r}, which is refused: {problem}",
        "nothing was written; the node or the work on it may be compromised",
    )


def stays_inside(item: CopyItem) -> bool:
    """Return whether a link's target is inside the copied folder. `..` may appear only at the start
    of the target, because a name before `..` could itself be a link that leads out of the folder.
    """
    parts = [part for part in (item.link or "/").split("/") if part not in ("", ".")]
    ups = parts.count("..")
    inside = ups <= item.path.count("/") and ".." not in parts[ups:]
    return inside and not (item.link or "/").startswith("/")


def is_git_name(path: str) -> bool:
    """Return whether git uses a file of this name as the `.git` of a folder, on any file system."""
    return _plain_name(path.rpartition("/")[2]) in (".git", "git~1")


def is_obeyed(path: str) -> bool:
    """Return whether git, Cavvy, shells or editors obey the file or folder of this relative path,
    or one of the folders in which it is.
    """
    names = set(map(_plain_name, path.split("/")))
    return not names.isdisjoint(_OBEYED) or not names.isdisjoint((".git", "git~1"))


def _plain_name(name: str) -> str:
    """Return the name under which a file system may find a file: some ignore upper and lower case,
    invisible characters, or dots and spaces at the end.
    """
    is_plain = name.isascii()  # no such character is invisible
    seen = name if is_plain else "".join(char for char in name if category(char) != "Cf")
    return seen.rstrip(". ").casefold()


def is_git_folder(path: Path) -> bool:
    """Return whether git uses what exists at this path of this machine as a `.git` or as a
    repository without a `.git`.
    """
    if is_git_name(path.name):
        return os.path.lexists(path)
    return not path.is_symlink() and all(os.path.lexists(path / name) for name in _BARE)


def is_in_git_folder(path: Path) -> bool:
    """Return whether a path of this machine is inside of a git folder."""
    return any(is_git_folder(each) for each in path.parent.resolve().joinpath(path.name).parents)


def find_obeyed(items: Sequence[CopyItem]) -> list[str]:
    """Return the entries by which a copied folder can make programs of its user run other programs:
    repositories, and files that shells and editors obey when the user enters or opens the folder.
    """
    paths = {item.path for item in items}
    return [
        item.path or "."
        for item in items
        if is_git_name(item.path)
        or _plain_name(item.path.rpartition("/")[2]) in _OBEYED
        or {f"{item.path}/{name}".lstrip("/") for name in _BARE} <= paths
    ]


def find_obeyed_files(paths: Iterable[str]) -> list[str]:
    """Return the files that programs obey, also those of repositories without a `.git`."""
    paths = list(paths)
    pure = [PurePosixPath("/", path) for path in paths]
    entries = {str(each) for path in pure for each in (path, *path.parents)}
    heads = [each.removesuffix("HEAD") for each in entries if each.endswith("/HEAD")]
    bare = [each for each in heads if {each + name for name in _BARE} <= entries]
    return [
        path
        for path in paths
        if is_obeyed(path) or any(f"/{path}".startswith(each) for each in bare)
    ]


class Landing:
    """An open local folder into which received files are written; a context manager.

    Paths are relative to the folder and must not pass through links: each folder is opened relative
    to the descriptor of its parent. File system errors raise CommandFailure, which names the path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> "Landing":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def make_folder(self, path: str) -> None:
        """Create the folder, or use it if it exists."""
        with self._inside(path) as (parent, name):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            os.close(os.open(name, _FOLDER, dir_fd=parent))

    def make_link(self, path: str, target: str) -> None:
        """Create the link. A link of the same name is replaced."""
        with self._inside(path) as (parent, name):
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
                    os.unlink(name, dir_fd=parent)
            os.symlink(target, name, dir_fd=parent)

    @contextmanager
    def write(self, path: str, item: CopyItem) -> Iterator[BinaryIO]:
        """Open a file for writing. If an interrupted copy left a part of the file, the part is
        kept. The file gets its final name when the context ends without an error.
        """
        with self._inside(path) as (parent, name):
            part = name_part(name)
            if _is_special(name, parent):
                raise CommandFailure(f"{self._shown(path)} is not a file or folder")
            with open(os.open(part, _PART, 0o600, dir_fd=parent), "r+b") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise CommandFailure(f"{self._shown(path)}{PART}: not a regular file")
                yield file
                file.flush()
                _set(file.fileno(), item)
            os.replace(part, name, src_dir_fd=parent, dst_dir_fd=parent)

    def finish_folder(self, path: str, item: CopyItem) -> None:
        """Set the mode and the times of the folder. The caller must have written the folder's
        contents before this call.
        """
        with self._inside(path) as (parent, name):
            folder = os.open(name, _FOLDER, dir_fd=parent)
            try:
                _set(folder, item)
            finally:
                os.close(folder)

    @contextmanager
    def _inside(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a file descriptor of the path's parent folder, and the last name in the path."""
        *above, name = path.split("/")
        folder = os.dup(self._fd)
        try:
            for each in above:
                inner = os.open(each, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, name
        except OSError as error:
            from cavvy.client.tunnel import RemoteError

            if isinstance(error, RemoteError):
                raise
            hint = (
                "`cavvy cp` replaces a file only with a file, and follows no local symbolic links"
            )
            raise CommandFailure(
                f"{self._shown(path)}: {error.strerror}", hint if error.errno in _IN_THE_WAY else ""
            ) from error
        finally:
            os.close(folder)

    def _shown(self, path: str) -> str:
        return escape_controls(str(self._folder / path))


def _is_special(name: str, folder: int) -> bool:
    """Return whether this is a device, pipe or socket, or a link to one. A copy would replace it:
    root would lose `/dev/null` or `/dev/stdout`.
    """
    try:
        mode = os.stat(name, dir_fd=folder).st_mode
    except OSError:  # it does not exist, or it is a link without a target
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _set(descriptor: int, item: CopyItem) -> None:
    os.fchmod(descriptor, item.mode & _MODES)
    os.utime(descriptor, (item.mtime, item.mtime))


def check_room(file: BinaryIO, path: str, size: int) -> None:
    """Raise CommandFailure if the disk has too little free space."""
    found = os.fstatvfs(file.fileno())
    if size > found.f_bavail * found.f_frsize:
        raise CommandFailure(
            f"{escape_controls(path)}: not enough disk space here for {size} bytes"
        )
