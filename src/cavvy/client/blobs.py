"""Uploads the blobs that the server does not have, over a few connections, and downloads the files
of a snapshot or of a model version, whose hashes are checked.

Small blobs are sent in packs, with which clients, agents and the server exchange many small blobs
in one request. A pack is a sequence of entries: the SHA-256 in 64 lower-case hexadecimal digits,
the size in decimal, a line feed, and the bytes. The agent has its own code to read packs, because
it imports no other modules of Cavvy.
"""

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from msgspec.json import Decoder

from cavvy.client.errors import ApiError, SourceChanged
from cavvy.client.landing import Landing, LandingRefused
from cavvy.client.paths import project_path
from cavvy.spec.workdir import FolderEntry, FrozenFile

if TYPE_CHECKING:
    from cavvy.client.client import ApiClient
    from cavvy.client.transport import HttpAnswer


PACK_BYTES = 8 * 1024 * 1024  # maximum bytes of a whole pack
PACK_BLOBS = 2048  # maximum number of blobs in a pack; one request can store this many in time
SMALL = 256 * 1024  # maximum bytes of a blob in a pack; a larger blob is sent alone
_HEAD = re.compile(rb"([0-9a-f]{64})([0-9]{1,7})\n")
_HEAD_BYTES = 64 + 7 + 1


class TornPack(ValueError):
    """Raised if the bytes are not a valid pack. The message contains the position of the error."""


def make_entry(name: str, data: bytes) -> bytes:
    """Return one blob as an entry of a pack."""
    return b"%s%d\n%s" % (name.encode(), len(data), data)


def make_pack(blobs: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(make_entry(name, data) for name, data in blobs)


def read_pack(data: bytes) -> dict[str, bytes]:
    """Return the blobs of a pack by name, without checking their hashes. Raises TornPack."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at, at + _HEAD_BYTES)
        if head is None:
            raise TornPack(f"the pack has no hash and size at byte {at}, after {len(found)} blobs")
        name, size = head[1].decode(), int(head[2])
        if size > SMALL:
            raise TornPack(f"blob {name} has {size} bytes; a pack holds at most {SMALL} per blob")
        if len(data) - head.end() < size:
            raise TornPack(
                f"the pack ends in the middle of blob {name}: it has {len(data) - head.end()} of "
                f"{size} bytes"
            )
        at = head.end() + size
        found[name] = data[head.end() : at]
    return found


def size_in_pack(size: int) -> int:
    """Return the maximum number of bytes that the entry of a blob with `size` bytes can have."""
    return size + _HEAD_BYTES


_CONNECTIONS = 4


_ASK_AT_ONCE = 5000  # maximum number of names in one request, which then has 335 kB


_PART = 1024 * 1024


# maximum bytes of a pack; small enough to show progress on a slow connection
_PACK = PACK_BYTES // 4


_WAIT_S = 270.0  # seconds that the server may need to store or send a pack or a large blob


Source = bytes | FrozenFile | str | os.PathLike[str]


Progress = Callable[[int, int], None]


def upload(
    client: "ApiClient",
    project: str,
    blobs: Mapping[str, Source],
    progress: Progress | None = None,
) -> int:
    """Upload the blobs, named by their SHA-256, that the server lacks, and return the number of
    bytes sent. Any thread may call `progress`, with the bytes sent and in total. Raises the first
    ApiError of any thread, which is SourceChanged if a file no longer has the content that its hash
    names.
    """
    names = list(blobs)
    missing = [
        name
        for start in range(0, len(names), _ASK_AT_ONCE)
        for name in client.missing_blobs(project, names[start : start + _ASK_AT_ONCE])
    ]
    return _Upload(client, project, {name: blobs[name] for name in missing}, progress).run()


class _Upload:
    """One upload. Threads take packs of names from a queue until the queue is empty or a thread has
    failed."""

    def __init__(
        self,
        client: "ApiClient",
        project: str,
        blobs: Mapping[str, Source],
        progress: Progress | None,
    ) -> None:
        self._client, self._project, self._blobs, self._progress = client, project, blobs, progress
        self._sizes = {name: _size(source) for name, source in blobs.items()}
        self._total = sum(self._sizes.values())
        self._packs = True  # False once a server has refused a pack because it is too old for packs
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._left: SimpleQueue[list[str]] = SimpleQueue()

    def run(self) -> int:
        packs = _divide(self._sizes)
        for names in packs:
            self._left.put(names)
        if self._progress is not None:
            self._progress(0, self._total)
        threads = [
            threading.Thread(target=self._work) for _ in range(min(_CONNECTIONS, len(packs)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._total

    def _work(self) -> None:
        with self._client.sibling() as connection:
            while self._failure is None:
                try:
                    names = self._left.get_nowait()
                except Empty:
                    return
                try:
                    self._send(connection, names)
                except BaseException as error:  # noqa: BLE001 - raised again by run()
                    self._failure = error

    def _send(self, connection: "ApiClient", names: list[str]) -> None:
        if len(names) > 1 and self._packs:
            try:
                self._put(connection, "pack", make_pack((name, self._read(name)) for name in names))
                self._count(names)
                return
            except ApiError as error:
                # An older server takes "pack" for the name of a blob, and refuses it as an invalid
                # hash.
                if error.status not in (404, 405) and error.code != "invalid-request":
                    raise
                self._packs = False
        for name in names:
            if self._failure is not None:
                return
            self._put(connection, name, self._blobs[name])
            self._count([name])

    def _put(self, connection: "ApiClient", name: str, source: Source) -> None:
        target = f"/v1/projects/{self._project}/blobs/{name}"
        size = len(source) if isinstance(source, bytes) else self._sizes[name]

        def send() -> "HttpAnswer":
            body = source if isinstance(source, bytes) else _parts(source, size)
            return connection.send("PUT", target, body, length=size, wait_s=_WAIT_S)

        try:
            connection.repeat(send)
        except ApiError as error:
            if error.code != SourceChanged.CODE or isinstance(source, bytes):
                raise
            raise SourceChanged(os.fspath(_path(source))) from error

    def _read(self, name: str) -> bytes:
        """Read the bytes of a small blob. Raises SourceChanged."""
        source = self._blobs[name]
        if isinstance(source, bytes):
            return source
        data = b"".join(_parts(source, self._sizes[name]))
        if sha256(data).hexdigest() != name:
            raise SourceChanged(os.fspath(_path(source)))
        return data

    def _count(self, names: list[str]) -> None:
        with self._lock:
            self._sent += sum(self._sizes[name] for name in names)
            if self._progress is not None:
                self._progress(self._sent, self._total)


def _divide(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide blobs into packs. Each blob larger than SMALL bytes has its own pack."""
    packs = [[name] for name, size in sizes.items() if size > SMALL]
    room, names = _PACK, list[str]()
    for name, size in sizes.items():
        if size > SMALL:
            continue
        if names and (room < size_in_pack(size) or len(names) == PACK_BLOBS):
            packs.append(names)
            room, names = _PACK, []
        names.append(name)
        room -= size_in_pack(size)
    return [*packs, names] if names else packs


def _size(source: Source) -> int:
    if isinstance(source, bytes):
        return len(source)
    if isinstance(source, FrozenFile):
        return source.size
    with _reading(source):
        return os.stat(source).st_size


def _path(source: FrozenFile | str | os.PathLike[str]) -> str | os.PathLike[str]:
    return source.path if isinstance(source, FrozenFile) else source


def _parts(source: FrozenFile | str | os.PathLike[str], size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file. Raises SourceChanged if the file is shorter."""
    path, left = _path(source), size
    with _reading(path), open(path, "rb") as file:
        while left:
            part = file.read(min(_PART, left))
            if not part:
                raise SourceChanged(os.fspath(path))
            left -= len(part)
            yield part


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ApiError if the file cannot be read, so that the failure is not taken for a failure of
    the connection."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceChanged(os.fspath(path)) from error
    except OSError as error:
        raise ApiError(
            "file-unreadable",
            f"cannot read {os.fspath(path)}: {error.strerror}",
            "make it readable, or list it in .cavvyignore",
        ) from error


_decode = Decoder(dict[str, list[FolderEntry]]).decode


class _NotWritten(Exception):
    """Raised instead of the OSError `error`, which would look like a lost connection."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def download_snapshot(
    client: "ApiClient",
    project: str,
    snapshot: str,
    below: str,
    folder: Path,
    note: Callable[[str], object] = str,
) -> None:
    """Write the files in the folder `below` of a snapshot to `folder`, without its links. `note` is
    called with the path of each that is there. Raises ApiError, also `answer-unknown` if the server
    sends something else, and OSError."""
    start = f"{below.strip('/')}/" if below.strip("/") else ""
    files = [
        (each.path.removeprefix(start), each.sha256, each.size)
        for each in read_snapshot(client, project, snapshot)
        if each.sha256 and each.path.startswith(start)
    ]
    download_files(client, project, files, folder, note)


def read_snapshot(client: "ApiClient", project: str, snapshot: str) -> list[FolderEntry]:
    """Return the entries of a snapshot. Raises ApiError."""
    return _decode(read_blob(client, project, snapshot))["files"]


def read_blob(client: "ApiClient", project: str, name: str) -> bytes:
    """Return a small blob. Raises ApiError."""
    data = client.call("GET", _blob(project, name), wait_s=_WAIT_S).body
    if sha256(data).hexdigest() != name:
        raise _make_fault(f"other bytes as the blob {name}")
    return data


def has_file(folder: Path, path: str, digest: str) -> bool:
    """Return whether the folder has this file with these bytes, and not through a link."""
    try:
        with Landing(folder) as landing, landing.inside(path) as (parent, name):
            return _has(name, digest, parent)
    except LandingRefused:
        return False


def _has(name: str, digest: str, folder: int) -> bool:
    with suppress(OSError), _open(name, os.O_RDONLY, folder) as file:
        is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        return is_plain and file_digest(file, "sha256").hexdigest() == digest
    return False


def download_files(
    client: "ApiClient",
    project: str,
    files: Iterable[tuple[str, str, int]],
    folder: Path,
    note: Callable[[str], object] = str,
) -> int:
    """Write files, given by their paths, SHA-256 and sizes, to `folder`, and return how many of
    them were not there yet. `note` is called with the path of each that is there. A download that
    was cut goes on where it ended. Below `folder`, nothing is written through links. Raises
    ApiError, also `answer-unknown` if the server sends something else, LandingRefused and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Landing(folder) as landing:
        count = 0
        for name, digest, size in files:
            count += _download(client, project, digest, size, landing, name)
            note(name)
        return count


def _download(
    client: "ApiClient", project: str, digest: str, size: int, landing: Landing, path: str
) -> bool:
    """Write a blob to `path`, unless it is there, and return whether it was not. What an earlier
    download left is checked with all the rest, and fetched once more if the hash is wrong."""
    with landing.inside(path, make=True) as (parent, name):
        if _has(name, digest, parent):
            return False
        part = f".{digest[:16]}.part"
        for _ in range(2):
            with _open(part, os.O_RDWR | os.O_CREAT, parent) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", part)
                resumed = bool(os.fstat(file.fileno()).st_size)
                _receive(client, _blob(project, digest), size, file.fileno())
                file.seek(0)
                found = file_digest(file, "sha256").hexdigest()
            if found == digest:
                os.replace(part, name, src_dir_fd=parent, dst_dir_fd=parent)
                return True
            os.unlink(part, dir_fd=parent)
            if not resumed:
                break
    raise _make_fault(f"other bytes as the blob {digest}")


def _open(name: str, flags: int, folder: int) -> FileIO:
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    mode = "r+b" if flags & os.O_RDWR else "rb"
    return FileIO(os.open(name, flags | more, 0o666, dir_fd=folder), mode)


def _receive(client: "ApiClient", target: str, size: int, file: int) -> None:
    whole = False

    def take(status: int, piece: bytes) -> None:
        nonlocal whole
        try:
            if status == 200 and not whole:  # the server sends the file from its begin
                whole = True
                os.truncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
            while piece:
                piece = piece[os.write(file, piece) :]
        except OSError as error:
            raise _NotWritten(error) from error

    def send() -> "HttpAnswer":
        nonlocal whole
        whole, have = False, os.lseek(file, 0, os.SEEK_END)
        headers = {"Range": f"bytes={have}-"} if have else {}
        return client.send("GET", target, headers=headers, wait_s=_WAIT_S, take=take)

    try:
        if size > os.lseek(file, 0, os.SEEK_END):
            client.repeat(send)
    except _NotWritten as stopped:
        raise stopped.error from None


def _blob(project: str, name: str) -> str:
    return f"{project_path(project)}/blobs/{name}"


def _make_fault(what: str) -> ApiError:
    return ApiError("answer-unknown", f"the server sent {what}")
