"""Lists the files of a folder that belong to its snapshot. Git provides the list if git is
available; otherwise this module applies git's rules.
"""

import errno
import os
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

from cavvy.spec.ignore_pattern import IgnorePattern, read_pattern, to_bytes
from cavvy.spec.repository import find_ignore_files, open_repository

OWN_FILE = ".cavvyignore"
# Larger ignore files are no one's work, and each file of a folder is compared with all patterns.
_MOST_BYTES, _MOST_PATTERNS = 1 << 20, 10_000
# bytes of the lines with wildcards, each of which takes long to read
_MOST_WILD, _WILD = 100_000, frozenset(b"*?[\\")
RULE_FILES = (".gitignore", OWN_FILE)
# Folders that are never copied: git's own files, and files that programs create again when they
# need them.
SKIPPED = frozenset({".git", ".venv", "__pycache__"})


def list_files(folder: Path, *, hidden: bool = True) -> list[str]:
    """Return the sorted paths, relative to `folder`, of all files and links that are not ignored;
    without `hidden`, only those whose first part does not begin with a dot. Raises OSError if a
    folder cannot be read.
    """
    return list(mark_files(folder, hidden=hidden))


def mark_files(folder: Path, *, hidden: bool = True) -> dict[str, bool | None]:
    """Return the files that `list_files` lists, each with whether git tracks it; None where there
    is no git to say so. Raises OSError.
    """
    listed = _ask_git(folder)
    if listed is None:
        outer = read_outer_rules(folder, find_ignore_files(folder))
        # as a rule, so that hidden folders, which may be large, are not even read
        outer = outer if hidden else (*outer, ("", "", [_HIDDEN]))
        listed = dict.fromkeys(_walk(folder, "", outer, git_rules=True))
    else:
        own = IgnoreRules(folder)
        listed = {path: listed[path] for path in listed if not own.ignores(path)}
    return {path: listed[path] for path in sorted(listed) if hidden or not path.startswith(".")}


def _ask_git(folder: Path) -> dict[str, bool | None] | None:
    """Return the files that git tracks or would track, and which of both. Returns None if git
    cannot list the files, for example because the folder is not in a repository.
    """
    with open_repository(folder) as repository:
        if repository is None:
            return None
        done = repository.run("ls-files", "-tz", "--cached", "--others", "--exclude-standard")
        if done is None or done.returncode != 0:
            return None
        if not done.stdout:
            ignored = repository.run("check-ignore", "--quiet", ".")
            if ignored is not None and ignored.returncode == 0:
                # An outer repository ignores this folder, so only the folder's own rules apply.
                return None
    # git leaves out a folder that it cannot read, and only warns
    if b"could not open directory" in done.stderr and (error := _find_closed(folder)) is not None:
        raise error
    # each name stands behind a letter for its state and a space
    lines = set(os.fsdecode(done.stdout).split("\0")) - {""}
    names = {line[2:]: not line.startswith("?") for line in sorted(lines)}
    if "./" in names:
        # This folder is a submodule that is not checked out, so git lists only the folder itself.
        return None
    paths: dict[str, bool | None] = {}
    folders: dict[str, bool] = {}
    for name, is_tracked in sorted(names.items()):
        full = folder / name
        if not _is_inside(folder, name.rstrip("/"), folders):
            continue  # another program than git has written the index
        if name.endswith("/") or (full.is_dir() and not full.is_symlink()):
            # Git lists a nested repository without its files.
            inner = name.rstrip("/")
            paths |= {f"{inner}/{path}": of for path, of in mark_files(folder / inner).items()}
        elif os.path.lexists(full):  # Git also lists files whose deletion is not committed.
            paths[name] = is_tracked
    return {
        path: of for path, of in paths.items() if not SKIPPED.intersection(path.split("/")[:-1])
    }


def _is_inside(folder: Path, name: str, known: dict[str, bool]) -> bool:
    """Return whether a name leads to an entry of the folder without passing through a link or out
    of the folder. `known` stores the result for each folder above the entry.
    """
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        return False
    for parent in accumulate(parts[:-1], "{}/{}".format):
        if parent not in known:
            path = folder / parent
            known[parent] = path.is_dir() and not path.is_symlink()
        if not known[parent]:
            return False
    return True


def _find_closed(folder: Path) -> OSError | None:
    """Return the error of a folder that cannot be read and is not ignored, if there is one."""
    try:
        for _ in _walk(folder, "", (), git_rules=True):
            pass
    except OSError as error:
        return error
    return None


# The patterns of each pattern file, the outermost first. Before them stand the file's folder, which
# paths begin with, and what is put before a path if the file is outside of the folder.
Rules = tuple[tuple[str, str, list[IgnorePattern]], ...]
_HIDDEN = cast(IgnorePattern, read_pattern(b"/.*"))


def _walk(folder: Path, inside: str, rules: Rules, *, git_rules: bool) -> Iterator[str]:
    try:
        opened = os.scandir(folder / inside)
    except FileNotFoundError:
        if not inside:
            raise
        return  # a program has removed the folder after it was listed
    with opened as entries:
        rules = (*rules, *_rules_of(folder, inside, git_rules=git_rules))
        for entry in entries:
            path = f"{inside}{entry.name}"
            is_folder = entry.is_dir(follow_symlinks=False)
            # In a submodule, `.git` is a file.
            skipped = entry.name in SKIPPED if is_folder else entry.name == ".git"
            if skipped or _matches(rules, path, is_folder):
                continue
            if is_folder:
                yield from _walk(folder, f"{path}/", rules, git_rules=git_rules)
            else:
                yield path


def _rules_of(folder: Path, inside: str, *, git_rules: bool) -> Rules:
    names = RULE_FILES if git_rules else (OWN_FILE,)
    found = [(inside, "", _read_patterns(folder / inside / name)) for name in names]
    return tuple(each for each in found if each[2])


def read_outer_rules(folder: Path, files: Sequence[tuple[Path, Path]]) -> Rules:
    """Return the rules of ignore files outside of `folder`, each with its folder, the weakest
    first. If they ignore the folder itself, none of them applies.
    """
    folder = folder.resolve()
    read = [(base, patterns) for file, base in files if (patterns := _read_patterns(file))]
    for each in (folder, *folder.parents):
        for base, patterns in reversed(read):
            if base in each.parents:
                name = to_bytes(str(each.relative_to(base)))
                found = _match(patterns, name, is_folder=True)
                if found:
                    return ()
                if found is not None:
                    break
    prefixes = [f"{folder.relative_to(base)}/".removeprefix("./") for base, _ in read]
    return tuple(("", prefix, each[1]) for prefix, each in zip(prefixes, read, strict=True))


def _read_patterns(file: Path) -> list[IgnorePattern]:
    content = _read_rules(file)
    if content is None:
        return []
    patterns, wild = list[IgnorePattern](), 0
    for line in content.removeprefix(BOM_UTF8).split(b"\n"):
        if not line.startswith(b"#") and not _WILD.isdisjoint(line):
            wild += len(line)
        if wild > _MOST_WILD:
            told = f"it has more than {_MOST_WILD:,} bytes of patterns with wildcards"
            raise OSError(errno.EFBIG, told, str(file))
        if (pattern := read_pattern(line)) is not None:
            patterns.append(pattern)
    if len(patterns) > _MOST_PATTERNS:
        told = f"it has more than {_MOST_PATTERNS:,} patterns"
        raise OSError(errno.EFBIG, told, str(file))
    return patterns


def _read_rules(path: Path) -> bytes | None:
    """Return the content of an ignore file. Returns None if there is no regular file of this name:
    a pipe or device in its place has no end.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            told = os.fstat(file.fileno())
            if stat.S_ISREG(told.st_mode) and told.st_size > _MOST_BYTES:
                raise OSError(errno.EFBIG, "it has more than 1 MiB", str(path))
            return file.read(_MOST_BYTES) if stat.S_ISREG(told.st_mode) else None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def _matches(rules: Rules, path: str, is_folder: bool) -> bool:
    """Return whether the rules ignore a path. As in git, the last matching line of a pattern file
    decides whether a path is ignored. If several pattern files have a matching line, the innermost
    of these files decides.
    """
    for base, prefix, patterns in reversed(rules):
        found = _match(patterns, to_bytes(prefix + path[len(base) :]), is_folder=is_folder)
        if found is not None:
            return found
    return False


def _match(patterns: Sequence[IgnorePattern], name: str, *, is_folder: bool) -> bool | None:
    """Return whether the patterns ignore what has this name, or None if they do not name it."""
    for pattern in reversed(patterns):
        if pattern.names(name, is_folder=is_folder):
            return pattern.include
    return None


class IgnoreRules:
    """Applies the `.cavvyignore` files of a folder to paths that another program has listed, and
    with `git_rules` also the `.gitignore` files. `outer` are rules of files outside of the folder.
    """

    def __init__(self, folder: Path, *, git_rules: bool = False, outer: Rules = ()) -> None:
        self._folder, self._git_rules, self._outer = folder, git_rules, outer
        self._rules: dict[str, Rules] = {}
        self._folders: dict[str, bool] = {"": False}

    def ignores(self, path: str) -> bool:
        parent, _, _ = path.rpartition("/")
        parent = f"{parent}/" if parent else ""
        return self.ignores_folder(parent) or _matches(self._rules_for(parent), path, False)

    def ignores_folder(self, inside: str) -> bool:
        """Return whether a folder or one of its parents is ignored. No rule can include the
        contents of an ignored folder again. `inside` is the folder's path and ends with a slash.
        """
        if inside not in self._folders:
            parent = inside[: inside.rstrip("/").rfind("/") + 1]
            ignored = self.ignores_folder(parent) or _matches(
                self._rules_for(parent), inside.rstrip("/"), True
            )
            self._folders[inside] = ignored
        return self._folders[inside]

    def _rules_for(self, inside: str) -> Rules:
        if inside not in self._rules:
            outer = (
                self._rules_for(inside[: inside.rstrip("/").rfind("/") + 1])
                if inside
                else self._outer
            )
            own = _rules_of(self._folder, inside, git_rules=self._git_rules)
            self._rules[inside] = (*outer, *own)
        return self._rules[inside]
