"""The signed list of a project's published models, as The Update Framework (TUF, version 1.0.33 of
its specification) defines it: devices accept only what it names, no older list than one that they
have seen, and no list that has expired.

A target is the manifest of a model version (`MODEL/NUMBER.json`), which names the SHA-256 of each
of the model's files. The role `root` names the keys of the other roles; `targets` names the key of
each model, which signs the manifests of this model only, so a key that is stolen signs no other
model; `snapshot` and `timestamp` say which list is the newest. The needed packages are in the extra
`edge`, which is loaded when a model is first published.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cavvy.domain.edge import ModelRepository
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
_OF_MODEL = "model-"  # the role of a model is this and its name
_KEPT = 3  # former versions of a file, which a device may be reading


class RepositoryMissing(Exception):
    """Raised if the packages of the extra `edge` are not installed."""


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
    keys, among them that of the target's model."""
    tuf = _load()
    model, signers = path.partition("/")[0], dict(_read_signers(tuf, private))
    role, lists = f"{_OF_MODEL}{model}", dict[str, Any]()
    if role in signers:
        lists[role] = _read_newest(tuf, repository.files, role).signed
        lists[role].version += 1
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
    for role in _list_targets(private):
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
    signed with the former root's key, by which devices follow it, and with its own."""
    tuf = _load()
    former = _read_signers(tuf, private)
    signers = {role: tuf.CryptoSigner.generate_ed25519() for role in private}
    root = _read_newest(tuf, repository.files, "root")
    root.signed.version += 1
    root.signed.expires = _expire("root", now)
    lists = {
        role: _read_newest(tuf, repository.files, role).signed for role in _list_targets(private)
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
    roles = _list_targets(signers)
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


def _list_targets(roles: Iterable[str]) -> list[str]:
    """Return the roles that sign targets."""
    return ["targets", *sorted(role for role in roles if role.startswith(_OF_MODEL))]


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
        from tuf.api import metadata
    except ImportError as error:
        raise RepositoryMissing(
            f"the server has no package to sign models: {extra_command('edge')}"
        ) from error
    return SimpleNamespace(
        Metadata=metadata.Metadata,
        Root=metadata.Root,
        Targets=metadata.Targets,
        Snapshot=metadata.Snapshot,
        Timestamp=metadata.Timestamp,
        TargetFile=metadata.TargetFile,
        Delegations=metadata.Delegations,
        DelegatedRole=metadata.DelegatedRole,
        MetaFile=metadata.MetaFile,
        CryptoSigner=CryptoSigner,
    )
