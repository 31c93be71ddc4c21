"""Data transfers: what a gang's inputs hold, and requests for them and for its outputs that need
no credentials.

Only what the gang's own task names can be asked for, and only while its attempt lasts. Each signed
request is for one object and is good for a quarter of an hour; an agent asks for another one when
it has expired.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from cavvy.control.clock import ControlClock
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.tasks import Task
from cavvy.store.base import RowNotFound, Store
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectMissing,
    ObjectReader,
    ObjectSigner,
    ObjectTryAgain,
    RelayedObjects,
    SignedRequest,
    part_bytes,
)
from cavvy.store.objects.base import ObjectInfo as Object
from cavvy.store.objects.locations import KEYS, ObjectLocation, merge_keys, open_place
from cavvy.store.objects.threads import in_thread

SIGNED_S = 900
RELAY_BYTES = 8 * 1024 * 1024  # of one answer that goes through us
_KNOWN = 256  # places that are kept open


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of an input; `path` "" is the input itself. Without `signed` it comes through the
    control plane.
    """

    path: str
    size: int | None
    tag: str = ""
    md5: str = ""
    signed: SignedRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPage:
    """Some of an input's files; ask with `next` for more, "" after the last."""

    files: Sequence[InputFile]
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUpload:
    """How to send one file: in parts of `part_bytes`, each by its own signed request, or through
    us (`relay`).
    """

    upload: str  # "" where the whole file goes in one request
    part_bytes: int
    relay: bool = False


class Transfers:
    """`environment` is the server's own; a project's secrets win over it."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        open_secrets: Callable[[str, Sequence[str]], Awaitable[dict[str, str]]],
        environment: Mapping[str, str],
    ) -> None:
        self._store = store
        self._clock = clock
        self._open_secrets = open_secrets
        self._environment = environment
        self._pool: dict[tuple[str, str], ObjectLocation] = {}

    async def page(self, gang: str, index: int, after: str) -> InputPage:
        """Raises RowNotFound, ObjectError."""
        found = await self._input(gang, index)
        try:
            return await in_thread(_page, found, after)
        except ObjectMissing:
            if await self._is_output_too(gang, index):
                return InputPage(files=())  # nothing has been put there yet
            raise

    async def sign(self, gang: str, index: int, path: str) -> SignedRequest:
        """A fresh request for one file of an input. Raises RowNotFound, ObjectError."""
        found = await self._input(gang, index)
        if not isinstance(found.place, ObjectSigner):
            raise ObjectDenied("what is here comes through the control plane")
        return await in_thread(found.place.sign_get, _key(found, path), SIGNED_S)

    async def read(self, gang: str, index: int, path: str, offset: int, length: int) -> bytes:
        """A piece of an input's file, for a node that does not reach it. Raises RowNotFound,
        ObjectError.
        """
        found = await self._input(gang, index)
        return await in_thread(found.place.get, _key(found, path), offset, min(length, RELAY_BYTES))

    async def begin(self, gang: str, index: int, path: str, size: int) -> TransferUpload:
        """Raises RowNotFound, ObjectError."""
        found = await self._output(gang, index)
        if not isinstance(found.place, ObjectBucket):
            return TransferUpload(upload="", part_bytes=RELAY_BYTES, relay=True)
        part = part_bytes(size)
        upload = await in_thread(found.place.begin, _key(found, path)) if size > part else ""
        return TransferUpload(upload=upload, part_bytes=part)

    async def sign_part(
        self, gang: str, index: int, path: str, upload: str, part: int
    ) -> SignedRequest:
        """Raises RowNotFound, ObjectError."""
        found = await self._output(gang, index)
        bucket = _bucket(found.place)
        return await in_thread(bucket.sign_put, _key(found, path), SIGNED_S, upload, part)

    async def complete(
        self, gang: str, index: int, path: str, upload: str, tags: Sequence[str], size: int
    ) -> None:
        """The file counts now, and is as large as it was. Raises RowNotFound, ObjectError."""
        found = await self._output(gang, index)
        bucket, key = _bucket(found.place), _key(found, path)
        if upload:
            await in_thread(bucket.complete, key, upload, tags)
        made = await in_thread(bucket.head, key)
        if made is None or made.size != size:
            there = "nothing" if made is None else f"{made.size} bytes"
            raise ObjectTryAgain(f"{key}: {size} bytes were sent and {there} arrived")

    async def abort(self, gang: str, index: int, path: str, upload: str) -> None:
        """The storage drops the parts of an upload. Raises RowNotFound, ObjectError."""
        found = await self._output(gang, index)
        if upload:
            await in_thread(_bucket(found.place).abort, _key(found, path), upload)

    async def write(
        self, gang: str, index: int, path: str, offset: int, size: int, data: bytes
    ) -> None:
        """A piece of an output's file, for a place that nodes do not reach. Raises RowNotFound,
        ObjectError.
        """
        found = await self._output(gang, index)
        key = _key(found, path)
        if isinstance(found.place, RelayedObjects):
            await in_thread(found.place.write, key, offset, data, size)
        elif offset == 0 and len(data) == size:
            await in_thread(_bucket(found.place).put, key, data)
        else:
            raise ObjectDenied(
                "a file in pieces goes to this storage directly, and the node does not reach it"
            )

    async def _is_output_too(self, gang: str, index: int) -> bool:
        task = (await self._store.job((await self._store.attempt_of_gang(gang)).job_id)).task
        return any(each.target == task.inputs[index].source for each in task.outputs)

    async def _input(self, gang: str, index: int) -> ObjectLocation:
        return await self._open(gang, index, lambda task: [each.source for each in task.inputs])

    async def _output(self, gang: str, index: int) -> ObjectLocation:
        return await self._open(gang, index, lambda task: [each.target for each in task.outputs])

    async def _open(
        self, gang: str, index: int, list_ends: Callable[[Task], Sequence[str]]
    ) -> ObjectLocation:
        attempt = await self._store.attempt_of_gang(gang)
        if attempt.phase is AttemptPhase.ENDED:
            raise RowNotFound(f"attempt {attempt.number} is over")
        job = await self._store.job(attempt.job_id)
        ends = list_ends(job.task)
        if not 0 <= index < len(ends):
            raise RowNotFound(f"the task has no such transfer {index}")
        url = ends[index]
        if "://" not in url:
            raise ObjectMissing(f"{url} is no URL")
        known = self._pool.get((attempt.id, url))
        if known is None:
            secrets = await self._open_secrets(job.project, KEYS)
            known = open_place(url, merge_keys(self._environment, secrets), self._clock.now)
            if len(self._pool) >= _KNOWN:
                del self._pool[next(iter(self._pool))]
            self._pool[attempt.id, url] = known
        return known


def _page(found: ObjectLocation, after: str) -> InputPage:
    """What a URL means: the object of this name, or else everything below it."""
    place, key = found.place, found.key
    if not after and key and not key.endswith("/"):
        one = place.head(key)
        if one is not None:
            return InputPage(files=[_file(place, one, "")])
    prefix = key if key.endswith("/") or not key else key + "/"
    objects, following = place.list(prefix, after)
    if not objects and not after:
        raise ObjectMissing(f"there is nothing at {key or 'the whole of it'}")
    files = [
        _file(place, each, each.key[len(prefix) :])
        for each in objects
        if not each.key.endswith("/")
    ]
    return InputPage(files=files, next=following)


def _file(place: ObjectReader, found: Object, path: str) -> InputFile:
    signed = place.sign_get(found.key, SIGNED_S) if isinstance(place, ObjectSigner) else None
    return InputFile(path=path, size=found.size, tag=found.tag, md5=found.md5, signed=signed)


def _key(found: ObjectLocation, path: str) -> str:
    """The key of a file below a URL's. Raises ObjectDenied for a path that leaves it."""
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ObjectDenied(f"{path!r} leaves what the task names")
    if not path:
        return found.key
    return f"{found.key.rstrip('/')}/{path}" if found.key else path


def _bucket(place: ObjectReader) -> ObjectBucket:
    if not isinstance(place, ObjectBucket):
        raise ObjectDenied("nothing is written there by signed requests")
    return place
