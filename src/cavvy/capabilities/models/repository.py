"""The signed list of a project's published models, as The Update Framework (TUF, version 1.0.33 of
its specification) defines it: devices accept only what it names, no older list than one that they
have seen, and no list that has expired.

A target is the manifest of a model version (`MODEL/NUMBER.json`), which names the SHA-256 of each
of the model's files. The role `root` names the keys of the other roles; `targets` names the key of
each model, which signs the manifests of this model only, so a key that is stolen signs no other
model; `snapshot` and `timestamp` say which list is the newest. The server has the keys of the
latter two, and of those lists whose keys no user has taken over (`accept`). The needed packages are
in the extra `edge`, which is loaded when a model is first published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cavvy.capabilities.models.nouns import ModelRepository
from cavvy.domain.values import replace
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

ROLES = ("root", "targets", "snapshot", "timestamp")
_SIGNED = {  # for how long a signature of each role is valid
    "root": timedelta(days=3650),
    "targets": timedelta(days=365),
    "snapshot": timedelta(days=30),
    "timestamp": timedelta(days=7),
}
OF_MODEL = "model-"  # the role of a model is this and its name
_ROLE = re.compile(f"{OF_MODEL}[a-z0-9.-]{{1,63}}")
_KEPT = 3  # former versions of a file, which a device may be reading


_MOST_ROOT, _MOST_LIST = 512_000, 5_000_000  # bytes that devices take, by tuf's UpdaterConfig
_LEAST_VALID, _MOST_VALID = timedelta(days=1), timedelta(days=3653)  # of a list of a user


class RepositoryMissing(Exception):
    """Raised if the packages of the extra `edge` are not installed."""


class ListRefused(Exception):
    """Raised if a list of a user is not what devices would accept, or changes too much."""


class SignedElsewhere(Exception):
    """Raised if the server does not have the key of a role."""

    def __init__(self, role: str) -> None:
        super().__init__(f"the server does not have the key of the list {role}")
        self.role = role


def make_repository(project: str, now: datetime) -> tuple[ModelRepository, Mapping[str, str]]:
    """Return a repository without targets and keys, and its new private keys, by role, as PEM."""
    tuf = _load()
    signers = {role: tuf.CryptoSigner.generate_ed25519() for role in ROLES}
    root = tuf.Root(expires=_expire("root", now), consistent_snapshot=True)
    for role, signer in signers.items():
        root.add_key(signer.public_key, role)
    files = {"1.root.json": _sign(tuf, root, signers["root"])}
    targets = tuf.Targets(expires=_expire("targets", now))
    files |= _publish(tuf, {"targets": targets}, signers, {}, now)
    private = {role: _to_pem(signer) for role, signer in signers.items()}
    return ModelRepository(project=project, files=files, keys={}), private


def add_target(
    repository: ModelRepository,
    private: Mapping[str, str],
    path: str,
    content: bytes,
    custom: Mapping[str, Any],
    now: datetime,
) -> tuple[ModelRepository, Mapping[str, str]]:
    """Return the repository with one more target, whose file has this content, and the private
    keys, among them that of the target's model. Raises SignedElsewhere."""
    tuf = _load()
    model, signers = path.partition("/")[0], dict(_read_signers(tuf, private))
    role, lists = f"{OF_MODEL}{model}", dict[str, Any]()
    if role not in signers and _versions(repository.files, role):
        raise SignedElsewhere(role)
    if role in signers:
        lists[role] = _read_newest(tuf, repository.files, role).signed
        lists[role].version += 1
    elif "targets" not in signers:
        raise SignedElsewhere("targets")
    else:
        signers[role] = tuf.CryptoSigner.generate_ed25519()
        lists[role] = tuf.Targets(expires=_expire("targets", now))
        targets = _read_newest(tuf, repository.files, "targets").signed
        if targets.delegations is None:
            targets.delegations = tuf.Delegations({}, {})
        targets.delegations.roles[role] = tuf.DelegatedRole(
            role, [], threshold=1, terminating=True, paths=[f"{model}/*"]
        )
        targets.add_key(signers[role].public_key, role)
        targets.version += 1
        lists["targets"] = targets
    target = tuf.TargetFile.from_data(path, content, ["sha256"])
    target.unrecognized_fields["custom"] = dict(custom)
    lists[role].targets[path] = target
    files = _publish(tuf, lists, signers, repository.files, now)
    return replace(repository, files=files), {r: _to_pem(each) for r, each in signers.items()}


def renew(
    repository: ModelRepository, private: Mapping[str, str], now: datetime
) -> ModelRepository:
    """Return the repository with new signatures of the lists that have used up half their time."""
    tuf, lists = _load(), dict[str, Any]()
    for role in _list_targets(repository.files, private):
        signed = _read_newest(tuf, repository.files, role).signed
        if signed.expires - now < _SIGNED["targets"] / 2:
            signed.version += 1
            lists[role] = signed
    files = _publish(tuf, lists, _read_signers(tuf, private), repository.files, now)
    return replace(repository, files=files)


def rotate(
    repository: ModelRepository, private: Mapping[str, str], now: datetime
) -> tuple[ModelRepository, Mapping[str, str]]:
    """Return the repository with new keys of all roles, and the new private keys. The new root is
    signed with the former root's key, by which devices follow it, and with its own. Raises
    SignedElsewhere."""
    tuf = _load()
    if missing := [role for role in ROLES if role not in private]:
        raise SignedElsewhere(missing[0])
    former = _read_signers(tuf, private)
    signers = {role: tuf.CryptoSigner.generate_ed25519() for role in private}
    root = _read_newest(tuf, repository.files, "root")
    root.signed.version += 1
    root.signed.expires = _expire("root", now)
    lists = {
        role: _read_newest(tuf, repository.files, role).signed
        for role in _list_targets(repository.files, private)
    }
    for role, signer in signers.items():
        holder = root.signed if role in ROLES else lists["targets"]
        known = holder.roles[role] if role in ROLES else holder.delegations.roles[role]
        for each in list(known.keyids):
            holder.revoke_key(each, role)
        holder.add_key(signer.public_key, role)
    root.signatures.clear()
    for signer in (former["root"], signers["root"]):
        root.sign(signer, append=True)
    files = {
        **repository.files,
        f"{root.signed.version}.root.json": str(root.to_bytes(), "utf-8"),
    }
    for each in lists.values():
        each.version += 1
    files = dict(_publish(tuf, lists, signers, files, now))
    return replace(repository, files=files), {r: _to_pem(each) for r, each in signers.items()}


def must_renew(repository: ModelRepository, now: datetime) -> bool:
    """Return whether the newest list has used up half of its time."""
    signed = json.loads(repository.files["timestamp.json"])["signed"]
    expires = datetime.fromisoformat(signed["expires"].replace("Z", "+00:00"))
    return expires - now < _SIGNED["timestamp"] / 2


def newest_root(repository: ModelRepository) -> str:
    """Return the newest list of keys, which a device gets when it enrols."""
    return repository.files[f"{max(_versions(repository.files, 'root'))}.root.json"]


def newest_lists(repository: ModelRepository) -> Mapping[str, str]:
    """Return the newest lists of keys and targets, by role."""
    return {
        role: repository.files[f"{max(_versions(repository.files, role))}.{role}.json"]
        for role in ("root", *_list_targets(repository.files))
    }


def list_signed(repository: ModelRepository, model: str) -> frozenset[str] | None:
    """Return the paths of the targets that a user's key has signed for a model, or None if the
    server signs them."""
    role = f"{OF_MODEL}{model}"
    if role in repository.keys or not _versions(repository.files, role):
        return None
    return list_targets(repository, model)


def list_targets(repository: ModelRepository, model: str) -> frozenset[str]:
    """Return the paths of the targets in the list of a model."""
    role = f"{OF_MODEL}{model}"
    if not (versions := _versions(repository.files, role)):
        return frozenset()
    return frozenset(
        json.loads(repository.files[f"{max(versions)}.{role}.json"])["signed"]["targets"]
    )


def accept(
    repository: ModelRepository,
    private: Mapping[str, str],
    uploaded: Mapping[str, str],
    fresh: Mapping[str, str],
    manifests: Mapping[str, bytes],
    now: datetime,
) -> tuple[ModelRepository, Mapping[str, str]]:
    """Return the repository with new lists of a user, by role, and the private keys that the server
    has from now on: those of before and the `fresh` ones that the lists name. The server signs the
    lists whose keys it has, among them a new root with the former root's key. All is then checked
    as a device does. `manifests` are the contents of targets that may be added, by their paths.

    Raises ListRefused.
    """
    tuf = _load()
    try:
        made = _Acceptance(tuf, repository, private, fresh)
        for role, text in uploaded.items():
            made.read(role, text, now)
        made.check_root()
        made.check_targets(manifests)
        kept = made.keep_keys()
    except (tuf.RepositoryError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ListRefused(f"the lists are not valid: {error or type(error).__name__}") from error
    files = dict(repository.files)
    for role, metadata in made.changed.items():
        files[f"{metadata.signed.version}.{role}.json"] = str(metadata.to_bytes(), "utf-8")
    files = dict(_publish(tuf, {}, _read_signers(tuf, kept), files, now))
    return replace(repository, files=files), kept


class _Acceptance:
    """Lists of a user that are checked in the place of those of a repository. The methods raise
    ListRefused, and the errors of a list that is not valid."""

    def __init__(
        self,
        tuf: Any,
        repository: ModelRepository,
        private: Mapping[str, str],
        fresh: Mapping[str, str],
    ) -> None:
        self._tuf, self._files = tuf, repository.files
        signers = [_read_signers(tuf, each) for each in (private, fresh)]
        self._signers = [(role, each) for found in signers for role, each in found.items()]
        self.changed: dict[str, Any] = {}

    def read(self, role: str, text: str, now: datetime) -> None:
        kind = self._tuf.Root if role == "root" else self._tuf.Targets
        if role not in ("root", "targets") and not role.startswith(OF_MODEL):
            raise ListRefused(f"users sign no list of the role {role[:80]!r}")
        if len(text) > (most := _MOST_ROOT if role == "root" else _MOST_LIST):
            raise ListRefused(f"the list of {role} has more than {most:,} bytes")
        metadata = self._tuf.Metadata.from_bytes(text.encode())
        signed = metadata.signed
        former = max(_versions(self._files, role), default=0)
        if not isinstance(signed, kind):
            raise ListRefused(f"the list of {role} has the type {signed.type}")
        if signed.version != former + 1:
            raise ListRefused(
                f"the list of {role} has the version {signed.version}; expected {former + 1}: "
                "another change came first, so try again"
            )
        if not _LEAST_VALID < signed.expires - now <= _MOST_VALID:
            raise ListRefused(f"the list of {role} expires at {signed.expires}")
        self.changed[role] = metadata

    def check_root(self) -> None:
        former = self._read_former("root")
        root = self.changed.get("root")
        if root is None:
            return
        plain = root.signed.consistent_snapshot and root.signed.roles.keys() == {*ROLES}
        if not plain or any(
            each.threshold != 1 or len(each.keyids) != 1 for each in root.signed.roles.values()
        ):
            raise ListRefused("the list root must name one key for each of its four roles")
        for keys in (former.signed, root.signed):
            self._sign(keys, "root", root)
            keys.verify_delegate("root", root.signed_bytes, root.signatures)

    def check_targets(self, manifests: Mapping[str, bytes]) -> None:
        before, targets = self._read_former("targets").signed, self._find("targets")
        self._check(self._find("root").signed, "targets", targets)
        delegations = targets.signed.delegations
        roles = {} if delegations is None else delegations.roles or {}
        known = {} if before.delegations is None else before.delegations.roles
        if targets.signed.targets != before.targets or not known.keys() <= roles.keys():
            raise ListRefused(
                "the list targets may add and change keys of models, and nothing else"
            )
        if unknown := self.changed.keys() - {"root", "targets", *roles}:
            raise ListRefused(f"the list targets does not name {min(unknown)}")
        for role, named in roles.items():
            model = role.removeprefix(OF_MODEL)
            plain = self._tuf.DelegatedRole(
                role, named.keyids, threshold=1, terminating=True, paths=[f"{model}/*"]
            )
            if named != plain or len(named.keyids) != 1 or not _ROLE.fullmatch(role):
                raise ListRefused(f"the role {role[:80]!r} must have one key, for {model[:80]}/*")
            self._check_model(role, manifests)
            self._check(targets.signed, role, self._find(role))

    def _check_model(self, role: str, manifests: Mapping[str, bytes]) -> None:
        """Check that a list names all that it named before, and only what is stored."""
        if role not in self.changed:
            return
        signed = self.changed[role].signed
        former = self._read_former(role).signed.targets if _versions(self._files, role) else {}
        if signed.delegations is not None or not former.items() <= signed.targets.items():
            raise ListRefused(f"the list of {role} lacks a version that it had, or changes one")
        for path in signed.targets.keys() - former.keys():
            if path not in manifests or not path.startswith(f"{role.removeprefix(OF_MODEL)}/"):
                raise ListRefused(f"the list of {role} names {path[:80]!r}, which is not published")
            signed.targets[path].verify_length_and_hashes(manifests[path])

    def keep_keys(self) -> Mapping[str, str]:
        """Return the private keys that are those of roles from now on."""
        held = {role: self._find_signer(self._holder(role), role) for role, _ in self._signers}
        kept = {role: _to_pem(signer) for role, signer in held.items() if signer is not None}
        if not {"snapshot", "timestamp"} <= kept.keys():
            raise ListRefused("the server needs the keys of snapshot and timestamp")
        return kept

    def _holder(self, role: str) -> Any:
        """Return the list that names the key of a role."""
        return self._find("root" if role in ROLES else "targets").signed

    def _find(self, role: str) -> Any:
        return self.changed.get(role) or self._read_former(role)

    def _read_former(self, role: str) -> Any:
        return _read_newest(self._tuf, self._files, role)

    def _check(self, holder: Any, role: str, metadata: Any) -> None:
        if role in self.changed:
            self._sign(holder, role, metadata)
        holder.verify_delegate(role, metadata.signed_bytes, metadata.signatures)

    def _sign(self, holder: Any, role: str, metadata: Any) -> None:
        """Sign a list if the server has the key that `holder` names for it."""
        signer = self._find_signer(holder, role)
        if signer is not None:
            metadata.sign(signer, append=True)

    def _find_signer(self, holder: Any, role: str) -> CryptoSigner | None:
        named = holder.roles if role in ROLES else holder.delegations.roles
        if role not in named:
            raise ListRefused(f"there is no role {role[:80]!r}")
        wanted = (role, named[role].keyids[0])
        found = [s for name, s in self._signers if (name, s.public_key.keyid) == wanted]
        return found[0] if found else None


def _publish(
    tuf: Any,
    lists: Mapping[str, Any],
    signers: Mapping[str, CryptoSigner],
    files: Mapping[str, str],
    now: datetime,
) -> Mapping[str, str]:
    """Sign lists of targets, by role, and a snapshot and a timestamp that name the newest of all
    roles."""
    changed = dict(files)
    for role, signed in lists.items():
        signed.expires = _expire("targets", now)
        changed[f"{signed.version}.{role}.json"] = _sign(tuf, signed, signers[role])
    number = max(_versions(files, "snapshot"), default=0) + 1
    roles = _list_targets(changed)
    snapshot = tuf.Snapshot(
        version=number,
        expires=_expire("snapshot", now),
        meta={
            f"{role}.json": tuf.MetaFile(version=max(_versions(changed, role))) for role in roles
        },
    )
    changed[f"{number}.snapshot.json"] = _sign(tuf, snapshot, signers["snapshot"])
    timestamp = tuf.Timestamp(
        version=number,
        expires=_expire("timestamp", now),
        snapshot_meta=tuf.MetaFile(version=number),
    )
    changed["timestamp.json"] = _sign(tuf, timestamp, signers["timestamp"])
    for role in (*roles, "snapshot"):
        for old in sorted(_versions(changed, role))[:-_KEPT]:
            del changed[f"{old}.{role}.json"]
    return changed


def _list_targets(files: Mapping[str, str], among: Container[str] | None = None) -> list[str]:
    """Return the roles that sign targets, of all or of those `among` others."""
    found = {name.partition(".")[2].removesuffix(".json") for name in files}
    roles = ["targets", *sorted(role for role in found if role.startswith(OF_MODEL))]
    return [role for role in roles if among is None or role in among]


def _sign(tuf: Any, signed: Any, signer: CryptoSigner) -> str:
    metadata = tuf.Metadata(signed)
    metadata.sign(signer)
    return str(metadata.to_bytes(), "utf-8")


def _read_newest(tuf: Any, files: Mapping[str, str], role: str) -> Any:
    newest = max(_versions(files, role))
    return tuf.Metadata.from_bytes(files[f"{newest}.{role}.json"].encode())


def _versions(files: Mapping[str, str], role: str) -> list[int]:
    ending = f".{role}.json"
    numbers = [name[: -len(ending)] for name in files if name.endswith(ending)]
    return [int(each) for each in numbers if each.isdecimal()]


def _expire(role: str, now: datetime) -> datetime:
    return (now + _SIGNED[role]).replace(microsecond=0)


def _to_pem(signer: CryptoSigner) -> str:
    return str(signer.private_bytes, "utf-8")


def _read_signers(tuf: Any, private: Mapping[str, str]) -> Mapping[str, CryptoSigner]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return {
        role: tuf.CryptoSigner(load_pem_private_key(text.encode(), None))
        for role, text in private.items()
    }


def _load() -> Any:
    """Return the functions of the packages that sign. Raises RepositoryMissing."""
    try:
        from securesystemslib.signer import CryptoSigner
        from tuf.api import exceptions, metadata
    except ImportError as error:
        raise RepositoryMissing(
            f"the server has no package to sign models: {extra_command('edge')}"
        ) from error
    signing = {"CryptoSigner": CryptoSigner, "RepositoryError": exceptions.RepositoryError}
    return SimpleNamespace(**vars(metadata), **signing)
