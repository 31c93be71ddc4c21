"""The data keys that encrypt the files of projects.

`ROOT/PROJECT/NUMBER` is a data key of a project. Like a secret, it is encrypted with a key that no
folder of data contains. The data key with the highest number encrypts new files.
`ROOT/PROJECT/names` is a key that turns the hash of a blob into a name that reveals nothing without
this key. Without these small files, or without the key that encrypts them, the files of the project
are lost.
"""

import hmac
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

from cavvy.domain.values import Struct
from cavvy.store.base import KeyUnusable, StoreUnusable
from cavvy.store.encrypted_files.blocks import ID_BYTES, FileKey
from cavvy.store.keys import (
    KEY_BYTES,
    KeyPlaceInvalid,
    KeyRing,
    WrappingKey,
    explain_key_errors,
    flush_folder,
)
from cavvy.store.secrets import SecretSealer, find_key_id

_NUMBER_BYTES = 4
_NAMES = "names"
SERVER_KEY = "server"


class FileKeyPlaces(Struct, frozen=True, kw_only=True):
    """The locations of the keys that encrypt data keys. `common` is the location for all projects:
    "" if their files are not encrypted, SERVER_KEY for the key that encrypts secrets. `projects`
    contains other locations for some projects. `server` is the location of the key of secrets, or
    "" if that key is in the state folder.
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
    """The data keys of all projects, below the folder `root`. The methods block on disk I/O, and on
    AWS KMS at the first use of a key.
    """

    def __init__(self, root: Path, folder_key: Path, places: FileKeyPlaces) -> None:
        """Raises KeyPlaceInvalid."""
        self._root, self._folder_key, self._places = root, folder_key, places
        known = dict.fromkeys((places.common, places.server, *places.former))
        self._former = [place for place in known if place not in ("", SERVER_KEY)]
        self._rings: dict[str, KeyRing] = {}
        self._projects: dict[str, ProjectFileKeys] = {}
        for project in ("", *places.projects):
            self._ring(project)

    def of(self, project: str) -> "ProjectFileKeys":
        """Return the data keys of a project, whose name must be valid, because the name becomes a
        part of a path."""
        if project not in self._projects:
            encrypts = bool(self._places.projects.get(project, self._places.common))
            self._projects[project] = ProjectFileKeys(
                self._root / project, SecretSealer(self._ring(project)), encrypts=encrypts
            )
        return self._projects[project]

    def keys(self) -> Iterator[WrappingKey]:
        """Yield the keys that can encrypt or decrypt data keys. Raises StoreUnusable."""
        for ring in self._rings.values():
            yield from ring.all()

    def uses(self) -> Iterator[FileKeyUse]:
        """Yield all data keys. Raises OSError."""
        for path in sorted(self._root.glob("*/*")):
            if not path.name.endswith(".part"):
                key_id = find_key_id(path.read_bytes())
                yield FileKeyUse(project=path.parent.name, name=path.name, key_id=key_id)

    def rotate(self) -> tuple[int, Sequence[tuple[str, str, str]]]:
        """Encrypt all data keys again with the current key of their project, and make new ones for
        new files. Return how many keys were encrypted, and the project, name and problem of each
        key that could not be encrypted. Raises OSError, StoreFull.
        """
        count, problems = 0, []
        for each in list(self.uses()):
            try:
                self.of(each.project).reseal(each.name)
                count += 1
            except StoreUnusable as error:
                problems.append((each.project, f"files: {each.name}", str(error)))
        failed = {project for project, _, _ in problems}
        for path in sorted(self._root.glob("*")):
            if path.name not in failed:
                self.of(path.name).renew()
        return count, problems

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

    def __init__(self, folder: Path, sealer: SecretSealer, *, encrypts: bool) -> None:
        self.encrypts = encrypts
        self._folder, self._sealer = folder, sealer
        self._known: dict[str, bytes] = {}  # the plain keys that this process has used
        self._newest = ""
        self._lock = Lock()

    @property
    def ready(self) -> bool:
        """Whether new files can be written without a request for a key."""
        return not self.encrypts or self._newest in self._known

    def current(self) -> FileKey:
        """Return the key for new files. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._folder):
            newest = max(self._numbers(), default=0)
            if not newest:
                self._make("1")
                newest = 1
            self._newest = str(newest)
            return self._numbered(newest)

    def find(self, key_id: bytes) -> FileKey:
        """Return the key with the ID in the header of a file. Raises StoreUnusable."""
        number = int.from_bytes(key_id[:_NUMBER_BYTES], "big")
        with self._lock, explain_key_errors(self._folder / str(number)):
            key = self._numbered(number)
        if key.id != key_id:
            raise KeyUnusable(
                f"{self._folder / str(number)} is not the data key that encrypted it; restore the "
                "right one from a backup"
            )
        return key

    def hide(self, name: str) -> str | None:
        """Return the name under which an encrypted blob with this SHA-256 is stored, or None if the
        project has no encrypted files. Raises StoreUnusable, StoreFull.
        """
        with self._lock, explain_key_errors(self._folder / _NAMES):
            if _NAMES not in self._known and not (self._folder / _NAMES).exists():
                if not self.encrypts:
                    return None
                self._make(_NAMES)
            return hmac.digest(self._load(_NAMES), name.encode(), "sha256").hex()

    def renew(self) -> None:
        """Make a new key for new files. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._folder):
            newest = max(self._numbers(), default=0)
            if newest and self.encrypts:
                self._make(str(newest + 1))

    def reseal(self, name: str) -> None:
        """Encrypt a data key with the current key. Raises StoreUnusable, StoreFull."""
        with self._lock, explain_key_errors(self._folder / name):
            self._known.pop(name, None)
            part = self._write_part(name, self._load(name))
            os.replace(part, self._folder / name)
            flush_folder(self._folder)

    def _numbers(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._folder) if name.isdecimal()]
        except FileNotFoundError:
            return []

    def _numbered(self, number: int) -> FileKey:
        material = self._load(str(number))
        digest = sha256(b"cavvy file key " + material).digest()
        key_id = number.to_bytes(_NUMBER_BYTES, "big") + digest
        return FileKey(id=key_id[:ID_BYTES], material=material)

    def _load(self, name: str) -> bytes:
        """Raises StoreUnusable, OSError."""
        if name not in self._known:
            sealed = (self._folder / name).read_bytes()
            text = self._sealer.open(self._folder.name, f"files/{name}", sealed)
            self._known[name] = b64decode(text)
        return self._known[name]

    def _make(self, name: str) -> None:
        """Create a key in one step; if another server has just created this key, use that key."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._write_part(name, secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(part, self._folder / name)
        part.unlink()
        flush_folder(self._folder)

    def _write_part(self, name: str, material: bytes) -> Path:
        sealed = self._sealer.seal(
            self._folder.name, f"files/{name}", b64encode(material).decode("ascii")
        )
        part = self._folder / f"{name}.{secrets.token_hex(4)}.part"
        with open(
            os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        return part


def parse_project_places(text: str) -> dict[str, str]:
    """Read `PROJECT=PLACE` pairs, separated by spaces or commas. Raises KeyPlaceInvalid."""
    found: dict[str, str] = {}
    for pair in text.replace(",", " ").split():
        project, equals, place = pair.partition("=")
        if not project or not equals or not place:
            raise KeyPlaceInvalid(f"{pair!r} is not PROJECT=PLACE")
        found[project] = place
    return found
