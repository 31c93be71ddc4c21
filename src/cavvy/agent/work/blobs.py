"""Downloads blobs (files named by the hash of their content) from the control plane. All functions
may block."""

from __future__ import annotations

import hashlib
import json
import os

from ..allowed_folders import check_regular
from ..disk import name_part
from ..http_client import CHUNK, FAULTS, BlockingClient, TransferFailed
from .cache import touch
from .trees import copy_open, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from http.client import HTTPResponse

    from ..config import AgentConfig

SMALL = 256 * 1024  # maximum bytes of a blob that is sent in a pack
# maximum blobs requested together; the answer (a pack) contains as many as fit into 8 MiB
PACK = 2048


class BlobCache:
    """The cache of one machine, shared by its agents: immutable files named by the SHA-256 of their
    content. Every use compares the content with the name, because on some machines the work of
    another job can change the cache.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._line = BlockingClient(config)
        self._folder = config.cache + "/blobs"
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def copy(self, digest: str, target: str, mode: int) -> None:
        """Copy the blob to a new file, and download the blob if the cache does not contain it.
        Waits while the control plane is unavailable. Raises TransferFailed, OSError.
        """
        path = self._path(digest)
        if touch(path) and _copy_checked(path, target, mode, digest):
            return
        remove_tree(path)  # the content is not the blob's
        fetch_to(self._line, digest, path)
        if not _copy_checked(path, target, mode, digest):
            raise TransferFailed(
                f"another process changed the file {path} of Cavvy's cache while it was copied"
            )

    def bring(self, digests: Iterable[str]) -> None:
        """Fetch packs of many small blobs, and store the blobs in the cache. Raises TransferFailed,
        OSError.

        A pack may lack some blobs; `fetch` downloads the missing blobs later. If the control plane
        is too old to send packs, `fetch` downloads all blobs.
        """
        wanted = [digest for digest in dict.fromkeys(digests) if not touch(self._path(digest))]
        while wanted:
            pack = self._fetch_pack(wanted[:PACK])
            if pack is None:
                return
            found = self._keep(pack)
            wanted = (
                [digest for digest in wanted if digest not in found] if found else wanted[PACK:]
            )

    def _fetch_pack(self, digests: list[str]) -> bytes | None:
        """Request some of the blobs as a pack; return None if the control plane is too old to send
        packs. Raises TransferFailed.
        """
        body = json.dumps({"blobs": digests}).encode()
        while True:
            status, data = self._line.exchange("POST", "blobs/pack", body)
            if status == 200:
                return data
            if status in (404, 405):
                return None
            self._line.check(status, "blobs")
            self._line.wait()

    def _keep(self, pack: bytes) -> set[str]:
        """Store a pack's blobs in the cache; return their names. Raises TransferFailed, OSError."""
        found, at = set(), 0
        while at < len(pack):
            line = pack.find(b"\n", at, at + 80)
            name, size = pack[at : at + 64].decode("latin-1"), pack[at + 64 : max(line, 0)]
            if not size.isdigit() or len(pack) - line - 1 < int(size):
                raise TransferFailed(
                    f"the pack of small files from the control plane is incomplete at byte {at}"
                )
            at = line + 1 + int(size)
            data = pack[line + 1 : at]
            check_hash(name, hashlib.sha256(data).hexdigest())
            write_anew(self._path(name), [data])
            found.add(name)
        return found

    def _path(self, digest: str) -> str:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise TransferFailed(f"{digest!r} is not the hash of a file in a working folder")
        return os.path.join(self._folder, digest)


def _copy_checked(path: str, target: str, mode: int, digest: str) -> bool:
    """Copy a file to the new file `target`, and return whether the copy's content has the hash
    `digest`; otherwise, remove the copy. The copy is compared, because the original can change.
    """
    try:
        source = check_regular(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), path)
    except OSError:
        return False
    try:
        copy_open(source, target, mode=0o600)
    finally:
        os.close(source)
    found = hashlib.sha256()
    with open(target, "rb") as file:
        while data := file.read(CHUNK):
            found.update(data)
    if found.hexdigest() != digest:
        os.unlink(target)
        return False
    os.chmod(target, mode)
    return True


def fetch_to(line: BlockingClient, digest: str, path: str) -> None:
    """Download the blob to `path`. Waits while the control plane is unavailable. Raises
    TransferFailed, OSError.
    """
    while True:
        try:
            reply = line.ask("GET", f"blobs/{digest}")
            first = reply.read(CHUNK)
        except FAULTS:
            line.wait()
            continue
        line.check(reply.status, f"the part {digest}")
        if reply.status == 200 and write_anew(path, read_blob(digest, first, reply)):
            return
        line.wait()


def read_blob(digest: str, data: bytes, reply: HTTPResponse) -> Iterator[bytes | None]:
    """Yield the blob's pieces, `data` first. If the connection breaks, the last yielded item is
    None. Raises TransferFailed if the content does not match the hash.
    """
    found = hashlib.sha256()
    while data:
        found.update(data)
        yield data
        try:
            data = reply.read(CHUNK)
        except FAULTS:
            yield None
            return
    check_hash(digest, found.hexdigest())


def check_hash(digest: str, found: str) -> None:
    """Raise TransferFailed if the hash of the received content differs from the blob's name."""
    if found != digest:
        raise TransferFailed(f"the control plane sent wrong data for {digest}: its hash is {found}")


def write_anew(path: str, pieces: Iterable[bytes | None]) -> bool:
    """Write the pieces to `path` atomically and return True. If a piece is None, write no file and
    return False."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, name_part(name, f".{os.getpid()}"))
    remove_tree(temporary)
    try:
        with open(temporary, "xb") as file:
            for data in pieces:
                if data is None:
                    return False
                file.write(data)
        os.replace(temporary, path)
        return True
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
