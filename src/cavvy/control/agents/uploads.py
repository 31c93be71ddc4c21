"""Tracks multipart uploads that agents or the server have started. The server records each upload.
If an upload is not complete when its attempt's work has ended, the server aborts the upload,
because the storage would otherwise keep and bill the uploaded parts.

The records are documents in the store's provider state, with an owner name that no provider has. If
the server is killed just after it starts an upload, the upload has no record.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from urllib.parse import urlsplit

import msgspec

from cavvy.control.agents.transfers import SignedObjects, Transfers, TransferUpload
from cavvy.control.clock import ControlClock
from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.values import Struct
from cavvy.store.base import RowNotFound, StoreError
from cavvy.store.objects.base import ObjectBucket, ObjectError, ObjectMissing, ObjectTryAgain
from cavvy.store.objects.locations import open_place
from cavvy.store.objects.threads import in_thread, in_thread_to_its_end
from cavvy.store.sql import Store

RECORDS_OWNER = "data transfers"  # owner of records about objects; no provider has this name
_COLLECTION = "uploads"
_OVER = (AttemptPhase.KEPT, AttemptPhase.ENDED)


class UnfinishedUpload(msgspec.Struct, frozen=True, kw_only=True):
    """One multipart upload that is neither complete nor aborted. `url` is the URL in the task, from
    which the server opens the storage again; `key` is the object's key in that storage.
    """

    project: str
    job_id: str
    attempt_id: str
    url: str
    key: str
    upload: str


_UNKNOWN = UnfinishedUpload(project="", job_id="", attempt_id="", url="", key="", upload="")


class LeftUpload(Struct, frozen=True, kw_only=True):
    """An unfinished upload whose attempt has ended. `problem` is the reason why the upload could
    not be aborted, or "". If the upload's record cannot be read, all fields of `upload` are "".
    """

    upload: UnfinishedUpload
    aborted: bool = False
    problem: str = ""


class UnfinishedUploads:
    """Starts, completes and aborts uploads, and records the incomplete uploads."""

    def __init__(self, store: Store, clock: ControlClock, transfers: Transfers) -> None:
        self._store, self._clock, self._transfers = store, clock, transfers
        # IDs of the attempts for which this process has recorded uploads
        self._recorded: set[str] = set()

    async def begin(
        self, gang: str, objects: SignedObjects, path: str, size: int
    ) -> TransferUpload:
        """Start the upload of a file and record it. Raises RowNotFound, ObjectError, StoreError."""
        attempt = await self._store.attempt_of_gang(gang)
        too_late = Event()

        def start() -> TransferUpload:
            how = objects.begin(path, size)
            if too_late.is_set():  # the request that started this upload has already failed
                objects.abort(path, how.upload)
            return how

        try:
            how = await in_thread(start)
        finally:
            too_late.set()
        if not how.upload or not objects.bills_parts:
            return how
        record = UnfinishedUpload(
            project=attempt.project,
            job_id=attempt.job_id,
            attempt_id=attempt.id,
            url=objects.url,
            key=objects.key(path),
            upload=how.upload,
        )
        self._recorded.add(attempt.id)
        try:
            await self._store.swap_provider_document(RECORDS_OWNER, _make_document(record, 1))
        except StoreError:
            with suppress(ObjectError):
                await in_thread(objects.abort, path, how.upload)
            raise
        return how

    async def complete(
        self, objects: SignedObjects, path: str, upload: str, tags: Sequence[str], size: int
    ) -> None:
        """Complete the upload of a file. Raises ObjectError."""
        await in_thread(objects.complete, path, upload, tags, size)
        await self._forget_upload(objects, path, upload)

    async def store(
        self,
        gang: str,
        objects: SignedObjects,
        path: str,
        size: int,
        read: Callable[[int, int], bytes],
    ) -> None:
        """Upload a whole file, whose bytes `read(offset, length)` returns. If the upload fails, its
        record is kept, so that `sweep` can abort the upload later. Raises the same errors as
        `begin`.
        """
        how = await self.begin(gang, objects, path, size)
        await in_thread_to_its_end(objects.store, path, size, read, how)
        await self._forget_upload(objects, path, how.upload)

    async def abort(self, objects: SignedObjects, path: str, upload: str) -> None:
        """Request that the storage deletes the parts of an upload. Raises ObjectError."""
        await in_thread(objects.abort, path, upload)
        await self._forget_upload(objects, path, upload)

    def is_recorded(self, attempt_id: str) -> bool:
        """Return whether this process has recorded a possibly unfinished upload of the attempt."""
        return attempt_id in self._recorded

    async def sweep(self, *, remove: bool) -> Sequence[LeftUpload]:
        """Return the unfinished uploads whose attempt has ended or is unknown, and the uploads
        whose record cannot be read. If `remove` is set, uploads whose attempt has ended or is
        unknown are aborted. If a storage does not respond, the other uploads to this storage are
        left for the next call.
        """
        left: list[LeftUpload] = []
        # storages that did not answer, with the reasons
        silent: dict[tuple[str, str, str], str] = {}
        recorded = set(self._recorded)  # attempts may be added while this method waits
        documents = await self._store.provider_documents(RECORDS_OWNER, _COLLECTION)
        found: list[UnfinishedUpload] = []
        for each in documents:
            try:
                found.append(msgspec.json.decode(each.body, type=UnfinishedUpload))
            except msgspec.MsgspecError as error:
                problem = f"the server cannot read its record {each.name}: {error}"
                left.append(LeftUpload(upload=_UNKNOWN, problem=problem))
        for record in found:
            if not await self._is_over(record):
                continue
            problem = await self._try_abort(record, silent) if remove else ""
            left.append(LeftUpload(upload=record, aborted=remove and not problem, problem=problem))
        self._recorded -= recorded - {each.attempt_id for each in found}
        return left

    async def _is_over(self, record: UnfinishedUpload) -> bool:
        try:
            attempts = await self._store.attempts(record.job_id)
        except RowNotFound:
            return True
        phases = [each.phase for each in attempts if each.id == record.attempt_id]
        return not phases or phases[0] in _OVER

    async def _try_abort(
        self, record: UnfinishedUpload, silent: dict[tuple[str, str, str], str]
    ) -> str:
        """Abort an upload. Return why the upload cannot be aborted now, or "". If the storage does
        not respond, the storage is added to `silent`. If `silent` already contains the storage, no
        request is sent.
        """
        where = urlsplit(record.url)
        storage = (record.project, where.scheme, where.netloc)
        if storage in silent:
            return silent[storage]
        try:
            keys = await self._transfers.read_keys(record.project)
            place = (await in_thread(open_place, record.url, keys, self._clock.now)).place
            if isinstance(place, ObjectBucket):
                await in_thread(place.abort, record.key, record.upload)
        except ObjectMissing:
            pass  # the bucket does not exist any more
        except ObjectTryAgain as error:
            silent[storage] = str(error)
            return silent[storage]
        except (ObjectError, StoreError) as error:  # for example, a secret cannot be unsealed
            return str(error)
        await self._forget(record.url, record.key, record.upload)
        return ""

    async def _forget_upload(self, objects: SignedObjects, path: str, upload: str) -> None:
        if upload and objects.bills_parts:  # other uploads have no records
            await self._forget(objects.url, objects.key(path), upload)

    async def _forget(self, url: str, key: str, upload: str) -> None:
        """Delete a record. If the deletion fails, `sweep` aborts the upload again later, which is
        harmless even if the upload no longer exists.
        """
        record = UnfinishedUpload(
            project="", job_id="", attempt_id="", url=url, key=key, upload=upload
        )
        with suppress(StoreError):
            document = _make_document(record, 2)
            await self._store.swap_provider_document(RECORDS_OWNER, document, delete=True)


def _make_document(record: UnfinishedUpload, version: int) -> ProviderDocument:
    """Return the record as a document; the document's name identifies the URL, the key and the
    upload."""
    whole = "\n".join((record.url, record.key, record.upload))
    return ProviderDocument(
        collection=_COLLECTION,
        name=hashlib.sha256(whole.encode()).hexdigest()[:40],
        body=msgspec.json.encode(record).decode(),
        version=version,
    )
