"""Signing keys of users for published models: a key is made here, and what it signs is checked and
signed here, so that the server never has it. The lists are those of The Update Framework (TUF),
which the server keeps (`repository.py`). This needs the packages of the extra `edge`.

A list is changed by the smallest change of the newest one: its version is one higher, and it names
what was asked for, too. Devices check the result, and the server checks it before it stores it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cavvy.client.errors import ApiError
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from cavvy.client.client import ApiClient

# For how long what a user signs is valid: no program renews it, and a list that has expired
# stops updates. The server renews a timestamp, which is valid for 7 days.
VALID = timedelta(days=730)
_ROOT_VALID = timedelta(days=3650)
_OF_MODEL = "model-"
_SERVER = ("snapshot", "timestamp")
_OWNER = ("root", "targets")


_REMIND = timedelta(days=60)  # before what a user has signed expires


def list_expiring(client: ApiClient, project: str, now: datetime) -> list[str]:
    """Return a sentence about each list of a project that a user has signed and that expires soon,
    or has. A project without models has none. Raises ApiError."""
    from cavvy.capabilities.models.wire import read_signed_lists

    try:
        found = read_signed_lists(client, project)
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise
    told = []
    for role in sorted(found.lists.keys() - {*found.held, *_SERVER}):
        signed = json.loads(found.lists[role])["signed"]
        expires = datetime.fromisoformat(signed["expires"].replace("Z", "+00:00"))
        if expires - now < _REMIND:
            state = "has expired, so updates stop" if expires <= now else "expires"
            told.append(
                f"the list {role} of project {project}, which a user signed, {state} "
                f"({expires:%Y-%m-%d}); sign it again: cavvy model key renew --key FILE "
                f"--project {project}"
            )
    return told


class KeyRefused(Exception):
    """Raised if a key or a list cannot be used. The second argument says what to do."""


class SigningKey:
    """A private key. `key_id` is that of TUF, a SHA-256 of the public key."""

    def __init__(self, signer: CryptoSigner) -> None:
        self.signer = signer
        self.key_id = str(signer.public_key.keyid)


def make_key(path: Path, passphrase: str) -> SigningKey:
    """Write a new Ed25519 key to a file that only its user can read, encrypted if there is a
    passphrase. Raises KeyRefused, OSError."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
    )

    signer = _load().CryptoSigner.generate_ed25519()
    locked: KeySerializationEncryption = NoEncryption()
    if passphrase:
        locked = BestAvailableEncryption(passphrase.encode())
    text = signer._private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyRefused(f"{path} exists, and no key is replaced", "name a new file") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return SigningKey(signer)


def read_key(path: Path, ask: Callable[[], str]) -> SigningKey:
    """Return the key of a file. `ask` returns its passphrase, if it has one. Raises KeyRefused."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    tuf = _load()
    try:
        if path.stat().st_mode & 0o077:
            raise KeyRefused(f"other users can read the key {path}", f"chmod 600 {path}")
        text = path.read_bytes()
        try:
            key = load_pem_private_key(text, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(text, ask().encode())
    except OSError as error:
        raise KeyRefused(
            f"the key {path} cannot be read: {error.strerror}",
            f"make one: cavvy model key new {path}",
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyRefused(
            f"the key {path} cannot be used: {error}",
            "is it a private key, and the passphrase right?",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyRefused(f"the key {path} is no Ed25519 key", f"cavvy model key new {path}.new")
    return SigningKey(tuf.CryptoSigner(key))


class ListChange:
    """The newest lists of a project, and what is changed in them. `lists` and `keys` of `result`
    are what the server is to take: signed lists, and private keys for its own roles."""

    def __init__(self, lists: Mapping[str, str], held: Iterable[str]) -> None:
        self._tuf, self._held = _load(), frozenset(held)
        try:
            self._lists = {
                role: self._tuf.Metadata.from_bytes(text.encode()) for role, text in lists.items()
            }
            self._root, self._targets = self._lists["root"], self._lists["targets"]
        except (self._tuf.RepositoryError, KeyError) as error:
            raise KeyRefused(f"the lists of the server are not valid: {error}", "") from error
        self._changed: dict[str, Any] = {}
        self._keys: dict[str, str] = {}

    def result(self) -> tuple[dict[str, str], dict[str, str]]:
        texts = {role: str(each.to_bytes(), "utf-8") for role, each in self._changed.items()}
        return texts, self._keys

    def key_of(self, role: str) -> str:
        """Return the ID of the key of a role, or "" if there is no such role."""
        found = (self._root.signed.roles if role in (*_OWNER, *_SERVER) else self._roles()).get(
            role
        )
        return found.keyids[0] if found is not None else ""

    def describe(self) -> list[tuple[str, str, str, datetime | None, int]]:
        """Return for each role its name, its key's ID, who has the key (server or user), when its
        list expires (None for what the server renews), and how many versions the list names."""
        rows = []
        for role in (*_OWNER, *_SERVER, *sorted(self._roles())):
            known = self._lists.get(role)
            server = role in self._held
            targets = getattr(getattr(known, "signed", None), "targets", {})
            expires = None if server or known is None else known.signed.expires
            rows.append(
                (role, self.key_of(role), "server" if server else "user", expires, len(targets))
            )
        return rows

    def versions_of(self, model: str) -> list[str]:
        """Return the versions that the list of a model names."""
        known = self._lists.get(f"{_OF_MODEL}{model}")
        paths = known.signed.targets if known is not None else ()
        return sorted((_version(each) for each in paths), key=lambda name: (len(name), name))

    def set_key(self, model: str, key: SigningKey | None, owner: SigningKey | None) -> None:
        """Name the key of a model, or a new one for the server if it is None, and sign the list of
        its versions. Raises KeyRefused."""
        role = f"{_OF_MODEL}{model}"
        self._sign_as("targets", owner)
        targets = self._change("targets", VALID)
        signer = self._signer_of(role, key)
        if targets.signed.delegations is None:
            targets.signed.delegations = self._tuf.Delegations({}, {})
        roles = targets.signed.delegations.roles
        if role in roles:
            for each in list(roles[role].keyids):
                targets.signed.revoke_key(each, role)
        else:
            roles[role] = self._tuf.DelegatedRole(
                role, [], threshold=1, terminating=True, paths=[f"{model}/*"]
            )
        targets.signed.add_key(signer.public_key, role)
        self._sign_again("targets", owner)
        if role not in self._lists:
            empty = self._tuf.Targets(expires=datetime.now(UTC))
            empty.version = 0  # before the first one
            self._lists[role] = self._tuf.Metadata(empty)
        self._change(role, VALID).sign(signer)

    def sign_version(self, model: str, path: str, manifest: bytes, key: SigningKey) -> None:
        """Add a version to the list of a model. Raises KeyRefused."""
        role = f"{_OF_MODEL}{model}"
        self._verify(role, key)
        self._check_manifest(model, path, manifest)
        made = self._change(role, VALID)
        made.signed.targets[path] = self._tuf.TargetFile.from_data(path, manifest, ["sha256"])
        made.sign(key.signer)

    def take_keys(self, key: SigningKey, former: SigningKey | None) -> None:
        """Let a user's key sign the lists root and targets, and give the server new keys for all
        that it signs. Raises KeyRefused."""
        for owned in _OWNER:
            self._sign_as(owned, former)
        root = self._change("root", _ROOT_VALID)
        for role in (*_OWNER, *_SERVER):
            for each in list(root.signed.roles[role].keyids):
                root.signed.revoke_key(each, role)
            signer = self._signer_of(role, key if role in _OWNER else None)
            root.signed.add_key(signer.public_key, role)
        targets = self._change("targets", VALID)
        for role in sorted(self._roles()):
            if role in self._held:
                for each in list(self._roles()[role].keyids):
                    targets.signed.revoke_key(each, role)
                signer = self._signer_of(role, None)
                targets.signed.add_key(signer.public_key, role)
                self._change(role, VALID).sign(signer)
        targets.sign(key.signer)
        for each in (former, key):
            if each is not None:
                root.sign(each.signer, append=True)

    def renew(self, key: SigningKey) -> list[str]:
        """Sign all lists of a key again. Return their roles."""
        mine = [
            each for each in (*_OWNER, *sorted(self._roles())) if self.key_of(each) == key.key_id
        ]
        for role in mine:
            self._verify(role, key)
            self._change(role, _ROOT_VALID if role == "root" else VALID).sign(key.signer)
        return mine

    def _roles(self) -> Mapping[str, Any]:
        delegations = self._targets.signed.delegations
        return {} if delegations is None else delegations.roles or {}

    def _change(self, role: str, valid: timedelta) -> Any:
        """Return the next version of a list, without signatures."""
        if role not in self._changed:
            metadata = self._lists[role]
            metadata.signed.version += 1
            metadata.signed.expires = (datetime.now(UTC) + valid).replace(microsecond=0)
            metadata.signatures.clear()
            self._changed[role] = metadata
        return self._changed[role]

    def _sign_as(self, role: str, key: SigningKey | None) -> None:
        """Check who signs a list, before it is changed: the server, or the user who has its key.
        Raises KeyRefused."""
        if key is None:
            if role not in self._held:
                option = "--owner" if role == "targets" else "--former"
                raise KeyRefused(
                    f"the list {role} is signed with the key {self.key_of(role)[:16]} of its owner",
                    f"add {option} FILE",
                )
            return
        if role in self._held and key.key_id != self.key_of(role):
            raise KeyRefused(f"the server signs the list {role}, and not this key", "leave it out")
        self._verify(role, key)

    def _sign_again(self, role: str, key: SigningKey | None) -> None:
        if role not in self._held and key is not None:
            self._changed[role].sign(key.signer)

    def check_key(self, role: str, key: SigningKey) -> None:
        """Raise KeyRefused unless a key is that of a role."""
        wanted = self.key_of(role)
        if wanted != key.key_id:
            model = role.removeprefix(_OF_MODEL)
            told = f"is signed with the key {wanted[:16]}" if wanted else "has no key"
            raise KeyRefused(
                f"{model} {told}, and this is {key.key_id[:16]}",
                "`cavvy model key list` lists the keys",
            )

    def _verify(self, role: str, key: SigningKey) -> None:
        """Check that the newest list is one that this key has signed: the server may have changed
        it, and may call a key of its own by the ID of this one. Raises KeyRefused."""
        self.check_key(role, key)
        known = self._lists[role]
        try:
            key.signer.public_key.verify_signature(known.signatures[key.key_id], known.signed_bytes)
        except (self._tuf.UnverifiedSignatureError, KeyError, ValueError) as error:
            raise KeyRefused(
                f"the list of {role} that the server sent is not genuine", ""
            ) from error

    def _signer_of(self, role: str, key: SigningKey | None) -> CryptoSigner:
        """Return the signer of a key, or of a new one for the server."""
        if key is not None:
            return key.signer
        made: CryptoSigner = self._tuf.CryptoSigner.generate_ed25519()
        self._keys[role] = str(made.private_bytes, "utf-8")
        return made

    @staticmethod
    def _check_manifest(model: str, path: str, manifest: bytes) -> None:
        try:
            told = json.loads(manifest)
            named = told["model"], f"{model}/{told['number']}.json"
        except (ValueError, KeyError, TypeError) as error:
            raise KeyRefused(
                f"the server's description of {path} is not valid: {error}", ""
            ) from error
        if named != (model, path):
            raise KeyRefused(f"the server sent the description of another version than {path}", "")


def check_files(manifest: bytes, files: Mapping[str, str], main: str = "") -> None:
    """Compare a version with the SHA-256 of a user's files, by path. Raises KeyRefused."""
    told = json.loads(manifest)
    named = {each["path"]: each["sha256"] for each in told["files"]}
    for path in sorted(named.keys() | files.keys()):
        if named.get(path) != files.get(path):
            raise KeyRefused(
                f"the version on the server has another file {path} than yours, and is not signed",
                "if you have not changed them since, the server is not to be trusted",
            )
    if main and told["main"] != main:
        raise KeyRefused(f"the version serves {told['main']} instead of {main}", "")


def _version(path: str) -> str:
    model, _, number = path.removesuffix(".json").rpartition("/")
    return f"{model}@{number}"


def _load() -> Any:
    from types import SimpleNamespace

    try:
        from securesystemslib.exceptions import UnverifiedSignatureError
        from securesystemslib.signer import CryptoSigner
        from tuf.api import exceptions, metadata
    except ImportError as error:
        raise KeyRefused(
            "signing needs packages that are missing", extra_command("edge")
        ) from error
    return SimpleNamespace(
        **{
            each: getattr(metadata, each)
            for each in ("Metadata", "Targets", "TargetFile", "Delegations", "DelegatedRole")
        },
        RepositoryError=exceptions.RepositoryError,
        UnverifiedSignatureError=UnverifiedSignatureError,
        CryptoSigner=CryptoSigner,
    )
