"""Opens the application state of the embedded server and closes it again. The application state
consists of the store, the providers and the control plane of one state folder.
"""

import logging
import os
from asyncio import to_thread
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

from cavvy.agent.bundle import make_archive, make_command
from cavvy.api.app_state import AppState, NodeDownloads
from cavvy.api.execs import JobExecs
from cavvy.api.images.pinned import ImageVerifier
from cavvy.api.notifier import ChangeNotifier
from cavvy.api.peers import PeerServers
from cavvy.api.project_credentials import ProjectCredentials, UsesAccounts
from cavvy.api.tokens import GangTokens, load_tokens
from cavvy.catalog.doubts import OfferJudge
from cavvy.client.state import write_private
from cavvy.control.clock import WallClock
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.parts import FileKeeper
from cavvy.control.share import WorkShare
from cavvy.control.webhooks import post_json
from cavvy.costs.discounts import Discount, parse_discounts
from cavvy.domain.credentials import mark_account, name_account
from cavvy.domain.offers import Offer
from cavvy.domain.retention import AUDIT_SETTING, JOBS_SETTING, RetentionDays
from cavvy.domain.shares import HALF_LIFE_SETTING, MIN_RUN_SETTING
from cavvy.domain.targets import EVERY, read_targets
from cavvy.domain.tasks import ResourceSpec, Scalar
from cavvy.domain.units import Money, UnitError
from cavvy.domain.values import Struct, replace
from cavvy.providers import registry
from cavvy.providers.base import AgentEndpoint, NodeEndpoint, Provider, ProviderContext
from cavvy.server.database import bind_folder
from cavvy.server.node_listener import NodeListener
from cavvy.server.otlp_export import (
    JobTraces,
    LogSender,
    SentLogs,
    open_log_sender,
    open_traces,
    sending,
    sending_server_log,
)
from cavvy.server.parts import ServerParts
from cavvy.server.provider_services import ProviderPeers, StoredProviderState
from cavvy.server.state_dir import StateDir, StateDirError
from cavvy.server.stored_files import FilesPlace, StoredFiles, open_stored_files
from cavvy.settings import Settings, SettingsError
from cavvy.store.base import AtomicWrite
from cavvy.store.blobs import ProjectBlobs
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.channel import AgentContacts, ReplicaChannel
from cavvy.store.keys import KEY_PLACES, KeyPlaceInvalid, KeyRing
from cavvy.store.leases import ReplicaLeases
from cavvy.store.objects.locations import OWN_FILES
from cavvy.store.open import open_store
from cavvy.store.reserve import StopNotes
from cavvy.store.secrets import SecretSealer
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import refreshed_path
from cavvy.store.snapshot.layout import SnapshotError
from cavvy.store.snapshot.reader import find_offers, list_instance, list_prices
from cavvy.store.sql import Store

_FORGOTTEN = timedelta(days=7)  # seconds for which uploaded files that no job uses are kept
_TIDY_EVERY = timedelta(days=1)
_CLOCK = WallClock()
_MOST_INSTANCES = 4096  # maximum number of cached answers about instance types
_log = logging.getLogger(__name__)
Listener = Callable[[AtomicWrite], None]  # gets changes that were written


class NotifyingStore:
    """A store that, after each write to a job, wakes the requests that wait for the job, and passes
    the write on to `listeners`.
    """

    def __init__(self, inner: Store, watch: ChangeNotifier, listeners: Sequence[Listener]) -> None:
        self._inner = inner
        self._watch = watch
        self._listeners = listeners

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def commit(self, changes: AtomicWrite) -> None:
        """See `Store.commit`."""
        await self._inner.commit(changes)
        keys = {job.id for job in changes.jobs}
        keys |= {attempt.job_id for attempt in changes.attempts}
        keys |= {event.job_id for event in changes.events}
        self._watch.wake(*keys)
        for listener in self._listeners:
            listener(changes)


def watched(store: Store, watch: ChangeNotifier, listeners: Sequence[Listener] = ()) -> Store:
    """Wrap the store so that each write wakes the requests that wait for a change."""
    return cast(Store, NotifyingStore(store, watch, listeners))


@asynccontextmanager
async def open_state(
    home: StateDir,
    settings: Settings,
    address: str,
    stop: Callable[[], None],
    *,
    database: str | ReplicaLeases | None = None,
    files: StateDir | None = None,
    bucket: BucketFolder | None = None,
    node_endpoint: NodeListener | None = None,
) -> AsyncIterator[AppState]:
    """Open the application state and start its control plane. `database` is one of three: the URL
    of a store; the registration of this server in a shared PostgreSQL database; or None, which
    means the database file in the state folder. `files` is the folder with keys, logs and uploads,
    by default `home`; with a `bucket`, the folder has copies of the bucket's files.

    Raises StoreError, ProviderError, StateDirError.
    """
    leases = database if isinstance(database, ReplicaLeases) else None
    if isinstance(database, ReplicaLeases):
        database = database.url
    url = database or f"sqlite:///{home.file('cavvy.db')}"
    # The file contains a copy of the installation's ID. If the database is lost, nodes can still be
    # found by this ID.
    kept = read_text(home.file("installation")) if database is None else None
    store = open_store(url, journal="delete" if home.shared else "wal", installation=kept)
    await store.open()
    for name in await store.list_left_out():
        _log.warning("the tables of %s stay unused: their capability is not installed", name)
    share = None if leases is None else _make_share(leases)
    try:
        files = files or home
        if leases is not None:
            await bind_folder(store, home, files, url, bucket)
            address = f"unix:{files.agents_path()}"
        installation = await store.installation()
        if database is None and kept != installation:
            write_private(home.file("installation"), installation.encode())
        parts = _ServerParts(home, files, bucket, settings, address, store, installation, share)
        traces = open_traces(store, Path(home.path), installation)
        logs = open_log_sender(installation)
        with files.setting_up():
            app_state = _make_state(parts, node_endpoint, traces, logs)
        app_state.stop = stop
        app_state.database = url.partition(":")[0].partition("+")[0]
        async with sending_server_log(logs), sending(traces), _running(app_state):
            yield app_state
    finally:
        await store.close()


@asynccontextmanager
async def _running(app_state: AppState) -> AsyncIterator[None]:
    async with app_state.credentials.opened():
        await app_state.control_plane.start()
        try:
            yield
        finally:
            await app_state.control_plane.stop()
            app_state.file_keys.close()


def _make_share(leases: ReplicaLeases) -> WorkShare:
    server = leases.me.id
    return WorkShare(leases, ReplicaChannel(leases.url, server), AgentContacts(leases.url, server))


class _ServerParts(Struct, frozen=True):
    """The components from which the application state is built."""

    home: StateDir
    files: StateDir
    bucket: BucketFolder | None
    settings: Settings
    address: str  # path of the socket for agents on this machine
    store: Store
    installation: str
    share: WorkShare | None

    @property
    def root(self) -> Path:
        """The folder with keys, logs and uploads."""
        return Path(self.files.path)

    @property
    def place(self) -> FilesPlace:
        """The location of the stored files."""
        url = "" if self.share is None else self.share.url
        return FilesPlace(root=self.root, shared=self.shares, bucket=self.bucket, url=url)

    @property
    def on_network(self) -> bool:
        """Whether each access to the files sends a request to another machine."""
        return self.files.shared or self.bucket is not None

    @property
    def shares(self) -> bool:
        """Whether several servers share the work."""
        return self.share is not None

    def make_watch(self) -> ChangeNotifier:
        """Return the object that wakes requests that wait for a change, including changes made by
        another server.
        """
        watch = ChangeNotifier()
        if self.share is not None:
            watch.share_with(self.share)
        return watch

    def make_peers(self, tokens: GangTokens) -> PeerServers:
        """Return the other servers."""
        return PeerServers(self.share, tokens, self.files.file("tls.pem"))

    def make_context(self, endpoint: NodeEndpoint | None, peers: PeerServers) -> ProviderContext:
        """Return the context with which all providers are created."""
        made = make_context(self.installation, self.root, self.address, endpoint, _CLOCK.now)
        if self.share is None:
            return made
        return replace(made, servers=ProviderPeers(self.share, peers, _CLOCK.now))


def _make_state(
    parts: _ServerParts,
    node_endpoint: NodeListener | None,
    traces: JobTraces | None,
    log_sender: LogSender | None,
) -> AppState:
    watch, root, settings = parts.make_watch(), parts.root, parts.settings
    tokens, sealer = load_tokens(parts.files.file("agents.key")), open_sealer(settings, root)
    files = open_stored_files(settings, parts.place)
    logs, listeners = files.deposits.logs, [] if traces is None else [traces.note]
    if log_sender is not None:
        sent = SentLogs(logs, log_sender)
        logs, listeners = sent.as_logs(), [*listeners, sent.note]
    seen = watched(parts.store, watch, listeners)
    downloads, endpoint = _serve_nodes(node_endpoint, tokens, parts)
    private_targets = read_private_targets(settings)
    dependencies = make_dependencies(seen, sealer, tokens, files, parts.address, private_targets)
    peers = parts.make_peers(tokens)
    context = parts.make_context(endpoint, peers)
    execs = JobExecs(watch)
    dependencies = replace(dependencies, deposits=files.deposits, traced=traces is not None)
    own = ServerParts(
        home=parts.home,
        files=parts.files,
        settings=settings,
        share=parts.share,
        execs=execs,
        peers=peers,
    )
    dependencies = replace(dependencies, for_capabilities=(own,), refusals=(StateDirError,))
    control_plane = _make_control_plane(parts, seen, context, dependencies)
    peers.on_news = control_plane.agents.wake
    return AppState(
        store=control_plane.store,
        control_plane=control_plane,
        logs=logs,
        blobs=files.blobs,
        sealer=sealer,
        file_keys=files.keys,
        credentials=make_credentials(seen, sealer, control_plane, context),
        tokens=tokens,
        execs=execs,
        images=ImageVerifier(dependencies.read_targets),
        peers=peers,
        watch=watch,
        settings=settings,
        now=_CLOCK.now,
        address=parts.address,
        started_at=_CLOCK.now(),
        share=parts.share,
        on_network=parts.on_network,
        downloads=downloads,
        node_endpoint=endpoint.address if endpoint else None,
        node_pins=(endpoint.pin, endpoint.key_pin) if endpoint else ("", ""),
    )


def _make_control_plane(
    parts: _ServerParts,
    seen: Store,
    context: ProviderContext,
    dependencies: ControlPlaneDependencies,
) -> ControlPlane:
    made = ControlPlane(
        seen,
        load_providers(parts.settings, context, parts.store),
        _CLOCK,
        installation=parts.installation,
        dependencies=replace(
            dependencies,
            share=parts.share,
            notes=make_notes(parts.home),
            discounts=read_discounts(parts.settings),
            retention=RetentionDays(
                jobs=parts.settings.whole(JOBS_SETTING), audit=parts.settings.whole(AUDIT_SETTING)
            ),
            half_life=timedelta(days=parts.settings.whole(HALF_LIFE_SETTING)),
            min_run=timedelta(minutes=parts.settings.whole(MIN_RUN_SETTING)),
        ),
    )
    made.pool.find_doubts = lambda offers: to_thread(list_doubts, offers)
    return made


def _serve_nodes(
    listener: NodeListener | None,
    tokens: GangTokens,
    parts: _ServerParts,
) -> tuple[NodeDownloads | None, NodeEndpoint | None]:
    """Return the downloads for nodes outside this machine, and the address at which these nodes
    reach the server. Without a listener for nodes, the downloads and the address are None.
    """
    if listener is None:
        return None, None
    downloads = NodeDownloads(
        parts.root / "downloads", parts.bucket and parts.bucket.below("downloads")
    )
    return downloads, listener.describe(downloads, tokens, make_archive, parts.root / "bundles")


def make_notes(home: StateDir) -> StopNotes | None:
    """Return the `StopNotes` that are used while the disk is full, or None if the database is not
    in the state folder.
    """
    return None if home.shared else StopNotes(Path(home.path) / "stops")


def open_sealer(settings: Settings, root: Path) -> SecretSealer:
    """Return the object that encrypts secrets. Raises SettingsError if the settings name no valid
    location of a key.
    """
    former = settings.text("secrets.former_keys").replace(",", " ").split()
    try:
        return SecretSealer(KeyRing(root / "key", settings.text("secrets.key"), former))
    except KeyPlaceInvalid as error:
        raise SettingsError(f"secrets.key or secrets.former_keys: {error}", KEY_PLACES) from error


def make_context(
    installation: str,
    root: Path,
    address: str,
    node_endpoint: NodeEndpoint | None,
    now: Callable[[], datetime],
) -> ProviderContext:
    """Return the context with which all providers are created."""
    return ProviderContext(
        installation=installation,
        home=root / "providers",
        server_folder=root,
        agent_command=make_command(),
        agent_archive=make_archive,
        server_address=address,
        node_endpoint=node_endpoint,
        find_instance=find_instance,
        list_instance=list_instance,
        list_prices=list_prices,
        now=now,
    )


def load_providers(
    settings: Settings, context: ProviderContext, store: Store
) -> dict[str, Provider]:
    """Create the providers that the settings enable. Raises ProviderError."""
    return registry.load(settings.providers, context, partial(_make_documents, store))


def _make_documents(store: Store, account: str) -> StoredProviderState:
    return StoredProviderState(store=store, provider=account)


def make_credentials(
    store: Store, sealer: SecretSealer, accounts: UsesAccounts, context: ProviderContext
) -> ProjectCredentials:
    """Return the object that decrypts the credentials of projects. The provider for a project's
    account recognises the account's machines by a mark that only this account uses, and has its own
    ledger and folder.
    """

    def make(known: registry.KnownProvider, table: Mapping[str, Scalar], project: str) -> Provider:
        mark = mark_account(context.installation, project)
        return registry.make(
            known,
            table,
            replace(context, installation=mark),
            partial(_make_documents, store),
            name_account(known.name, project),
        )

    return ProjectCredentials(store, sealer, accounts, make, context.now)


def find_instance(provider: str, instance: str) -> Offer | None:
    """Return the catalog's cheapest offer for an instance type, or None if the catalog has no offer
    for this type. Answers are cached until the catalog is refreshed.
    """
    if not instance:
        return None
    try:
        return _find_instance(provider, instance, _refreshed_at())
    except SnapshotError as error:
        _log.warning("no catalog: instance types are unknown", exc_info=error)
        return None


@lru_cache(maxsize=_MOST_INSTANCES)
def _find_instance(provider: str, instance: str, refreshed_at: int) -> Offer | None:
    """Raises SnapshotError."""
    need = ResourceSpec(instance=instance, providers=(provider,))
    return next(iter(find_offers(need, limit=1)), None)


def list_doubts(offers: Sequence[Offer]) -> Mapping[str, str]:
    """Return why offers are in doubt, by their keys, compared with the catalog. If there is no
    catalog, no offer is in doubt.
    """
    try:
        judge = _read_judge(_refreshed_at())
    except SnapshotError as error:
        _log.warning("no catalog: offers are not compared with it", exc_info=error)
        return {}
    return {offer.key: doubt for offer in offers if (doubt := judge.doubt(offer))}


@lru_cache(maxsize=1)
def _read_judge(refreshed_at: int) -> OfferJudge:
    """Raises SnapshotError."""
    with CatalogSnapshot.open() as snapshot:
        return snapshot.make_judge()


def _refreshed_at() -> int:
    """Return the time, in nanoseconds, at which `cavvy catalog refresh` wrote the snapshot. The
    result is 0 for the snapshot that was installed with the program.
    """
    try:
        return refreshed_path().stat().st_mtime_ns
    except OSError:
        return 0


def read_egress_dates() -> Mapping[str, date]:
    """Return the dates of the prices from `read_egress`, with the same keys as the prices."""
    try:
        with CatalogSnapshot.open() as snapshot:
            return snapshot.egress_dates()
    except SnapshotError:  # `read_egress` has logged it
        return {}


def read_egress() -> Mapping[str, Money]:
    """Return the prices in the catalog for data transfers out of a cloud. If there is no catalog,
    the result is empty, and data transfers count as free.
    """
    try:
        with CatalogSnapshot.open() as snapshot:
            return snapshot.egress()
    except SnapshotError as error:
        _log.warning(
            "no catalog: data transfers between clouds are counted as free", exc_info=error
        )
        return {}


def read_text(path: str) -> str | None:
    """Return the content of a small file, or None if it is missing or empty."""
    try:
        return Path(path).read_text("utf-8").strip() or None
    except OSError:
        return None


def read_discounts(settings: Settings) -> Sequence[Discount]:
    """Return the discounts in the settings. Raises SettingsError."""
    try:
        return parse_discounts(settings.text("costs.discounts"))
    except UnitError as error:
        raise SettingsError(f"costs.discounts: {error}") from error


def read_private_targets(settings: Settings) -> str:
    """Return the private targets that users may name in URLs. Raises SettingsError."""
    text = settings.text("server.private_targets").strip()
    try:
        read_targets("" if text == EVERY else text)
    except ValueError as error:
        hint = "write, for example, hooks.example.com, 10.20.0.0/16"
        raise SettingsError(f"server.private_targets: {error}", hint) from error
    return text


def make_dependencies(
    store: Store,
    sealer: SecretSealer,
    tokens: GangTokens,
    files: StoredFiles,
    address: str,
    private_targets: str,
) -> ControlPlaneDependencies:
    """Return the dependencies of the control plane that the server provides, such as the agents'
    address, decrypted secrets, and the folders that are kept between attempts. `private_targets`
    are the private targets that users may name in URLs, if they are not the server's only user.
    """

    async def open_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
        sealed = {secret.name: secret.sealed for secret in await store.secrets(project)}
        known = {name: sealed[name] for name in names if name in sealed}
        return await to_thread(
            lambda: {name: sealer.unseal(project, name, value) for name, value in known.items()}
        )

    async def open_sealed(project: str, name: str, sealed: bytes) -> str:
        return await to_thread(sealer.unseal, project, name, sealed)

    async def read_allowed() -> str:
        return private_targets if await store.accounts() else EVERY

    async def post(url: str, body: bytes) -> str:
        return await post_json(url, body, await read_allowed())

    def read(project: str, name: str) -> bytes:
        with files.blobs.of(project).open(name) as file:
            return file.read()

    return ControlPlaneDependencies(
        tidy=make_tidy(store, files.blobs),
        agent_endpoint=lambda gang: AgentEndpoint(address=address, token=tokens.of(gang)),
        open_secrets=open_secrets,
        storage=lambda job: str(files.folders.root / job.project / job.id),
        folders=files.folders,
        read_blob=lambda project, name: to_thread(read, project, name),
        environment=ChainMap({OWN_FILES: files.bucket_url}, os.environ),
        read_targets=read_allowed,
        post=post,
        open_sealed=open_sealed,
        keeper=FileKeeper(blobs=files.blobs.of, sealer=sealer),
        egress=lambda: to_thread(read_egress),
        egress_dates=lambda: to_thread(read_egress_dates),
    )


def make_tidy(store: Store, blobs: ProjectBlobs) -> Callable[[datetime], Awaitable[None]]:
    """Return a function that removes, at most once a day, the blobs of working folders that belong
    to no job. While a capability with tables is left out, all stay, since these may name them.
    """
    swept: list[datetime] = []

    async def tidy(now: datetime) -> None:
        if swept and now - swept[-1] < _TIDY_EVERY:
            return
        swept[:] = [now]
        if await store.list_left_out():
            return
        snapshots = await store.snapshots()
        try:
            await to_thread(lambda: blobs.sweep(snapshots, older_than=now - _FORGOTTEN))
        except OSError as error:
            _log.warning("cannot remove unused working folders", exc_info=error)

    return tidy
