"""Downloads the files of a snapshot or of a model version, and checks their hashes."""

import os
from collections.abc import Iterable
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.json import Decoder

from cavvy.client.errors import ApiError
from cavvy.client.paths import project_path
from cavvy.spec.workdir import FolderEntry

if TYPE_CHECKING:
    from cavvy.client.client import ApiClient
    from cavvy.client.transport import HttpAnswer

_WAIT_S = 270.0  # seconds that the server may need to send a large blob
_decode = Decoder(dict[str, list[FolderEntry]]).decode


class _NotWritten(Exception):
    """Raised instead of the OSError `error`, which would look like a lost connection."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def download_snapshot(
    client: "ApiClient", project: str, snapshot: str, below: str, folder: Path
) -> None:
    """Write the files in the folder `below` of a snapshot to `folder`, without its links. Raises
    ApiError, also `answer-unknown` if the server sends something else, and OSError."""
    start = f"{below.strip('/')}/" if below.strip("/") else ""
    files = [
        (each.path.removeprefix(start), each.sha256, each.size)
        for each in read_snapshot(client, project, snapshot)
        if each.sha256 and each.path.startswith(start)
    ]
    download_files(client, project, files, folder)


def read_snapshot(client: "ApiClient", project: str, snapshot: str) -> list[FolderEntry]:
    """Return the entries of a snapshot. Raises ApiError."""
    data = client.call("GET", _blob(project, snapshot), wait_s=_WAIT_S).body
    if sha256(data).hexdigest() != snapshot:
        raise _make_fault(f"other bytes as the blob {snapshot}")
    return _decode(data)["files"]


def download_files(
    client: "ApiClient", project: str, files: Iterable[tuple[str, str, int]], folder: Path
) -> int:
    """Write files, given by their paths, SHA-256 and sizes, to `folder`, and return how many of
    them were not there yet. A download that was cut goes on where it ended. Raises ApiError, also
    `answer-unknown` if the server sends something else, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    fetched = 0
    for name, digest, size in files:
        path = folder / name
        if folder.resolve() not in path.resolve().parents:
            raise _make_fault(f"the path {name!r}, which leads out of the folder")
        if path.is_file() and _hash(path) == digest:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(client, project, digest, size, path)
        fetched += 1
    return fetched


def _download(client: "ApiClient", project: str, digest: str, size: int, path: Path) -> None:
    """Write a blob to `path`. What an earlier download left is checked with all the rest, and
    fetched once more if the hash is wrong."""
    part = path.with_name(f".{digest[:16]}.part")
    for resumed in (part.exists(), False):
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            _receive(client, _blob(project, digest), size, file.fileno())
        if _hash(part) == digest:
            part.replace(path)
            return
        part.unlink()
        if not resumed:
            break
    raise _make_fault(f"other bytes as the blob {digest}")


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


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _make_fault(what: str) -> ApiError:
    return ApiError("answer-unknown", f"the server sent {what}")
