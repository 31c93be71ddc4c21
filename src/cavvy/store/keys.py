"""The keys that encrypt data keys.

Each secret is encrypted with its own data key. The data key is stored with the secret, encrypted
with a key that is stored outside the database: a key in a file, in a variable of the server's
environment, or in AWS KMS. If the key that encrypts the data keys changes, only the data keys must
be encrypted again, not the secrets.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from cavvy.domain.values import Struct
from cavvy.packages import extra_command
from cavvy.store.base import KeyUnusable, StoreFull
from cavvy.store.locks import FileLocks

KEY_BYTES = 32  # AES-256
# AES-GCM uses a nonce of this length directly, and would hash any other: NIST SP 800-38D 5.2.1.1
NONCE_BYTES = 12
_BOUND_TO = b"cavvy data key"
# AWS KMS decrypts a value only with the context with which it was encrypted, and shows the context
# in AWS's own log.
_CONTEXT = {"application": "cavvy"}
_KMS_WAIT_S = 5  # seconds to connect to AWS KMS, and to wait for its answer
# https://docs.aws.amazon.com/kms/latest/developerguide/concepts.html#key-id-key-ARN
_KMS_KEY = re.compile(r"arn:aws[a-z-]*:kms:([a-z0-9-]+):\d{12}:key/[A-Za-z0-9-]+")
KEY_PLACES = (
    "expected file:PATH, env:NAME, or aws-kms: followed by the ARN of a key, such as "
    "aws-kms:arn:aws:kms:eu-west-1:123456789012:key/UUID"
)


class KeyPlaceInvalid(ValueError):
    """Raised if the text is not a valid location of a key. KEY_PLACES describes the valid
    locations."""


class WrappingKey(Protocol):
    """A key that encrypts data keys. The key's methods raise StoreUnusable."""

    @property
    def id(self) -> str:
        """The ID of this key, in ASCII. The ID is stored with each data key that this key has
        encrypted.
        """

    @property
    def place(self) -> str:
        """The location of the key, for messages."""

    def wrap(self, data_key: bytes) -> bytes: ...
    def unwrap(self, wrapped: bytes) -> bytes: ...


class AesKey(Struct, frozen=True):
    """A key for AES-256-GCM in the memory of this process. The key's ID is a hash of the key, so
    the same key in another location has the same ID.
    """

    material: bytes
    place: str

    @property
    def id(self) -> str:
        return f"aes-{sha256(b'cavvy key id ' + self.material).hexdigest()[:16]}"

    def wrap(self, data_key: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + AESGCM(self.material).encrypt(nonce, data_key, _BOUND_TO)

    def unwrap(self, wrapped: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce, text = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
        try:
            return AESGCM(self.material).decrypt(nonce, text, _BOUND_TO)
        except (InvalidTag, ValueError) as error:
            raise KeyUnusable("the data key is damaged") from error


class AwsKmsKey:
    """A symmetric key that never leaves AWS KMS. The server needs the actions kms:Encrypt and
    kms:Decrypt for the key, and credentials that boto3 can find.
    """

    def __init__(self, arn: str) -> None:
        found = _KMS_KEY.fullmatch(arn)
        if found is None:
            raise KeyPlaceInvalid(f"{arn!r} is not the ARN of a key in AWS KMS")
        self._arn, self._region = arn, found[1]

    @property
    def id(self) -> str:
        return f"aws-kms:{self._arn}"

    @property
    def place(self) -> str:
        return self.id

    def wrap(self, data_key: bytes) -> bytes:
        return bytes(self._ask("encrypt", Plaintext=data_key)["CiphertextBlob"])

    def unwrap(self, wrapped: bytes) -> bytes:
        return bytes(self._ask("decrypt", CiphertextBlob=wrapped)["Plaintext"])

    def _ask(self, operation: str, **parameters: object) -> dict[str, Any]:
        call, errors = getattr(self._client, operation), import_module("botocore.exceptions")
        try:
            answer: dict[str, Any] = call(KeyId=self._arn, EncryptionContext=_CONTEXT, **parameters)
        except (errors.BotoCoreError, errors.ClientError) as error:
            raise KeyUnusable(f"AWS KMS did not {operation} a data key: {error}") from error
        return answer

    @cached_property
    def _client(self) -> Any:
        try:
            session = import_module("boto3.session").Session(region_name=self._region)
            make_config = import_module("botocore.config").Config
        except ImportError as error:
            raise KeyUnusable(
                f"keys in AWS KMS need boto3, which is not installed: {extra_command('aws')}"
            ) from error
        limits = make_config(
            connect_timeout=_KMS_WAIT_S, read_timeout=_KMS_WAIT_S, retries={"max_attempts": 3}
        )
        return session.client("kms", config=limits)


class KeyRing:
    """The keys of a server: one for encryption, and others that are used only for decryption.

    `current` and `former` are the locations of the keys. If `current` is empty, the key is the file
    `folder_key`, which is created at the first use; former versions of the key are stored next to
    this file. Raises KeyPlaceInvalid.
    """

    def __init__(
        self,
        folder_key: Path,
        current: str = "",
        former: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._folder_key = folder_key
        self._environment = environment
        self._kms = {place: _find_kms(place) for place in (current, *former)}
        self._given, self._former = current, tuple(former)
        self._exists = False  # whether this process has used the key in the state folder

    @property
    def renewable(self) -> bool:
        """Whether `renew` can create a new key."""
        return not self._given

    def current(self) -> WrappingKey:
        """Return the current key, which encrypts new data keys. Raises StoreUnusable if the key
        cannot be read, and StoreFull if the key cannot be created.
        """
        if self._given:
            return self._open(self._given)
        return self._read_folder_key()

    def all(self) -> Iterator[WrappingKey]:
        """Yield all keys, the current key first. Raises StoreUnusable for a key that cannot be
        read."""
        yield self.current()
        yield from map(self._open, self._former)
        if self._given:
            with suppress(FileNotFoundError):
                yield _load(self._folder_key)
        for path in sorted(self._folder_key.parent.glob(f"{self._folder_key.name}.aes-*")):
            yield _load(path)

    def find(self, key_id: str) -> WrappingKey:
        """Return the key with this ID. Raises StoreUnusable if no such key exists."""
        for key in self.all():
            if key.id == key_id:
                return key
        raise KeyUnusable(
            f"the key {key_id}, which encrypted the data, is not among the server's keys; restore "
            "the key, or name its location in the setting secrets.former_keys (files.former_keys "
            "for files)"
        )

    def renew(self) -> WrappingKey:
        """Copy the old key to a file named by the old key's ID, and then replace the key file in
        the state folder with a new key. After a crash between the copy and the replacement, the old
        key is still in use.
        """
        assert self.renewable
        self._read_folder_key()  # the key exists from now on
        path = self._folder_key
        with explain_key_errors(path), FileLocks(path.with_name(".locks")).hold("key"):
            old = _load(path)  # another server may just have renewed it
            with suppress(FileExistsError):
                os.link(path, path.with_name(f"{path.name}.{old.id}"))
            flush_path(path.parent)
            part = _write_part(path)
            os.replace(part, path)
            flush_path(path.parent)
            return _load(path)

    def _read_folder_key(self) -> AesKey:
        """Read the key file again at each use, because another server that shares the folder may
        have renewed the key. A key that has vanished, for example because the folder is not
        mounted, is not replaced by a new key.
        """
        with explain_key_errors(self._folder_key):
            try:
                key = _load(self._folder_key)
            except FileNotFoundError:
                if self._exists:
                    raise
                key = _make(self._folder_key)
        self._exists = True
        return key

    def _open(self, place: str) -> WrappingKey:
        kms = self._kms[place]
        if kms is not None:
            return kms
        kind, _, where = place.partition(":")
        if kind == "env":
            return _read_variable(where, self._environment.get(where, ""))
        path = Path(where).expanduser()
        with explain_key_errors(path):
            return _load(path)


def _find_kms(place: str) -> AwsKmsKey | None:
    """Check that `place` is "" or a valid location of a key. Return the key if the location is in
    AWS KMS, and None otherwise. Raises KeyPlaceInvalid.
    """
    kind, colon, where = place.partition(":")
    if place and (not colon or not where or kind not in ("file", "env", "aws-kms")):
        raise KeyPlaceInvalid(f"{place!r} is not the location of a key")
    return AwsKmsKey(where) if kind == "aws-kms" else None


def _read_variable(name: str, text: str) -> AesKey:
    from base64 import b64decode

    try:
        material = b64decode(text, validate=True)
    except ValueError:
        material = b""
    if len(material) != KEY_BYTES:
        raise KeyUnusable(
            f"the variable {name} of the server is not a key of {KEY_BYTES} bytes in base64; "
            "create a key with `openssl rand -base64 32`"
        )
    return AesKey(material, f"env:{name}")


class explain_key_errors:  # a context manager
    """Raises StoreFull or StoreUnusable for an OSError about the key `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space to write {self._path}; free some disk space") from error
        raise KeyUnusable(f"cannot read the key {self._path}: {error.strerror}") from error


def _load(path: Path) -> AesKey:
    """Raises OSError, StoreUnusable."""
    with open(path, "rb") as file:
        mode, key = os.fstat(file.fileno()).st_mode, file.read(KEY_BYTES + 1)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyUnusable(
            f"other users can read the key {path}; run: chmod 600 {path}, and change the secrets "
            "that are encrypted with it"
        )
    if len(key) != KEY_BYTES:
        raise KeyUnusable(
            f"{path} is not a key of {KEY_BYTES} bytes; restore the right file, or delete this "
            "file to create a new key"
        )
    return AesKey(key, f"file:{path}")


def _make(path: Path) -> AesKey:
    """Create the key file atomically. If two processes create the key file at the same time, both
    use the key that was created first.
    """
    part = _write_part(path)
    try:
        with suppress(FileExistsError):
            # unlike a rename, this fails if another process has created the file first
            os.link(part, path)
        flush_path(path.parent)
    finally:
        part.unlink(missing_ok=True)
    return _load(path)


def _write_part(path: Path) -> Path:
    """Write a new key to a file next to `path`."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(
            os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return part


def flush_path(path: Path) -> None:
    """Flush a closed file, or a folder's entries, to the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
