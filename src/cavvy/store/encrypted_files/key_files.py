"""Stores the data keys of projects in encrypted form. If the server's files are in a folder, the
keys are in a folder next to it; if the files are in a bucket, the keys are in the database.
"""

import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from cavvy.store.drivers import DatabaseSession, make_driver, translating
from cavvy.store.keys import flush_folder

_T = TypeVar("_T")
_PREFIX = "file-keys/"  # prefix of the names of facts that are data keys


class KeyFiles(Protocol):
    """A store of small encrypted keys by project and name. All methods block. Raise OSError,
    StoreUnusable.
    """

    def place(self, project: str, name: str) -> Path:
        """Return the name of a key for messages."""

    def projects(self) -> Sequence[str]: ...
    def names(self, project: str) -> Sequence[str]: ...
    def read(self, project: str, name: str) -> bytes:
        """Raises FileNotFoundError."""

    def prepare(self, project: str) -> None:
        """Prepare the storage for the first key of a project."""

    def create(self, project: str, name: str, sealed: bytes) -> None:
        """Store a key, unless another server has already stored a key under this name."""

    def replace(self, project: str, name: str, sealed: bytes) -> None: ...
    def close(self) -> None: ...


class KeyFolder:
    """Stores each key in the file `ROOT/PROJECT/NAME`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def place(self, project: str, name: str) -> Path:
        return self._root / project / name

    def projects(self) -> Sequence[str]:
        return sorted(path.name for path in self._root.glob("*"))

    def names(self, project: str) -> Sequence[str]:
        try:
            found = os.listdir(self._root / project)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.endswith(".part"))

    def read(self, project: str, name: str) -> bytes:
        return self.place(project, name).read_bytes()

    def prepare(self, project: str) -> None:
        (self._root / project).mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, project: str, name: str, sealed: bytes) -> None:
        folder = self._root / project
        part = self._write_part(project, name, sealed)
        with suppress(FileExistsError):
            os.link(part, folder / name)
        part.unlink()
        flush_folder(folder)

    def replace(self, project: str, name: str, sealed: bytes) -> None:
        part = self._write_part(project, name, sealed)
        os.replace(part, self.place(project, name))
        flush_folder(self._root / project)

    def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _write_part(self, project: str, name: str, sealed: bytes) -> Path:
        part = self._root / project / f"{name}.{secrets.token_hex(4)}.part"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600), "wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        return part


class KeyRows:
    """Stores each key as a fact of the installation. The connection to the database is opened at
    the first use and again after an error.
    """

    def __init__(self, url: str) -> None:
        self._driver = make_driver(url, journal="auto")
        self._session: DatabaseSession | None = None
        self._lock = Lock()

    def place(self, project: str, name: str) -> Path:
        return Path("the database", "file-keys", project, name)

    def projects(self) -> Sequence[str]:
        return sorted({name.partition("/")[0] for name in self._names(_PREFIX)})

    def names(self, project: str) -> Sequence[str]:
        return self._names(f"{_PREFIX}{project}/")

    def read(self, project: str, name: str) -> bytes:
        sql = 'SELECT value FROM meta WHERE "key" = ?'
        row = self._do(lambda session: session.run(sql, (_fact(project, name),)).fetchone())
        if row is None:
            raise FileNotFoundError(2, "there is no such key", str(self.place(project, name)))
        return b64decode(row[0])

    def prepare(self, project: str) -> None:
        """Do nothing. The keys are rows of a database table, and a table needs no preparation."""

    def create(self, project: str, name: str, sealed: bytes) -> None:
        sql = 'INSERT INTO meta ("key", value) VALUES (?, ?) ON CONFLICT DO NOTHING'
        values = (_fact(project, name), b64encode(sealed).decode("ascii"))
        self._do(lambda session: session.run(sql, values))

    def replace(self, project: str, name: str, sealed: bytes) -> None:
        sql = 'UPDATE meta SET value = ? WHERE "key" = ?'
        values = (b64encode(sealed).decode("ascii"), _fact(project, name))
        self._do(lambda session: session.run(sql, values))

    def close(self) -> None:
        """Close the connection; the next call opens another connection."""
        with self._lock:
            if self._session is not None:
                self._session.close()
            self._session = None

    def _names(self, prefix: str) -> Sequence[str]:
        """Find the rows of the table `meta` whose key begins with `prefix`. Return these keys
        without the prefix.
        """
        sql = 'SELECT "key" FROM meta WHERE substr("key", 1, CAST(? AS INTEGER)) = ? ORDER BY 1'
        rows = self._do(lambda session: session.run(sql, (len(prefix), prefix)).fetchall())
        return [str(key)[len(prefix) :] for (key,) in rows]

    def _do(self, work: Callable[[DatabaseSession], _T]) -> _T:
        with self._lock, translating(self._driver):
            if self._session is None:
                self._session = self._driver.connect()
            elif self._session.broken:
                self._session.reopen()
            return work(self._session)


def _fact(project: str, name: str) -> str:
    return f"{_PREFIX}{project}/{name}"
