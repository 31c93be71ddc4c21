"""Checks what a node or a colleague sends to this machine, before `client/landing.py` writes it.

The node may be compromised, so everything that it sends is checked: names, kinds, and files that
programs of this machine obey.
"""

import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar
from unicodedata import category

import click
from msgspec import Meta, ValidationError, convert

from cavvy.cli.view.failure import CommandFailure, escape_controls
from cavvy.domain.values import Struct
from cavvy.spec.ignore import RULE_FILES

# maximum timestamp in seconds since 1970, because file systems cannot store later times
_LATEST_S = 1 << 40
# Files and folders that shells and editors obey: direnv, mise, VS Code, JetBrains, containers. The
# others say to git and to Cavvy what leaves this machine, and what runs.
_OBEYED = {".envrc", ".mise.toml", "mise.toml", ".vscode", ".idea", ".devcontainer"}
_OBEYED |= {*RULE_FILES, ".gitattributes", ".gitmodules"}
_OBEYED |= {"devcontainer.json", ".devcontainer.json", "cavvy.yaml", "cavvy.yml"}
# what git expects in a repository without a `.git`
_BARE = ("HEAD", "objects", "refs")
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


def check_room(file: BinaryIO, path: str, size: int) -> None:
    """Raise CommandFailure if the disk has too little free space."""
    found = os.fstatvfs(file.fileno())
    if size > found.f_bavail * found.f_frsize:
        raise CommandFailure(
            f"{escape_controls(path)}: not enough disk space here for {size} bytes"
        )


PREVIEW_BYTES = 64 * 1024  # of a file whose difference is shown
PREVIEWS = 5
_NAMED, _LINES = 8, 40


def agree_to_arrival(
    folder: Path,
    new: Sequence[str],
    changed: Mapping[str, bytes | None],
    *,
    replace: bool,
) -> None:
    """Ask before files arrive in a folder in which files of the user are. `new` are the names that
    the folder does not have, and `changed` the files that would be replaced, with what arrives if
    that is small. With `replace`, the user has agreed. Raises CommandFailure without a terminal.
    """
    if replace or not (new or changed):
        return
    told = f"{folder} has files that Cavvy has not put there"
    told += f"; new in it: {name_some(sorted(new, key=_rank))}" if new else ""
    told += f"; replaced: {name_some(sorted(changed, key=_rank))}" if changed else ""
    told = escape_controls(told)
    if not _may_ask():
        raise CommandFailure(
            f"{told}; nothing was written",
            "name a new folder, or look at these names and add --replace",
            exit_code=2,
        )
    click.echo(told, err=True)
    for path, data in changed.items():
        for line in _compare(folder / path, data, path):
            click.echo(escape_controls(line), err=True)
    click.confirm("write them?", abort=True, err=True)


def _may_ask() -> bool:
    return sys.stdin.isatty()


def _rank(path: str) -> tuple[bool, str]:
    """What programs obey comes first, so that it is named."""
    return not is_obeyed(path), path


def _compare(own: Path, data: bytes | None, path: str) -> list[str]:
    """Return the difference between a file of the user and the one that would replace it."""
    from difflib import unified_diff

    try:
        is_plain = own.is_file() and not own.is_symlink()
        is_small = is_plain and own.stat().st_size <= PREVIEW_BYTES
        texts = [own.read_bytes().decode(), data.decode()] if data is not None and is_small else []
    except (OSError, UnicodeDecodeError):
        texts = []
    if not texts:
        return []
    one, two = (text.splitlines() for text in texts)
    lines = list(unified_diff(one, two, f"{path} (yours)", f"{path} (arrives)", lineterm="", n=1))
    more = [f"… {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return lines[:_LINES] + more


def name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return escape_controls(", ".join(names[:_NAMED]) + more)
