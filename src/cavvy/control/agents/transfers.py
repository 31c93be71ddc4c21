"""Signs requests for inputs, outputs and checkpoint files, so that agents need no credentials.

Until its attempt ends, an agent can request the transfers that its gang's task names, and no other
transfers. Each signed request covers one object and is valid for 15 minutes; after that, the agent
asks for a new signed request.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from cavvy.control.clock import ControlClock
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.targets import EVERY
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, view
from cavvy.store.base import RowNotFound
from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectReader,
    ObjectSigner,
    ObjectTryAgain,
    RelayedObjects,
    SignedRequest,
    part_bytes,
)
from cavvy.store.objects.base import ObjectInfo as Object
from cavvy.store.objects.http import SignedStorage, ask, check
from cavvy.store.objects.hub import HubRepository
from cavvy.store.objects.locations import (
    KEYS,
    FoundRegions,
    ObjectLocation,
    find_regions,
    find_sizes,
    merge_keys,
    open_place,
)
from cavvy.store.objects.threads import in_thread
from cavvy.store.sql import Store

SIGNED_S = 900
RELAY_BYTES = 8 * 1024 * 1024  # maximum bytes of one relayed answer
_KNOWN = 256  # maximum number of storages that are kept open
_HUB_PAGE = 100  # files of a page of the Hub, which is asked for each signed request


class InputFile(Struct, frozen=True, kw_only=True):
    """One file of an input; its path is "" if the input is a single object. If `signed` is None,
    the control plane relays the file.
    """

    path: str
    size: int | None
    tag: str = ""
    md5: str = ""
    sha256: str = ""
    signed: SignedRequest | None = None


class InputPage(Struct, frozen=True, kw_only=True):
    """One page of the list of an input's files. Pass `next` to get the next page; `next` is "" on
    the last page.
    """

    files: Sequence[InputFile]
    next: str = ""


class TransferUpload(Struct, frozen=True, kw_only=True):
    """Describes how to upload one file in parts of `part_bytes` bytes. Each part has its own signed
    request, or is sent through the control plane if `relay` is set.
    """

    upload: str  # "" if the whole file is sent in one request
    part_bytes: int
    relay: bool = False


class SignedObjects:
    """Gives access to the objects below one URL. Paths are relative to the URL; the path "" stands
    for an object at exactly this URL. Methods block on the network and raise ObjectError. `url` is
    the URL in the task, from which the server can open the storage again.
    """

    def __init__(self, place: ObjectReader, key: str, url: str = "") -> None:
        self.place, self.url, self._key = place, url, key

    @property
    def bills_parts(self) -> bool:
        """Whether the storage keeps and bills the parts of an upload until the upload is completed
        or aborted."""
        return isinstance(self.place, ObjectBucket) and self.place.bills_parts

    def page(self, after: str) -> InputPage:
        """List the object at exactly this URL or, if there is none, all objects below the URL."""
        place, key = self.place, self._key
        if not after and key and not key.endswith("/"):
            one = place.head(key)
            if one is not None:
                return InputPage(files=[_file(place, one, "")])
        prefix = key if key.endswith("/") or not key else key + "/"
        if isinstance(place, HubRepository):
            objects, following = place.list(prefix, after, _HUB_PAGE)
            place.sign_all([each.key for each in objects])
        else:
            objects, following = place.list(prefix, after)
        if not objects and not after:
            raise ObjectMissing(f"no object exists at {key or 'this URL'}")
        files = [
            _file(place, each, each.key[len(prefix) :])
            for each in objects
            if not each.key.endswith("/")
        ]
        return InputPage(files=files, next=following)

    def sign_get(self, path: str = "") -> SignedRequest:
        """Sign a new request for one file."""
        if not isinstance(self.place, ObjectSigner):
            raise ObjectDenied("this storage can only be read through the control plane")
        signed = self.place.sign_get(self.key(path), SIGNED_S)
        if signed is None:
            raise ObjectDenied("this file can only be read through the control plane")
        return signed

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Read some bytes of a file for a node that cannot reach the storage."""
        return self.place.get(self.key(path), offset, min(length, RELAY_BYTES))

    def begin(self, path: str, size: int) -> TransferUpload:
        if not isinstance(self.place, ObjectBucket):
            return TransferUpload(upload="", part_bytes=RELAY_BYTES, relay=True)
        part = part_bytes(size)
        upload = self.place.begin(self.key(path)) if size > part else ""
        return TransferUpload(upload=upload, part_bytes=part)

    def sign_part(self, path: str, upload: str, part: int) -> SignedRequest:
        return self._bucket.sign_put(self.key(path), SIGNED_S, upload, part)

    def complete(self, path: str, upload: str, tags: Sequence[str], size: int) -> None:
        """Complete the upload of a file. Raises ObjectTryAgain if the stored file does not have
        `size` bytes.
        """
        bucket, key = self._bucket, self.key(path)
        if upload:
            bucket.complete(key, upload, tags)
        made = bucket.head(key)
        if made is None or made.size != size:
            there = "nothing" if made is None else f"{made.size} bytes"
            raise ObjectTryAgain(f"{key}: {size} bytes were sent, but {there} arrived")

    def abort(self, path: str, upload: str) -> None:
        """Request that the storage deletes the parts of an upload."""
        if upload:
            self._bucket.abort(self.key(path), upload)

    def write(self, path: str, offset: int, size: int, data: bytes) -> None:
        """Write some bytes of a file for a node that cannot reach the storage."""
        if isinstance(self.place, RelayedObjects):
            self.place.write(self.key(path), offset, data, size)
        elif offset == 0 and len(data) == size:
            self._bucket.put(self.key(path), data)
        else:
            raise ObjectDenied(
                "this storage accepts multipart uploads only from the node, but the node cannot "
                "connect to the storage"
            )

    def store(
        self, path: str, size: int, read: Callable[[int, int], bytes], how: TransferUpload
    ) -> None:
        """Upload a whole file. `read(offset, length)` returns the file's bytes; `how` is the upload
        that `begin` returned. If the upload fails, it is aborted.
        """
        tags = []
        try:
            for part, at in enumerate(range(0, max(size, 1), how.part_bytes), 1):
                data = read(at, min(how.part_bytes, size - at))
                if not how.upload:
                    self.write(path, at, size, data)
                    continue
                signed = self.sign_part(path, how.upload, part)
                targets = self.place.targets if isinstance(self.place, SignedStorage) else EVERY
                sent = ask(signed.method, signed.url, data, signed.headers, targets)
                tags.append(check(sent, self.key(path)).headers.get("etag", "-"))
            if how.upload:
                self.complete(path, how.upload, tags, size)
        except Exception:
            with suppress(ObjectError):
                self.abort(path, how.upload)
            raise

    def key(self, path: str) -> str:
        """Return the key of a file. Raises ObjectDenied for a path outside the URL."""
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ObjectDenied(f"{path!r} is outside the URL that the task names")
        if not path:
            return self._key
        return f"{self._key.rstrip('/')}/{path}" if self._key else path

    @property
    def _bucket(self) -> ObjectBucket:
        if not isinstance(self.place, ObjectBucket):
            raise ObjectDenied("this storage does not accept signed uploads")
        return self.place


# maximum wait of a submission for the regions of buckets, and for the sizes of inputs
REGIONS_S, SIZES_S = 5.0, 5.0


# returns the private targets that users may name
ReadTargets = Callable[[], Awaitable[str]]


async def read_every() -> str:
    """Return that users may name all private targets."""
    return EVERY


class Transfers:
    """Opens the inputs and outputs of jobs. `environment` contains the server's environment
    variables, with storage keys. The secrets of a project take precedence over the environment
    variables. `read_targets` returns the private targets that projects may name."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        open_secrets: Callable[[str, Sequence[str]], Awaitable[dict[str, str]]],
        environment: Mapping[str, str],
        read_targets: ReadTargets = read_every,
    ) -> None:
        self._store, self._clock, self._open_secrets = store, clock, open_secrets
        self._environment, self._read_targets = environment, read_targets
        self._pool: dict[tuple[str, str], SignedObjects] = {}

    async def page(self, gang: str, index: int, after: str) -> InputPage:
        """List files of an input. Raises RowNotFound, ObjectError."""
        found = await self.input(gang, index)
        try:
            return await in_thread(found.page, after)
        except ObjectMissing:
            if await self._is_output_too(gang, index):
                return InputPage(files=())  # the object does not exist yet
            raise

    async def input(self, gang: str, index: int) -> SignedObjects:
        """Return the objects of an input. Raises RowNotFound, ObjectError."""

        def list_sources(task: TaskSpec) -> list[str]:
            if 0 <= index < len(task.inputs) and task.inputs[index].mount is not None:
                raise ObjectDenied("this input is mounted on the node, and an old agent copies it")
            return [each.source for each in task.inputs]

        return await self._open(gang, index, list_sources)

    async def output(self, gang: str, index: int) -> SignedObjects:
        """Return the objects of an output. Raises RowNotFound, ObjectError."""
        return await self._open(gang, index, lambda task: [each.target for each in task.outputs])

    async def open_url(self, project: str, url: str) -> ObjectLocation:
        """Open the store that a URL names, with the project's keys. Raises ObjectDenied."""
        keys = await self.read_keys(project)
        return open_place(url, keys, self._clock.now)

    async def find_regions(self, project: str, urls: Sequence[str]) -> FoundRegions:
        """Find the regions of buckets with the project's keys, within REGIONS_S seconds."""
        keys = await self.read_keys(project)
        return await in_thread(find_regions, urls, keys, self._clock.now, REGIONS_S)

    async def find_sizes(self, project: str, urls: Sequence[str]) -> Mapping[str, int]:
        """Return, by URL, the sizes in MiB of the data in buckets. The buckets are listed with the
        project's keys. URLs that cannot be listed within SIZES_S seconds are omitted.
        """
        keys = await self.read_keys(project)
        found = await in_thread(find_sizes, urls, keys, self._clock.now, SIZES_S)
        return {url: each for url, each in found.items() if isinstance(each, int)}

    async def read_keys(self, project: str) -> Mapping[str, str]:
        """Return the keys and private targets with which a project opens storages."""
        secrets = await self._open_secrets(project, KEYS)
        return merge_keys(self._environment, secrets, await self._read_targets())

    async def _is_output_too(self, gang: str, index: int) -> bool:
        task = (await self._store.job((await self._store.attempt_of_gang(gang)).job_id)).task
        return any(each.target == task.inputs[index].source for each in task.outputs)

    async def _open(
        self, gang: str, index: int, list_ends: Callable[[TaskSpec], Sequence[str]]
    ) -> SignedObjects:
        attempt = await self._store.attempt_of_gang(gang)
        if attempt.phase is AttemptPhase.ENDED:
            raise RowNotFound(f"attempt {attempt.number} has ended")
        job = await self._store.job(attempt.job_id)
        ends = list_ends(job.task)
        if not 0 <= index < len(ends):
            raise RowNotFound(f"the task has no input or output with the number {index}")
        url = ends[index]
        if "://" not in url:
            raise ObjectMissing(f"{url} is no URL")
        known = self._pool.get((attempt.id, url))
        if known is None:
            place = open_place(url, await self.read_keys(job.project), self._clock.now)
            known = SignedObjects(place.place, place.key, url)
            if len(self._pool) >= _KNOWN:
                del self._pool[next(iter(self._pool))]
            self._pool[attempt.id, url] = known
        return known


def _file(place: ObjectReader, found: Object, path: str) -> InputFile:
    signed = place.sign_get(found.key, SIGNED_S) if isinstance(place, ObjectSigner) else None
    return view(InputFile, found, path=path, signed=signed)
