"""The objects that routes use, opened once when the server starts.

Serves files that any node may download by hash without a token: the agent, a Python runtime and
the host supervisor. The served files contain no secrets.
"""

import hashlib
import os
import time
from asyncio import Lock, to_thread
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from cavvy.api.execs import JobExecs
from cavvy.api.hook_limits import HookLimits
from cavvy.api.id_tokens import IdTokenVerifier
from cavvy.api.images.pinned import ImageVerifier
from cavvy.api.notifier import ChangeNotifier
from cavvy.api.peers import PeerServers
from cavvy.api.project_credentials import ProjectCredentials
from cavvy.api.tokens import GangTokens
from cavvy.client.state import write_private
from cavvy.control.clock import read_machine_time
from cavvy.control.control_plane import ControlPlane
from cavvy.control.share import WorkShare
from cavvy.domain.jobs import Order
from cavvy.domain.values import Struct, field
from cavvy.settings import Settings
from cavvy.store.base import StoreUnusable
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.logs import LogStore
from cavvy.store.objects.base import ObjectTryAgain
from cavvy.store.secrets import SecretSealer
from cavvy.store.sql import Store

P = ParamSpec("P")
T = TypeVar("T")

# seconds for which files of older servers are kept, because booting nodes may still need them
_KEPT_S = 60 * 24 * 3600.0


class NodeDownloads:
    """A folder of files named by the SHA-256 of their contents. With a bucket, nodes can download
    the files of all servers from any server.
    """

    def __init__(self, folder: Path, bucket: BucketFolder | None = None) -> None:
        self._folder, self._bucket = folder, bucket
        self._known: set[str] = set()

    def put(self, content: bytes) -> str:
        """Start to serve this file, and return its hash. Raises OSError."""
        name = hashlib.sha256(content).hexdigest()
        if name not in self._known:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._drop_old()
            path = self._folder / name
            if path.exists() and path.stat().st_size == len(content):
                os.utime(path)
            else:
                write_private(str(path), content)
            if self._bucket is not None and self._bucket.find(name) is None:
                self._bucket.put(name, content)
            self._known.add(name)
        return name

    def find(self, name: str) -> Path | None:
        """Return the path of the file with this hash, or None if no such file is served. Blocks."""
        path = self._folder / name
        if len(name) != 64 or not name.isalnum():
            return None
        if self._bucket is not None:
            self._bucket.fetch(path)
        return path if path.is_file() else None

    def _drop_old(self) -> None:
        oldest = time.time() - _KEPT_S
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # the draft of a file that another thread has written
                if path.name not in self._known and path.stat().st_mtime < oldest:
                    path.unlink()


class AppState(Struct, kw_only=True):
    """The objects that the routes use. `on_network` is true if the state folder is on a network
    file system, which may be slow.
    """

    store: Store
    control_plane: ControlPlane
    logs: LogStore | BucketLogs
    blobs: ProjectBlobs
    sealer: SecretSealer
    file_keys: FileKeys
    credentials: ProjectCredentials
    id_tokens: IdTokenVerifier = field(default_factory=IdTokenVerifier)
    images: ImageVerifier = field(default_factory=ImageVerifier)
    tokens: GangTokens
    execs: JobExecs
    peers: PeerServers
    watch: ChangeNotifier
    settings: Settings
    now: Callable[[], datetime]
    # differs from `now` after the machine's clock was set back
    machine_now: Callable[[], datetime] = field(default=read_machine_time)
    address: str
    started_at: datetime
    stop: Callable[[], None] = field(default=lambda: None)  # a function that stops the server
    database: str = ""  # kind of store, e.g. "sqlite"
    share: WorkShare | None = None  # None if this is the only server
    on_network: bool = False
    downloads: NodeDownloads | None = None  # None if nodes outside this machine cannot connect
    node_endpoint: str | None = None  # the address that nodes outside this machine use
    # SHA-256 of this address's certificate, and the hash of its public key as curl wants it
    node_pins: tuple[str, str] = ("", "")
    listen: str | None = None  # the address for users; None: only the Unix socket
    idle_s: Callable[[], float] = field(default=lambda: 0.0)
    # returns the calls in threads of the server that have not ended in time
    long_threads: Callable[[], list[str]] = field(default=list)
    snapshots: set[tuple[str, str]] = field(
        default_factory=set
    )  # (project, hash) of the working-folder snapshots whose blobs are known to be complete
    job_names: dict[str, str] = field(default_factory=dict)  # by id, for metrics
    hook_limits: HookLimits = field(default_factory=HookLimits)
    # held while a thread parses a long task file; parallel threads would parse no faster
    parsing: Lock = field(default_factory=Lock)
    # Held while a user's waiting jobs are counted and new ones are stored, by user.
    submitting: WeakValueDictionary[str, Lock] = field(default_factory=WeakValueDictionary)
    # number of waiting order requests, keyed by gang
    polling: Counter[str] = field(default_factory=Counter)

    async def use_logs(
        self, quick: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation on logs. The operation runs in a thread, or directly if it is quick and
        the logs are on a disk of this machine. Raises StoreUnusable if the bucket of the logs does
        not answer.
        """
        if self.logs.threads is not None:
            try:
                return await self.logs.threads.run(call, *args, **kwargs)
            except ObjectTryAgain as error:
                raise StoreUnusable(f"the bucket of the logs: {error}") from error
        if self.on_network or not quick:
            return await to_thread(call, *args, **kwargs)
        return call(*args, **kwargs)

    async def wait_order(self, gang: str, rank: int, after: int, seconds: float) -> Order | None:
        """Wait for the next order to a rank. Returns None early if the server stops."""
        with self.poll(gang, seconds) as wait:
            if not wait:
                return await self.control_plane.agents.order(gang, rank, after)
            return await self.control_plane.agents.wait_order(gang, rank, after, wait)

    @contextmanager
    def poll(self, gang: str, seconds: float) -> Iterator[timedelta]:
        """Give how long a request of an agent may wait, and let `close_polls` wake it."""
        self.polling[gang] += 1
        try:
            yield timedelta(seconds=0 if self.watch.closed else seconds)
        finally:
            self.polling[gang] -= 1
            if not self.polling[gang]:
                del self.polling[gang]

    def close_polls(self) -> None:
        """End all long polls. The server calls this method when it stops."""
        self.watch.close()
        self.end_order_polls()

    def end_order_polls(self) -> None:
        """End the long polls of agents on this server. The agents poll again."""
        for gang in list(self.polling):
            self.control_plane.agents.wake(gang)


def app_state_of(request: Request) -> AppState:
    """Return the application state of the server that handles a request."""
    app_state = request.app.state.app_state
    assert isinstance(app_state, AppState)
    return app_state
