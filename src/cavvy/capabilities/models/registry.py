"""The published models of projects: numbered versions, their labels, and the signed lists that name
them (`repository.py`). Raises ModelRefused, a subclass of JobServiceError, if a model cannot be
published or rolled out.
"""

import asyncio
import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from cavvy.capabilities.models.nouns import (
    MOST_LABELS,
    ModelFile,
    ModelRepository,
    ModelVersion,
    find_labels,
)
from cavvy.capabilities.models.repository import (
    OF_MODEL,
    ListRefused,
    RepositoryMissing,
    SignedElsewhere,
    accept,
    add_target,
    list_signed,
    list_targets,
    make_repository,
    must_renew,
    newest_lists,
    renew,
    rotate,
)
from cavvy.capabilities.models.rows import SqlModels
from cavvy.capabilities.models.tensors import split_files
from cavvy.control.agents.model_folder import read_entries
from cavvy.control.clock import ControlClock
from cavvy.control.job_service import JobServiceError
from cavvy.domain.values import asdict, replace
from cavvy.spec.workdir import FolderEntry
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.blobs import BlobStore
from cavvy.store.secrets import SecretSealer

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TRIES = 10  # tries of a write that fails because a row was changed meanwhile
_LONGEST_CHAIN = 40  # links that lead to links, as Linux permits
_Signed = tuple[ModelRepository, Mapping[str, str]]  # lists, and the private keys of the server
_KEYS = "edge-models"  # the name to which the sealed private keys are bound


class ModelRefused(JobServiceError):
    """Raised if a model cannot be published or rolled out."""


@runtime_checkable
class ModelUser(Protocol):
    """What brings models somewhere, such as to devices: a reconciler of another capability, which
    the registry asks.
    """

    async def add_files(
        self, model: ModelVersion, known: Sequence[ModelVersion], blobs: BlobStore
    ) -> ModelVersion:
        """Return a version that is published with what must be stored beside its files."""
        ...

    def models_changed(self, project: str) -> None:
        """Learn that models of a project, or their labels, have changed."""
        ...


class ModelRegistry:
    """The published models. `list_users` returns who is asked."""

    def __init__(
        self,
        rows: SqlModels,
        clock: ControlClock,
        list_users: Callable[[], Sequence[ModelUser]] = tuple,
    ) -> None:
        self._rows, self._clock, self._list_users = rows, clock, list_users

    def _changed(self, project: str) -> None:
        for each in self._list_users():
            each.models_changed(project)

    async def models(self, projects: ProjectFilter) -> Sequence[ModelVersion]:
        return await self._rows.models.list(projects)

    async def publish(
        self, model: ModelVersion, sealer: SecretSealer, blobs: BlobStore
    ) -> ModelVersion:
        """Store and sign the next version of a model; the number in its name is ignored. Raises
        ModelRefused."""
        base = model.model
        if _NAME.fullmatch(base) is None:
            raise ModelRefused(
                f"the name {base!r} must have 1 to 63 characters of a-z, 0-9 and -, and no - at "
                "either end"
            )
        if model.main not in {each.path for each in model.files}:
            files = ", ".join(sorted(each.path for each in model.files)[:4])
            raise ModelRefused(f"the model has no file {model.main}; it has {files}")
        models = await self.models(model.project)
        for each in self._list_users():
            model = await each.add_files(model, models, blobs)
        await asyncio.to_thread(split_files, blobs, model)
        return await self.add(model, sealer)

    async def add(self, model: ModelVersion, sealer: SecretSealer) -> ModelVersion:
        """Store and sign a version with the next number. Raises ModelRefused."""
        base = model.model
        for _ in range(_TRIES):
            known = [each for each in await self.models(model.project) if each.model == base]
            number = max((each.number for each in known), default=0) + 1
            with suppress(StaleVersion):
                stored = await self._rows.models.put(
                    replace(model, name=f"{base}@{number}", version=0)
                )
                await self._sign(stored, sealer)
                self._changed(model.project)
                return stored
        raise StaleVersion(f"model {base} kept changing during the request; try again")

    async def promote(
        self, project: str, base: str, label: str, number: int
    ) -> tuple[ModelVersion, ModelVersion | None]:
        """Move a label to a version of a model. Return it, and the version that had the label.
        Raises RowNotFound, ModelRefused."""
        if _NAME.fullmatch(label) is None or label.isdecimal():
            raise ModelRefused(
                f"the label {label!r} must have 1 to 63 characters of a-z, 0-9 and -, no - at "
                "either end, and not only digits"
            )
        for _ in range(_TRIES):
            version = await self._rows.models.get(project, f"{base}@{number}")
            await self.check_signed(version)
            known = [each for each in await self.models(project) if each.model == base]
            holders = {key[2]: each for key, each in find_labels(known).items()}
            holder = holders.get(label)
            if holder is not None and holder.name == version.name:
                return version, holder
            if holder is None and len(holders) >= MOST_LABELS:
                told = ", ".join(sorted(holders))
                raise ModelRefused(
                    f"{base} has {MOST_LABELS} labels, the most possible: {told}",
                    f"remove one: cavvy model unlabel {base}@LABEL",
                )
            moved = 1 + max((each.labels.get(label, 0) for each in known), default=0)
            with suppress(StaleVersion):
                labels = {**version.labels, label: moved}
                stored = await self._rows.models.put(replace(version, labels=labels))
                self._changed(project)
                return stored, holder
        raise StaleVersion(f"model {base}@{number} kept changing during the request; try again")

    async def unlabel(self, project: str, base: str, label: str) -> ModelVersion:
        """Take a label from a model, and return the version that had it. Raises RowNotFound."""
        for _ in range(_TRIES):
            holder = await self.find_labelled(project, base, label)
            known = [each for each in await self.models(project) if each.model == base]
            # The holder comes last: until then, no version that had the label before has it again.
            with suppress(StaleVersion):
                for each in sorted(known, key=lambda one: one.labels.get(label, 0)):
                    if label in each.labels:
                        labels = {name: n for name, n in each.labels.items() if name != label}
                        await self._rows.models.put(replace(each, labels=labels))
                self._changed(project)
                return holder
        raise StaleVersion(f"model {base}@{label} kept changing during the request; try again")

    async def find_labelled(self, project: str, base: str, label: str) -> ModelVersion:
        """Return the version of a model that has a label. Raises RowNotFound."""
        found = find_labels(await self.models(project)).get((project, base, label))
        if found is None:
            raise RowNotFound(f"project {project} has no model {base}@{label}")
        return found

    @staticmethod
    async def list_files(blobs: BlobStore, snapshot: str, below: str) -> tuple[ModelFile, ...]:
        """Return the files of a snapshot in the folder `below`, with paths relative to it. A link
        stands for the file of the folder to which it leads. Raises RowNotFound, NotManifest,
        ModelRefused."""
        entries = await asyncio.to_thread(read_entries, blobs, snapshot)
        start = f"{below.strip('/')}/" if below.strip("/") else ""
        inside = {each.path: each for each in entries if each.path.startswith(start)}
        found = tuple(
            ModelFile(path=path.removeprefix(start), sha256=file.sha256, size=file.size)
            for path in inside
            if (file := _follow(inside, path, start))
        )
        missing = await asyncio.to_thread(blobs.missing, [each.sha256 for each in found])
        if missing or not found:
            raise RowNotFound("the snapshot has no files, or some were not uploaded")
        return found

    async def repository(self, project: str, sealer: SecretSealer) -> ModelRepository:
        """Return the project's signed lists, signed anew if the signatures have used up half of
        their time. Raises RowNotFound."""
        found = await self._rows.repositories.get(project, "models")
        now = self._clock.now()
        if not must_renew(found, now):
            return found
        private = await asyncio.to_thread(_unseal, sealer, found)
        fresh = await asyncio.to_thread(renew, found, private, now)
        with suppress(StaleVersion):
            return await self._rows.repositories.put(fresh)
        return await self._rows.repositories.get(project, "models")

    async def rotate_keys(self, project: str, sealer: SecretSealer) -> ModelRepository:
        """Give the project's signed lists new keys, or the first ones. Raises ModelRefused."""

        def work(found: ModelRepository | None, private: Mapping[str, str]) -> _Signed:
            now = self._clock.now()
            return rotate(found, private, now) if found else make_repository(project, now)

        return await self._change_lists(project, sealer, work)

    async def read_lists(
        self, project: str, model: str
    ) -> tuple[Mapping[str, str], Sequence[str], Mapping[str, str]]:
        """Return the newest signed lists by role, the roles of which the server has the keys, and
        the manifests of the model's versions that are to be signed, by path. Raises RowNotFound."""
        found = await self.find_repository(project)
        lists = newest_lists(found)
        signed = list_signed(found, model)
        versions = [each for each in await self.models(project) if each.model == model]
        manifests = {
            _target_path(each): make_manifest(each).decode()
            for each in (versions if signed is not None else ())
            if signed is not None and _target_path(each) not in signed
        }
        return lists, sorted(found.keys), manifests

    async def accept_lists(
        self,
        project: str,
        lists: Mapping[str, str],
        keys: Mapping[str, str],
        sealer: SecretSealer,
    ) -> ModelRepository:
        """Replace signed lists, by role, by those that a user has made and signed, and take new
        private keys for roles of the server. Raises RowNotFound, ModelRefused."""
        await self.find_repository(project)
        manifests = {
            _target_path(each): make_manifest(each)
            for each in await self.models(project)
            if f"{OF_MODEL}{each.model}" in lists
        }

        def work(found: ModelRepository | None, private: Mapping[str, str]) -> _Signed:
            assert found is not None  # no repository is ever removed
            return accept(found, private, lists, keys, manifests, self._clock.now())

        return await self._change_lists(project, sealer, work)

    async def accept_list(
        self, project: str, model: str, signed: str, sealer: SecretSealer
    ) -> ModelRepository:
        """Replace the signed list of a model that has a key of a user. Raises RowNotFound,
        ModelRefused."""
        if list_signed(await self.find_repository(project), model) is None:
            raise ModelRefused(
                f"the model {model} has no key of a user: the server signs its versions",
                f"give it one: cavvy model key set {model} --key FILE",
            )
        return await self.accept_lists(project, {f"{OF_MODEL}{model}": signed}, {}, sealer)

    async def list_unsigned(self, versions: Sequence[ModelVersion]) -> frozenset[tuple[str, str]]:
        """Return the project and name of versions that the key of a user has yet to sign."""
        found = await self._rows.repositories.list(sorted({v.project for v in versions}))
        known = {each.project: each for each in found}
        signed = {
            (each.project, each.model): list_signed(known[each.project], each.model)
            for each in versions
            if each.project in known
        }
        return frozenset(
            (each.project, each.name)
            for each in versions
            if (paths := signed.get((each.project, each.model))) is not None
            and _target_path(each) not in paths
        )

    async def check_signed(self, version: ModelVersion) -> None:
        """Raises ModelRefused."""
        if await self.list_unsigned([version]):
            raise ModelRefused(
                f"{version.name} is not signed by the key of {version.model}",
                f"sign it: cavvy model sign {version.name} --key FILE",
            )

    async def find_repository(self, project: str) -> ModelRepository:
        """Return the project's signed lists. Raises RowNotFound."""
        try:
            return await self._rows.repositories.get(project, "models")
        except RowNotFound:
            reason = f"project {project} has no keys: it has published no model"
            raise RowNotFound(reason) from None

    async def _change_lists(
        self,
        project: str,
        sealer: SecretSealer,
        work: Callable[[ModelRepository | None, Mapping[str, str]], _Signed],
    ) -> ModelRepository:
        """Store what `work` makes of the signed lists and of the server's private keys. Raises
        ModelRefused."""
        for _ in range(_TRIES):
            found, private = None, dict[str, str]()
            with suppress(RowNotFound):
                found = await self._rows.repositories.get(project, "models")
                private = dict(await asyncio.to_thread(_unseal, sealer, found))
            try:
                fresh, kept = await asyncio.to_thread(work, found, private)
            except SignedElsewhere as error:
                raise ModelRefused(
                    str(error),
                    "its owner replaces the keys: cavvy model key take --key FILE --former FILE",
                ) from error
            except (ListRefused, RepositoryMissing) as error:
                raise ModelRefused(str(error)) from error
            changed = {role: pem for role, pem in kept.items() if private.get(role) != pem}
            sealed = await asyncio.to_thread(_seal, sealer, fresh, changed)
            old = {} if found is None else found.keys
            keys = {role: sealed.get(role) or old[role] for role in kept}
            with suppress(StaleVersion):
                return await self._rows.repositories.put(replace(fresh, keys=keys))
        raise StaleVersion("the signed lists kept changing during the request; try again")

    async def complete(self, model: ModelVersion, sealer: SecretSealer) -> None:
        """Sign a stored version that a crash has left without the server's signature. Raises
        ModelRefused."""
        with suppress(RowNotFound):
            found = await self._rows.repositories.get(model.project, "models")
            if _target_path(model) in list_targets(found, model.model):
                return
        await self._sign(model, sealer)

    async def _sign(self, model: ModelVersion, sealer: SecretSealer) -> None:
        """Name a version in the signed list of its model, unless the key of a user is to sign it.
        Raises ModelRefused."""
        now, manifest, path = self._clock.now(), make_manifest(model), _target_path(model)
        custom = {"residency": model.residency, "bytes": model.size}

        def work(found: ModelRepository | None, private: Mapping[str, str]) -> _Signed:
            if found is None:
                found, private = make_repository(model.project, now)
            try:
                return add_target(found, private, path, manifest, custom, now)
            except SignedElsewhere as error:
                if error.role != "targets":
                    return found, private
                raise ListRefused(
                    f"the server cannot name the new model {model.model}: it does not have the key "
                    "of the list targets, with which its owner names the model first: "
                    f"cavvy model key set {model.model} --key FILE --owner FILE"
                ) from error

        try:
            await self._change_lists(model.project, sealer, work)
        except (ModelRefused, StaleVersion) as error:
            await self._rows.models.delete(model)
            raise ModelRefused(str(error)) from error


def _follow(inside: Mapping[str, FolderEntry], path: str, start: str) -> FolderEntry:
    """Return the file to which a path leads. Raises ModelRefused for a link to something else."""
    file = inside[path]
    for _ in range(_LONGEST_CHAIN):
        if file.link is None:
            return file
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file.path), file.link))
        if target not in inside:
            break
        file = inside[target]
    raise ModelRefused(
        f"{path.removeprefix(start)} is a link to {inside[path].link}, which is no file of the "
        "model; put a copy of the file that is meant in its place, or remove the link"
    )


def choose_main(files: Sequence[ModelFile]) -> str:
    """Return the file to serve if there is only one. Raises ModelRefused."""
    served = [each.path for each in files if each.path.endswith(".onnx")]
    if len(served) == 1:
        return served[0]
    told = ", ".join(sorted(each.path for each in files)[:4]) or "no files"
    raise ModelRefused(
        f"the model has {len(served)} .onnx files among {told}; one is needed",
        "name the file to serve: --main PATH",
    )


def make_manifest(model: ModelVersion) -> bytes:
    """Return the signed description of a model version, whose hash the repository names."""
    files = [
        {"path": each.path, "sha256": each.sha256, "size": each.size}
        | ({"deltas": [asdict(delta) for delta in each.deltas]} if each.deltas else {})
        for each in model.files
    ]
    told = {"model": model.model, "number": model.number, "main": model.main, "files": files}
    return json.dumps(told, sort_keys=True).encode()


def _target_path(model: ModelVersion) -> str:
    return f"{model.model}/{model.number}.json"


def _seal(
    sealer: SecretSealer, repository: ModelRepository, private: Mapping[str, str]
) -> Mapping[str, str]:
    return {
        role: sealer.seal(repository.project, f"{_KEYS}/{role}", text).hex()
        for role, text in private.items()
    }


def _unseal(sealer: SecretSealer, repository: ModelRepository) -> Mapping[str, str]:
    return {
        role: sealer.unseal(repository.project, f"{_KEYS}/{role}", bytes.fromhex(sealed))
        for role, sealed in repository.keys.items()
    }
