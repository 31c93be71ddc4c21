"""Writes what a node, a colleague or a registry has made to folders of this machine; all commands
that receive files use it.

Nothing is written outside of the folder that the user named, nor through a link in it. A folder in
which commands of the user may run is not a place for names that others choose: any name may be one
that a program obeys, such as `.envrc` or `Makefile`. So files arrive without a question only where
nothing but received files is: in a new or empty folder, or in one that Cavvy has filled before, and
in the latter only in the place of files that are as they arrived. `Receipts` knows them.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec

from cavvy.client.errors import ApiError
from cavvy.client.state import default_home, write_private
from cavvy.domain.values import Struct, field

PART = ".cavvy-part"  # suffix of an incomplete file
_LONGEST = 255  # bytes of a file name on Linux's and most other file systems
_MODES = 0o777  # permission bits, without setuid, setgid and sticky
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_IN_THE_WAY = {errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENOTDIR}


class LandingRefused(ApiError):
    """Raised if a received file cannot be written, or must not be."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__("file-unwritable", message, hint)


def name_part(name: str) -> str:
    """Return the name of an incomplete file that gets the name `name` when it is complete. If the
    suffix makes the name too long, a hash of the name replaces the name.
    """
    written = os.fsencode(name)
    return (
        name if len(written + PART.encode()) <= _LONGEST else sha256(written).hexdigest()
    ) + PART


class Landing:
    """An open local folder into which received files are written; a context manager.

    Paths are relative to the folder and must not pass through links: each folder is opened relative
    to the descriptor of its parent. File system errors raise LandingRefused, which names the path.
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
        with self.inside(path) as (parent, name):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            os.close(os.open(name, _FOLDER, dir_fd=parent))

    def make_link(self, path: str, target: str) -> None:
        """Create the link. A link of the same name is replaced."""
        with self.inside(path) as (parent, name):
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
                    os.unlink(name, dir_fd=parent)
            os.symlink(target, name, dir_fd=parent)

    @contextmanager
    def write(
        self,
        path: str,
        mode: int,
        mtime: float,
    ) -> Iterator[BinaryIO]:
        """Open a file for writing. If an interrupted copy left a part of the file, the part is
        kept. The file gets its final name when the context ends without an error.
        """
        with self.inside(path) as (parent, name):
            part = name_part(name)
            if _is_special(name, parent):
                raise LandingRefused(f"{self._shown(path)} is not a file or folder")
            with open(os.open(part, _FILE, 0o600, dir_fd=parent), "r+b") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise LandingRefused(f"{self._shown(path)}{PART}: not a regular file")
                yield file
                file.flush()
                _set(file.fileno(), mode, mtime)
            os.replace(part, name, src_dir_fd=parent, dst_dir_fd=parent)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file for writing, in a folder that the caller has made. The folders above the
        file are created.
        """
        with self.inside(path, make=True) as (parent, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o666, dir_fd=parent), "wb") as file:
                yield file

    def finish_folder(self, path: str, mode: int, mtime: float) -> None:
        """Set the mode and the times of the folder. The caller must have written the folder's
        contents before this call.
        """
        with self.inside(path) as (parent, name):
            folder = os.open(name, _FOLDER, dir_fd=parent)
            try:
                _set(folder, mode, mtime)
            finally:
                os.close(folder)

    @contextmanager
    def inside(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the path's parent folder, and the last name in the path. `make`
        creates the folders on the way.
        """
        *above, name = parts = path.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
            raise LandingRefused(f"the file {path!r} leads out of the folder {self._shown('')}")
        folder = os.dup(self._fd)
        try:
            for each in above:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(each, dir_fd=folder)
                inner = os.open(each, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, name
        except OSError as error:
            from cavvy.client.tunnel import RemoteError

            if isinstance(error, RemoteError):
                raise
            hint = "a file is replaced only with a file, and no local symbolic link is followed"
            hint = hint if error.errno in _IN_THE_WAY else ""
            raise LandingRefused(f"{self._shown(path)}: {error.strerror}", hint) from error
        finally:
            os.close(folder)

    def _shown(self, path: str) -> str:
        return _escape(str(self._folder / path))


def _is_part(name: str) -> bool:
    """Return whether an interrupted command has left this incomplete file."""
    return name.endswith(PART) or re.fullmatch(r"\.[0-9a-f]{16}\.part", name) is not None


def _escape(text: str) -> str:
    """Return a text without characters that control a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _is_special(name: str, folder: int) -> bool:
    """Return whether this is a device, pipe or socket, or a link to one. A copy would replace it:
    root would lose `/dev/null` or `/dev/stdout`.
    """
    try:
        mode = os.stat(name, dir_fd=folder).st_mode
    except OSError:  # it does not exist, or it is a link without a target
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _set(descriptor: int, mode: int, mtime: float) -> None:
    os.fchmod(descriptor, mode & _MODES)
    os.utime(descriptor, (mtime, mtime))


class _Receipt(Struct, frozen=True, array_like=True):
    """What identifies a received file: another one has another inode, size or time."""

    inode: int
    size: int
    mtime_ns: int


class _Record(Struct, kw_only=True):
    inode: int
    is_own: bool  # whether the folder was empty when the first file arrived
    files: dict[str, _Receipt] = field(default_factory=dict)


class Receipts:
    """Which files of a folder have arrived by a command of Cavvy, and are as they arrived. They are
    kept in Cavvy's own folder: what is in the folder itself may come from others. A context
    manager, which keeps them at its end.
    """

    def __init__(self, folder: Path, home: str = "") -> None:
        self._folder = folder.resolve()
        self._store = Path(home or default_home(), "received")
        name = sha256(os.fsencode(self._folder)).hexdigest()[:32]
        self._file = self._store / f"{name}.json"
        self._record = self._load()
        self._is_own = self._look()

    def __enter__(self) -> "Receipts":
        return self

    def __exit__(self, *_: object) -> None:
        files = self._record.files
        if not files or not self._folder.is_dir():
            return
        record = _Record(inode=self._folder.stat().st_ino, is_own=self._is_own, files=files)
        self._store.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(str(self._file), json.dumps(msgspec.to_builtins(record)).encode())

    def find_doubtful(self, paths: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return those of the received `paths` that are new in a folder of the user, and those that
        would replace what the user has made or changed.
        """
        new, changed = list[str](), list[str]()
        for path in paths:
            found = self._identify(path)
            if found is None:
                new += [path] * (not self._is_own)
            elif self._record.files.get(path) != found:
                changed.append(path)
        return new, changed

    def note(self, path: str) -> None:
        """Note that this file has arrived."""
        if (found := self._identify(path)) is not None:
            self._record.files[path] = found

    def _load(self) -> _Record:
        with suppress(OSError, ValueError, msgspec.MsgspecError):
            return msgspec.convert(json.loads(self._file.read_bytes()), _Record)
        return _Record(inode=0, is_own=False)

    def _look(self) -> bool:
        """Return whether nothing but received files is in the folder, as far as is known: a folder
        to which the user adds files stays one for what Cavvy brings.
        """
        try:
            names = [each for each in os.listdir(self._folder) if not _is_part(each)]
        except (FileNotFoundError, NotADirectoryError):
            names = []
        files = self._record.files
        # a new folder of the same name may have the same inode, but none of the files
        is_known = bool(names) and self._record.inode == self._folder.stat().st_ino
        is_known = is_known and any(self._identify(path) == files[path] for path in files)
        if not is_known:
            self._record.files = {}
        return not names or (is_known and self._record.is_own)

    def _identify(self, path: str) -> _Receipt | None:
        try:
            found = os.lstat(self._folder / path)
        except OSError:
            return None
        return _Receipt(found.st_ino, found.st_size, found.st_mtime_ns)
