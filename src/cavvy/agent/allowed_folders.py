"""Opens files in folders that the work can change. Symbolic links that the work creates cannot lead
the agent to files outside these folders.

The agent can access more files than the work if the work runs in a container or in its own
namespaces. This module opens the folders of a path one after another. Each folder is opened
relative to the one before, with flags that forbid the kernel to follow links. If a name is a link,
this module follows it only if the link's target is in an allowed folder. If a name becomes a link
after the check, opening the name fails.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress

MOST_LINKS = 40  # as in Linux: MAXSYMLINKS of include/linux/namei.h
_STEP = (
    getattr(os, "O_PATH", os.O_RDONLY)  # needs no permission to read the folder
    | os.O_DIRECTORY
    | os.O_NOFOLLOW
    | os.O_CLOEXEC
)
# Errors of a file or folder that was removed or replaced after it was listed.
VANISHED = (FileNotFoundError, NotADirectoryError)


class LeadsOutside(OSError):
    """Raised if a path, or the target of a symbolic link on the path, is outside all allowed
    folders."""


class AllowedFolders:
    """The folders that the agent may access. Opened files and the targets of links must be in one
    of these folders.

    `own` are folders that the work could replace by a link, so links at the paths of these folders
    are not followed. `given` are folders that the user named; their paths may contain links. A path
    in `given` may also be the path of a file.

    `seen` maps the path at which the work sees a folder to the folder's path on this machine. The
    mapping `seen` is used to resolve links and folders on a path. Each path on this machine to
    which `seen` leads must be in one of the folders that the lists `own` and `given` contain.
    """

    def __init__(
        self,
        own: list[str],
        given: list[str] | None = None,
        seen: dict[str, str] | None = None,
    ) -> None:
        # path of an allowed folder -> the path that is opened to reach it
        self._opened: dict[str, str] = {}
        self._seen = {os.path.abspath(each): source for each, source in (seen or {}).items()}
        for path in map(os.path.abspath, own):
            parent, name = os.path.split(path)
            real = os.path.join(os.path.realpath(parent), name)
            self._opened[path] = self._opened[real] = real
            for each in list(self._seen):
                if each.startswith(path + "/"):
                    self._seen[real + each[len(path) :]] = self._seen[each]
        for path in map(os.path.abspath, given or []):
            real = os.path.realpath(path)
            self._opened[path] = self._opened[real] = real

    @classmethod
    def of_root(cls, root: str) -> AllowedFolders:
        """Allow the root folder of a container, which is at `root` on this machine. Paths and links
        start at this folder, as they do for the container's processes.
        """
        made = cls([])
        made._opened["/"] = root + "/."
        return made

    def find(self, path: str, *, follow: bool = True, make: bool = False) -> tuple[int, str]:
        """Open the folder that contains `path`. Return the folder's descriptor, which the caller
        must close, and the last name of `path`, or "." if `path` is an allowed folder.

        With `follow`, a link at `path` itself is resolved first. With `make`, missing folders above
        `path` are created. Raises LeadsOutside, OSError.
        """
        walk = _Walk(self._opened, self._seen)
        try:
            name = self._walk(walk, path, follow=follow, make=make)
            return walk.take(), name
        finally:
            walk.close()

    def resolve(self, path: str) -> str:
        """Return the path after all links and ".." are resolved. Raises LeadsOutside, OSError."""
        walk = _Walk(self._opened, self._seen)
        try:
            name = self._walk(walk, path, follow=True, make=False)
            return os.path.normpath(os.path.join(walk.folder, *walk.names, name))
        finally:
            walk.close()

    def open(
        self,
        path: str,
        flags: int,
        mode: int = 0o666,
        *,
        follow: bool = True,
        make: bool = False,
    ) -> int:
        """Like os.open. Raises LeadsOutside, OSError."""
        folder, name = self.find(path, follow=follow, make=make)
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        finally:
            os.close(folder)

    def open_folder(self, path: str) -> int:
        """Open a folder to list it. Raises LeadsOutside, OSError."""
        return self.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def open_file(self, path: str) -> int:
        """Open a regular file to read it. Raises LeadsOutside, OSError."""
        return check_regular(self.open(path, os.O_RDONLY | os.O_NONBLOCK), path)

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result:
        """Like os.stat. Raises LeadsOutside, OSError."""
        folder, name = self.find(path, follow=follow)
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)

    @staticmethod
    def _walk(walk: _Walk, path: str, *, follow: bool, make: bool) -> str:
        links = 0
        walk.enter(path)
        while walk.todo:
            name = walk.todo.pop()
            link = _read_link(name, walk.here) if follow or walk.todo else ""
            if name == "..":
                walk.leave()
            elif link:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                walk.turn(link)
            elif walk.todo:
                walk.step(name, make=make)
            else:
                return name
        return "."


class _Walk:
    """A position at or below an allowed folder, and the remaining names on the path."""

    def __init__(self, opened: dict[str, str], seen: dict[str, str]) -> None:
        self._allowed, self._seen = opened, seen
        self._open: list[int] = []
        self.folder = ""  # the allowed folder
        self._file_in = ""  # if the allowed path is a file, the folder that contains it, else ""
        self.names: list[str] = []  # the names opened so far, below `folder`
        self.todo: list[str] = []  # the names still to be opened, in reverse order

    @property
    def here(self) -> int:
        return self._open[-1]

    def enter(self, path: str) -> None:
        """Open the innermost allowed folder that contains the path, and walk from this folder.
        Raises LeadsOutside, OSError."""
        folder = _find_innermost(path, self._allowed)
        if not folder:
            raise LeadsOutside(
                f"a symbolic link leads out of the job's folders, to {os.path.normpath(path)}"
            )
        self.close()
        self.folder, self._file_in = folder, ""
        self.names, self.todo = [], _split(path[len(self.folder) :])
        opened = self._allowed[self.folder]
        try:
            self._open = [os.open(opened, _STEP)]
        except NotADirectoryError:
            if self.todo:
                raise
            self._file_in, name = os.path.split(opened)
            self.folder, self.todo = os.path.dirname(self.folder), [name]
            self._open = [os.open(self._file_in, _STEP)]

    def leave(self) -> None:
        """Go to the parent folder. Raises LeadsOutside, OSError."""
        if self.names:
            os.close(self._open.pop())
            self.names.pop()
        elif self.folder != "/":  # the root folder is its own parent
            self._continue_from(os.path.dirname(self._allowed[self.folder]))

    def turn(self, link: str) -> None:
        """Resolve a link: continue with the names of the link's target. Raises LeadsOutside,
        OSError."""
        if link.startswith("/"):
            self._enter_seen("/".join([link, *reversed(self.todo)]))
        else:
            self.todo += _split(link)
            if self._file_in:  # only one name in this folder is allowed
                self._continue_from(self._file_in)

    def _continue_from(self, folder: str) -> None:
        """Continue with the remaining names, which are relative to `folder`, a path without links.
        Raises LeadsOutside, OSError."""
        while self.todo and self.todo[-1] == "..":
            folder = os.path.dirname(folder)
            self.todo.pop()
        self._enter_seen("/".join([folder.rstrip("/"), *reversed(self.todo)]))

    def _enter_seen(self, path: str) -> None:
        """Enter a path that is stated as the work sees it. The folders in `seen` have other paths
        for the agent; the innermost of them that contains `path` is used. Raises LeadsOutside,
        OSError.
        """
        shown = _find_innermost(path, self._seen)
        if shown and len(shown) >= len(_find_innermost(path, self._allowed)):
            path = self._seen[shown] + path[len(shown) :]
        self.enter(path)

    def step(self, name: str, *, make: bool) -> None:
        """Open the folder `name` in the current folder; with `make`, create a missing folder.
        Raises LeadsOutside, OSError."""
        if self._seen:
            path = os.path.join(self._allowed[self.folder], *self.names, name)
            if path in self._seen:
                self._enter_seen("/".join([path, *reversed(self.todo)]))
                return
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.here)
        self._open.append(os.open(name, _STEP, dir_fd=self.here))
        self.names.append(name)

    def take(self) -> int:
        """Return the descriptor of the current folder. After this call, `close` leaves the
        descriptor open.
        """
        return self._open.pop()

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def open_below(folder: int, path: str, flags: int) -> int:
    """Open a relative path below an open folder, following no link. Raises LeadsOutside,
    OSError."""
    names, here = _split(path), folder
    if ".." in names or path.startswith("/"):
        raise LeadsOutside(f"the path {path} leads out of its folder")
    try:
        while len(names) > 1:
            below = os.open(names.pop(), _STEP, dir_fd=here)
            if here != folder:
                os.close(here)
            here = below
        name = names[0] if names else "."
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    finally:
        if here != folder:
            os.close(here)


def ignore_error(error: OSError) -> None:
    pass


def raise_error(error: OSError) -> None:
    raise error


def raise_unless_vanished(error: OSError) -> None:
    """Raise the error, unless the file or folder was removed or replaced after it was listed."""
    if not isinstance(error, VANISHED):
        raise error


def walk_below(
    folder: int,
    *,
    on_error: Callable[[OSError], object] = ignore_error,
    without: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, os.DirEntry[str], int]]:
    """For every file and folder below an open folder, yield the relative path, the directory entry,
    and the descriptor of the folder that contains it, which is closed when the iteration
    continues. A folder is yielded before its entries. Links are not followed. A folder
    that cannot be listed is omitted after a call of `on_error`, unless the call raises an error. As
    for `os.walk`, the error's filename is the folder's path. Folders with a name in `without` are
    omitted.
    """
    todo = [""]
    # The folder that was listed before, and its path. From it, the next one is one step; from
    # `folder`, each step of a tree that is deep would be as long as the tree is deep.
    last, last_path = -1, ""
    try:
        while todo:
            below = todo.pop()
            parent, _, name = below.rpartition("/")
            start, path = (last, name) if last >= 0 and parent == last_path else (folder, below)
            try:
                here = open_below(start, path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                error.filename = below
                on_error(error)
                continue
            if last >= 0:
                os.close(last)
            last, last_path = here, below
            try:
                with os.scandir(here) as entries:
                    found = list(entries)
                for entry in found:
                    path = os.path.join(below, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name in without:
                            continue
                        todo.append(path)
                    yield path, entry, here
            except OSError as error:
                error.filename = below
                on_error(error)
    finally:
        if last >= 0:
            os.close(last)


def check_regular(file: int, path: str) -> int:
    """Return `file`, the descriptor of an open file, if the file is regular; otherwise close the
    file and raise OSError.
    """
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "the file is not a regular file", path)


def _find_innermost(path: str, folders: dict[str, str]) -> str:
    """Return the innermost folder that contains the path or equals it, or "" if no such folder
    exists."""
    fits = (e for e in folders if path == e or path.startswith(e.rstrip("/") + "/"))
    return max(fits, key=len, default="")


def _split(path: str) -> list[str]:
    """Return the names on a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _read_link(name: str, folder: int) -> str:
    """Return the target of a link, or "" if the file is not a link or is missing. Raises
    OSError."""
    try:
        return os.readlink(name, dir_fd=folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return ""
