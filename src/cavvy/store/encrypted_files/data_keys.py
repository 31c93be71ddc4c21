"""The data keys that encrypt the files of projects.

`PROJECT/NUMBER` is a data key of a project. Each data key is encrypted, like a secret, with a key
that is stored outside the data folders. The data key with the highest number encrypts new files.
`PROJECT/names` is a key that turns the hash of a blob into a name that reveals nothing without this
key. If a project's data keys or the key that encrypts them are lost, the project's files cannot be
decrypted. The encrypted keys are in the folder `file-keys`, next to the folder of the server's
files, or in the database if the files are in a bucket.
"""

import hmac
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from cavvy.domain.values import Struct
from cavvy.store.base import KeyUnusable, StoreUnusable
from cavvy.store.drivers import DatabaseSession, make_driver, translating
from cavvy.store.encrypted_files.blocks import ID_BYTES, FileKey
from cavvy.store.keys import (
    KEY_BYTES,
    KeyPlaceInvalid,
    KeyRing,
    WrappingKey,
    explain_key_errors,
    flush_path,
)
from cavvy.store.secrets import SecretSealer, find_key_id

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
        flush_path(folder)

    def replace(self, project: str, name: str, sealed: bytes) -> None:
        part = self._write_part(project, name, sealed)
        os.replace(part, self.place(project, name))
        flush_path(self._root / project)

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


_NUMBER_BYTES = 4
_NAMES = "names"
SERVER_KEY = "server"
_OF_SERVERS = "_servers"  # in place of a project's name, for values that all servers share


class FileKeyPlaces(Struct, frozen=True, kw_only=True):
    """The locations of the keys that encrypt data keys. `common` names the key for all projects
    without an entry in `projects`. `common` is "" if the files of these projects are not encrypted,
    and SERVER_KEY if these files use the key that encrypts secrets. `server` is the location of the
    key that encrypts secrets, or "" if that key is in the state folder.
    """

    common: str = ""
    projects: Mapping[str, str] = {}
    former: Sequence[str] = ()
    server: str = ""


class FileKeyUse(Struct, frozen=True, kw_only=True):
    """A data key: its project, its file, and the ID of the key that encrypts it."""

    project: str
    name: str
    key_id: str


class FileKeys:
    """The data keys of all projects, below the folder `root` or in `files`. The methods block on
    I/O, and on AWS KMS at the first use of a key.
    """

    def __init__(
        self, root: Path, folder_key: Path, places: FileKeyPlaces, files: KeyFiles | None = None
    ) -> None:
        """Raises KeyPlaceInvalid."""
        self._files: KeyFiles = files or KeyFolder(root)
        self._folder_key, self._places = folder_key, places
        known = dict.fromkeys((places.common, places.server, *places.former))
        self._former = [place for place in known if place not in ("", SERVER_KEY)]
        self._rings: dict[str, KeyRing] = {}
        self._projects: dict[str, ProjectFileKeys] = {}
        for project in ("", *places.projects):
            self._ring(project)

    def of(self, project: str) -> "ProjectFileKeys":
        """Return the data keys of a project. The project's name must be valid, because it becomes
        part of a path."""
        if project not in self._projects:
            encrypts = bool(self._places.projects.get(project, self._places.common))
            self._projects[project] = ProjectFileKeys(
                self._files, project, SecretSealer(self._ring(project)), encrypts=encrypts
            )
        return self._projects[project]

    def share(self, name: str, value: bytes) -> bytes:
        """Store a value for all servers, unless a value is already stored under this name, and
        return the stored value. Raises StoreUnusable, StoreFull.
        """
        return self.of(_OF_SERVERS).share(name, value)

    def export(self) -> Iterator[tuple[str, bytes]]:
        """Yield the file name and the content of each encrypted data key. Raises OSError,
        StoreUnusable.
        """
        for project in self._files.projects():
            for name in self._files.names(project):
                yield f"{project}/{name}", self._files.read(project, name)

    def keys(self) -> Iterator[WrappingKey]:
        """Yield the keys that can encrypt or decrypt data keys. Raises StoreUnusable."""
        for ring in self._rings.values():
            yield from ring.all()

    def current(self) -> Iterator[WrappingKey]:
        """Yield the keys that encrypt new data keys of any project. Raises StoreUnusable."""
        for ring in self._rings.values():
            yield ring.current()

    def uses(self) -> Iterator[FileKeyUse]:
        """Yield all data keys. Raises OSError, StoreUnusable."""
        for path, sealed in self.export():
            project, _, name = path.partition("/")
            yield FileKeyUse(project=project, name=name, key_id=find_key_id(sealed))

    def rotate(self) -> tuple[int, Sequence[tuple[str, str, str]]]:
        """Encrypt each data key again with the current key of its project, and create a new data
        key for each project's new files. Return how many keys were encrypted, and the project, name
        and problem of each key that could not be encrypted. Raises OSError, StoreFull.
        """
        count, problems = 0, []
        for each in list(self.uses()):
            try:
                self.of(each.project).reseal(each.name)
                count += 1
            except StoreUnusable as error:
                problems.append((each.project, f"files: {each.name}", str(error)))
        failed = {project for project, _, _ in problems}
        for project in self._files.projects():
            if project not in failed:
                self.of(project).renew()
        return count, problems

    def close(self) -> None:
        """Close the connection to the storage of the keys, if a connection is open."""
        self._files.close()

    def _ring(self, project: str) -> KeyRing:
        place = self._places.projects.get(project, self._places.common)
        if place in ("", SERVER_KEY):
            place = self._places.server
        if place not in self._rings:
            self._rings[place] = KeyRing(self._folder_key, place, self._former)
        return self._rings[place]


class ProjectFileKeys:
    """The data keys of one project. `encrypts` states whether the project's new files are
    encrypted; existing keys decrypt older files.
    """

    def __init__(
        self, files: KeyFiles, project: str, sealer: SecretSealer, *, encrypts: bool
    ) -> None:
        self.encrypts = encrypts
        self._files, self._project, self._sealer = files, project, sealer
        self._known: dict[str, bytes] = {}  # the plain keys that this process has used
        self._newest = ""
        self._lock = Lock()

    @property
    def ready(self) -> bool:
        """Whether new files can be written without first requesting a key."""
        return not self.encrypts or self._newest in self._known

    def current(self) -> FileKey:
        """Return the key for new files. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._place("")):
            newest = max(self._numbers(), default=0)
            if not newest:
                self._make("1")
                newest = 1
            self._newest = str(newest)
            return self._numbered(newest)

    def find(self, key_id: bytes) -> FileKey:
        """Return the key whose ID is in the header of a file. Raises StoreUnusable."""
        number = int.from_bytes(key_id[:_NUMBER_BYTES], "big")
        with self._lock, explain_key_errors(self._place(str(number))):
            key = self._numbered(number)
        if key.id != key_id:
            raise KeyUnusable(
                f"{self._place(str(number))} is not the data key that encrypted the file; restore "
                "the right key from a backup"
            )
        return key

    def hide(self, name: str) -> str | None:
        """Return the name under which an encrypted blob with this SHA-256 is stored, or None if the
        project has no encrypted files. Raises StoreUnusable, StoreFull.
        """
        with self._lock, explain_key_errors(self._place(_NAMES)):
            if _NAMES not in self._known and _NAMES not in self._files.names(self._project):
                if not self.encrypts:
                    return None
                self._make(_NAMES)
            return hmac.digest(self._load(_NAMES), name.encode(), "sha256").hex()

    def renew(self) -> None:
        """Create a new key for new files. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._place("")):
            newest = max(self._numbers(), default=0)
            if newest and self.encrypts:
                self._make(str(newest + 1))

    def reseal(self, name: str) -> None:
        """Encrypt a data key with the current key. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._place(name)):
            self._known.pop(name, None)
            self._files.replace(self._project, name, self._seal(name, self._load(name)))

    def share(self, name: str, value: bytes) -> bytes:
        """See `FileKeys.share`."""
        with self._lock, explain_key_errors(self._place(name)):
            if name not in self._files.names(self._project):
                self._make(name, value)
            return self._load(name)

    def _place(self, name: str) -> Path:
        return self._files.place(self._project, name)

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._files.names(self._project) if name.isdecimal()]

    def _numbered(self, number: int) -> FileKey:
        material = self._load(str(number))
        digest = sha256(b"cavvy file key " + material).digest()
        key_id = number.to_bytes(_NUMBER_BYTES, "big") + digest
        return FileKey(id=key_id[:ID_BYTES], material=material)

    def _load(self, name: str) -> bytes:
        """Raises StoreUnusable, OSError."""
        if name not in self._known:
            sealed = self._files.read(self._project, name)
            text = self._sealer.open(self._project, f"files/{name}", sealed)
            self._known[name] = b64decode(text)
        return self._known[name]

    def _make(self, name: str, material: bytes = b"") -> None:
        """Create a key atomically; if another server has just created a key with this name, use
        that key.
        """
        self._files.prepare(self._project)
        material = material or secrets.token_bytes(KEY_BYTES)
        self._files.create(self._project, name, self._seal(name, material))

    def _seal(self, name: str, material: bytes) -> bytes:
        text = b64encode(material).decode("ascii")
        return self._sealer.seal(self._project, f"files/{name}", text)


def parse_project_places(text: str) -> dict[str, str]:
    """Read `PROJECT=PLACE` pairs, separated by spaces or commas. Raises KeyPlaceInvalid."""
    found: dict[str, str] = {}
    for pair in text.replace(",", " ").split():
        project, equals, place = pair.partition("=")
        if not project or not equals or not place:
            raise KeyPlaceInvalid(f"{pair!r} is not PROJECT=PLACE")
        found[project] = place
    return found
