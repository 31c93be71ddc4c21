"""The format of an encrypted file: a header, followed by blocks that are encrypted one by one with
AES-256-GCM, so that any part can be read and bytes can be appended.

The header contains the ID of the data key and a random salt; the file's own key is derived from the
data key, the salt and the file's name. Each block has a random nonce and is bound to its number and
to the name of the file, so blocks and files cannot be exchanged. Only the last block of a file can
be shorter than the others. When bytes are appended, the last block is written again at the same
position with a new nonce. The end of a file is not protected: a program that can write to the
folder can cut off whole blocks. The hash of a blob is checked when the blob is used.
"""

import os
import secrets
import struct
from collections.abc import Callable

from cavvy.domain.values import Struct
from cavvy.store.base import KeyUnusable, StoreUnusable
from cavvy.store.keys import NONCE_BYTES

ID_BYTES = 16
_HEADER = struct.Struct(f">8s{ID_BYTES}s32s")
_MAGIC = b"cavvyef1"
_TAG_BYTES = 16
_EXTRA = NONCE_BYTES + _TAG_BYTES
_TRIES = 20  # reads of a block that may be written at the same time


class FileKey(Struct, frozen=True):
    """A data key of a project. Each file has its own key, which is derived from the data key."""

    id: bytes
    material: bytes


class BlockLayout(Struct, frozen=True):
    """The positions of the blocks in a file. `first` is the position of the first block, and
    `stored` is the stored size of a whole block, both in bytes.
    """

    first: int
    stored: int

    @property
    def plain(self) -> int:
        """The number of plain bytes in one block."""
        return self.stored - _EXTRA

    def size(self, stored: int) -> int:
        """Return the number of plain bytes in a file of `stored` bytes."""
        whole, rest = divmod(max(0, stored - self.first), self.stored)
        return whole * self.plain + max(0, rest - _EXTRA)


BLOBS = BlockLayout(first=_HEADER.size, stored=1 << 16)
# A block fills one page. A process that is killed while it writes a block again cannot leave a part
# of it, because Linux copies a page to its cache as a whole.
LOGS = BlockLayout(first=1 << 12, stored=1 << 12)


class EncryptedFile:
    """An open encrypted file. The caller closes `fd`. Several threads may read the file; only
    one thread may append.
    """

    def __init__(self, fd: int, layout: BlockLayout, key: FileKey, salt: bytes, name: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._fd, self._layout, self._name = fd, layout, name
        self._cipher = AESGCM(_derive(key.material, salt, name))

    @property
    def size(self) -> int:
        return self._layout.size(os.fstat(self._fd).st_size)

    def read(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on. Raises StoreUnusable, OSError."""
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        first, last = offset // self._layout.plain, (end - 1) // self._layout.plain
        data = b"".join(self._open_block(number) for number in range(first, last + 1))
        start = first * self._layout.plain
        return data[offset - start : end - start]

    def append(self, data: bytes) -> None:
        """Append bytes to the file. If the write fails, the file is unchanged. Raises OSError, or
        StoreUnusable if the last block cannot be read.
        """
        size, plain = self.size, self._layout.plain
        number, kept = divmod(size, plain)
        old = self._stored_block(number) if kept else b""
        data = self._decrypt(number, old) + data if kept else data
        try:
            for at in range(0, len(data), plain):
                block = self._encrypt(number + at // plain, data[at : at + plain])
                _write_all(self._fd, block, self._place(number + at // plain))
        except OSError:
            _write_all(self._fd, old, self._place(number))
            os.ftruncate(self._fd, self._place(number) + len(old))
            raise

    def _open_block(self, number: int) -> bytes:
        """Read a block; another thread or process may be writing the last block again."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._decrypt(number, self._stored_block(number))
            except StoreUnusable:
                if not tries_left:
                    raise
                os.sched_yield()
        raise AssertionError("unreachable")

    def _place(self, number: int) -> int:
        return self._layout.first + number * self._layout.stored

    def _stored_block(self, number: int) -> bytes:
        return os.pread(self._fd, self._layout.stored, self._place(number))

    def _encrypt(self, number: int, data: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, number.to_bytes(8, "big"))

    def _decrypt(self, number: int, block: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        nonce, text = block[:NONCE_BYTES], block[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, text, number.to_bytes(8, "big"))
        except (InvalidTag, ValueError) as error:
            raise KeyUnusable(
                f"block {number} of the encrypted file {self._name} is damaged; restore the file "
                "from a backup"
            ) from error


def create_encrypted(fd: int, layout: BlockLayout, key: FileKey, name: str) -> EncryptedFile:
    """Write the header of a new file. Raises OSError."""
    salt = secrets.token_bytes(32)
    _write_all(fd, _HEADER.pack(_MAGIC, key.id, salt), 0)
    os.ftruncate(fd, layout.first)
    return EncryptedFile(fd, layout, key, salt, name)


def open_encrypted(
    fd: int, layout: BlockLayout, find: Callable[[bytes], FileKey], name: str
) -> EncryptedFile:
    """Read the header of a file. Raises StoreUnusable, OSError."""
    head = os.pread(fd, _HEADER.size, 0)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise KeyUnusable(
            f"the encrypted file {name} has a damaged header; restore the file from a backup"
        )
    _, key_id, salt = _HEADER.unpack(head)
    try:
        key = find(key_id)
    except StoreUnusable as error:
        raise KeyUnusable(f"the encrypted file {name} cannot be read: {error}") from error
    return EncryptedFile(fd, layout, key, salt, name)


def _derive(material: bytes, salt: bytes, name: str) -> bytes:
    """Return the key of one file: HKDF (RFC 5869) with the file's salt and name."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"cavvy file " + name.encode()
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(material)


def _write_all(fd: int, data: bytes, place: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], place + written)
