"""Encrypts secrets with a key in a file that only this user can read, so that no database gets the
plain text."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from cavvy.store.base import StoreFull, StoreUnusable

_KEY_BYTES = 32  # AES-256
# AES-GCM uses a nonce of this length directly, and would hash any other: NIST SP 800-38D 5.2.1.1
_NONCE_BYTES = 12
# version of the encrypted form, which consists of version, nonce, and ciphertext with tag
_VERSION = b"\x01"


class SecretSealer:
    """Encrypts values with AES-256-GCM. The key is in the file `path`, which is created at the
    first use. An encrypted value can be decrypted only for the project and name that it was
    encrypted for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: bytes | None = None

    def seal(self, project: str, name: str, plain: str) -> bytes:
        """Encrypt a value. Raises StoreUnusable if the key cannot be read, StoreFull if it cannot
        be created.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        return (
            _VERSION
            + nonce
            + AESGCM(self._read_key()).encrypt(nonce, plain.encode(), _bound_to(project, name))
        )

    def unseal(self, project: str, name: str, sealed: bytes) -> str:
        """Decrypt a value. Raises StoreUnusable if it was encrypted with another key, or for
        another project or name.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce, text = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if sealed[:1] != _VERSION:
                raise InvalidTag
            return AESGCM(self._read_key()).decrypt(nonce, text, _bound_to(project, name)).decode()
        except (InvalidTag, ValueError) as error:
            raise StoreUnusable(
                f"the secret {name} of project {project} cannot be read with the key in "
                f"{self._path}; restore the key that encrypted it, or set the secret again: cavvy "
                f"secret set {name}"
            ) from error

    def _read_key(self) -> bytes:
        if self._key is None:
            try:
                self._key = _load(self._path) or _make(self._path)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreFull(
                        f"no space to write {self._path}; free some disk space"
                    ) from error
                raise StoreUnusable(
                    f"cannot read the key {self._path}: {error.strerror}"
                ) from error
        return self._key


def _bound_to(project: str, name: str) -> bytes:
    """The data that ties an encrypted value to its project and name. It includes their lengths, so
    that project "a" with name "bc" differs from project "ab" with name "c".
    """
    return f"{len(project)}:{project}/{name}".encode()


def _load(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_KEY_BYTES + 1)
    except FileNotFoundError:
        return None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StoreUnusable(
            f"other users can read the key {path}; run: chmod 600 {path}, and change the secrets "
            "that are encrypted with it"
        )
    if len(key) != _KEY_BYTES:
        raise StoreUnusable(
            f"{path} is not a key of {_KEY_BYTES} bytes; restore the right file, or delete it to "
            "create a new key"
        )
    return key


def _make(path: Path) -> bytes:
    """Create the key file in one step. If two processes create it at the same time, both use the
    key that was created first."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(
            os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            # unlike a rename, this fails if another process has created the file first
            os.link(part, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)
    key = _load(path)
    assert key is not None
    return key
