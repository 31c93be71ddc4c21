"""Assembles the control plane from a store and providers."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from cavvy.agent.documents import LEAVES_AFTER_S
from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener
from cavvy.control.agents.checkpoints import Checkpoints
from cavvy.control.agents.dependencies import AgentDependencies, ReadBlob
from cavvy.control.agents.deposits import DepositDependencies, Deposits
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.agents.transfers import ReadTargets, Transfers, read_every
from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.control.agents.work import OpenSecrets
from cavvy.control.attempt_counts import AttemptCounts, JobCounts
from cavvy.control.budgets import BUDGETS, BudgetKeeper, post_discounts
from cavvy.control.clock import ControlClock
from cavvy.control.deferred import Deferred, Notes
from cavvy.control.fair_queue import FairQueue
from cavvy.control.gang_operator import GangOperator, GangOperatorDependencies
from cavvy.control.garbage_collector import EVERY, SWEEP, GarbageCollector, OrphanReport
from cavvy.control.job_service import JobIds, JobService, gang_name
from cavvy.control.machine_service import MachineService
from cavvy.control.maintenance import MaintenanceService, is_node_key, node_key
from cavvy.control.markets import (
    DeadlineAdvisor,
    MarketHistory,
    ReadEgress,
    ReadEgressDates,
    StandbyGangs,
)
from cavvy.control.node_pools import PoolNodes, PoolService, is_pool_key
from cavvy.control.own_reconcilers import OwnReconcilers, take_all
from cavvy.control.parts import (
    NO_DEVICES,
    ControlParts,
    DeviceKeeper,
    FileKeeper,
    KnownService,
    OpenSealed,
    OwnReconciler,
    ServiceKeeper,
)
from cavvy.control.provider_bills import BillAudit, StorageMeter
from cavvy.control.provider_pool import ProviderPool, ProviderTasks
from cavvy.control.queue import QueueReconciler
from cavvy.control.reconcile import HOSTS, UPLOADS, JobReconciler, JobReconcilerDependencies
from cavvy.control.reservations import ReservationService, is_reservation_key
from cavvy.control.retention import FIRST, RETENTION, Retention
from cavvy.control.schedules import ScheduleReconciler
from cavvy.control.share import RECHECK, WorkShare, bound_wait, changed_ids
from cavvy.control.start_estimator import StartEstimator
from cavvy.control.start_trials import StartTrials
from cavvy.control.sweep_keeper import SweepKeeper
from cavvy.control.warm_pool import MachinePool, WarmPool
from cavvy.control.webhooks import Post, Webhooks, is_webhook_key, webhook_key
from cavvy.control.worklist import QUEUE, SeparateDrivers
from cavvy.costs.discounts import Discount
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.retention import RetentionDays
from cavvy.domain.shares import HALF_LIFE, MIN_RUN
from cavvy.domain.tasks import Delivery, EdgeStep, TaskSpec
from cavvy.domain.values import Struct, field, replace
from cavvy.frame.discover import load_all, say_left_out
from cavvy.providers.abilities import (
    CLOSEABLE,
    RUNS_AGENTS_HERE,
    SHARES_HOSTS,
    ability,
)
from cavvy.providers.base import AgentEndpoint, Provider, ProviderError
from cavvy.store.base import AtomicWrite, LeaseLost, RowNotFound, StoreError
from cavvy.store.channel import ServerSignal, SignalKind
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.store.leases import RELAY_LEASE, LeaseTurn
from cavvy.store.sql import Store

_HOSTS_EVERY = timedelta(minutes=1)
_ROOM_PAUSE = timedelta(seconds=2)  # pause between two tries to write to a full disk
_NOW = timedelta(0)
_WEBHOOKS_EVERY = 20  # number of job checks between two checks of webhooks
_LOOK_AGAIN = timedelta(minutes=1)
_LEASE_PAUSE = timedelta(seconds=1)  # pause before a server without a valid lease checks again
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ControlPlaneDependencies(Struct, frozen=True, kw_only=True):
    """Services that the control plane needs from the server that runs it."""

    agent_endpoint: Callable[[str], AgentEndpoint]  # the server's address for a gang's agents
    open_secrets: OpenSecrets
    storage: Callable[[JobRecord], str]  # returns the folder of a job, which outlives its attempts
    # where checkpoints are stored; None if every provider has access to `storage`
    folders: CheckpointFolders | None = None
    read_blob: ReadBlob | None = None  # reads the files of submitted working folders
    # the server's environment variables, which may contain storage keys for all projects
    environment: Mapping[str, str] = field(default_factory=dict)
    # returns the private targets that users may name in URLs
    read_targets: ReadTargets = read_every
    # reads the prices of outgoing data; None means that all data is free
    egress: ReadEgress | None = None
    egress_dates: ReadEgressDates | None = None  # reads the dates of these prices
    # removes data that no job needs; called at every garbage collection
    tidy: Callable[[datetime], Awaitable[None]] | None = None
    deposits: DepositDependencies | None = None  # None: nodes store no results in buckets
    notes: Notes | None = None  # where stops are recorded while the disk is full
    post: Post | None = None  # sends webhooks; if None, they are sent by HTTP
    open_sealed: OpenSealed | None = None  # for the reconcilers of capabilities
    discounts: Sequence[Discount] = ()
    retention: RetentionDays | None = None  # None: everything is kept
    half_life: timedelta = HALF_LIFE  # in which the past use of projects decays by half
    min_run: timedelta = MIN_RUN  # of work whose nodes another project may get back for its quota
    # what the server has for capabilities, which find it by its type
    for_capabilities: Sequence[object] = ()
    # the errors with which a capability keeps the server from starting, such as wrong settings
    refusals: tuple[type[Exception], ...] = ()
    share: WorkShare | None = None  # this server's share; None: it is the only server
    keeper: FileKeeper | None = None  # for the reconcilers of capabilities
    traced: bool = False  # whether the server sends traces, so that work learns its span


class ControlPlane:
    """The control plane. Call `start`, pass users' requests to `jobs` and agents' requests to
    `agents`, then call `stop`.
    """

    _task: asyncio.Task[None] | None = None

    def __init__(
        self,
        store: Store,
        providers: MutableMapping[str, Provider],
        clock: ControlClock,
        *,
        installation: str,
        dependencies: ControlPlaneDependencies,
        ids: JobIds | None = None,
    ) -> None:
        self._outside, self._clock = dependencies, clock
        self.own = OwnReconcilers(clock)
        self._deferred = self._make_deferred(store)
        self.store = store = self._store = self._deferred.as_store()
        self._providers = providers
        self._driver = SeparateDrivers(self, clock, self._is_slow, self._wake)
        self.pool = ProviderPool(providers, clock, store)
        self.checkpoints = self._make_checkpoints()
        self.data, self.uploads = self._make_transfers()
        self.agents = self._make_agents()
        self.deposits = self._make_deposits()
        self.advisor = self._make_advisor()
        self._operator = self._make_operator(installation)
        self._name_gang = partial(gang_name, installation)
        self._warm = self._make_warm()
        self.budgets, self._webhooks = self._make_reporters(dependencies.post)
        self.fair_queue = FairQueue(store, dependencies.half_life, dependencies.min_run)
        self.start_estimator = StartEstimator(store, self.pool, self.fair_queue)
        self.job_counts = JobCounts(store, lambda: self.agents.gathered.is_alone())
        self._queue = self._make_queue()
        self._jobs = self._make_reconciler()
        self.garbage_collector = GarbageCollector(store, self.pool, clock, self.uploads)
        self.jobs = self._make_jobs(ids)
        days = dependencies.retention or RetentionDays()
        # users' buckets have rules of their own for old files, which may be results
        remove_files = partial(self._remove_files, from_bucket=False)
        self.retention = Retention(store, clock, self.jobs, days, remove_files)
        self.machines = self._make_machines()
        self.node_pools = PoolService(store, clock, self.jobs, self.hint)
        self.maintenance = MaintenanceService(store, self.pool, clock, self.hint)
        self.reservations = ReservationService(store, self.pool, clock, self.maintenance, self.hint)
        self._tasks = ProviderTasks(clock, self._look_at)
        self.own = OwnReconcilers(clock, self._make_own())

    def _make_own(self) -> Iterator[tuple[str, OwnReconciler]]:
        parts = ControlParts(
            store=self._store,
            clock=self._clock,
            hint=self.hint,
            hint_after=self._hint_after,
            jobs=self.jobs,
            pool=self.pool,
            agents=self.agents,
            data=self.data,
            budgets=self.budgets,
            checkpoints=self.checkpoints,
            announce=self._announce,
            owns_key=lambda key: self._share is None or self._share.owns(key),
            outside=self._outside.for_capabilities,
            list_services=self.list_services,
            list_reconcilers=lambda: self.own.all,
            open_secrets=self._outside.open_secrets,
            read_targets=self._outside.read_targets,
            open_sealed=self._outside.open_sealed,
            keeper=self._outside.keeper,
            trials=self._make_trials(),
        )
        for capability, make in load_all(lambda each: each.reconcilers):
            try:
                made = make(parts)
            except self._outside.refusals:
                raise
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                say_left_out(capability, "its reconciler", error)
            else:
                if made is not None:
                    yield capability.name, made

    def _make_trials(self) -> StartTrials:
        given = self._store, self.pool, self._clock, self.advisor, self.fair_queue
        return StartTrials(*given, self._name_gang)

    def find(self, kind: type[_T]) -> _T | None:
        """Return the reconciler of this type that a capability has contributed, or None."""
        return self.own.find(kind)

    @property
    def devices(self) -> DeviceKeeper | None:
        """The reconciler that knows the devices at the edge, or None if no capability does."""
        return self.own.find(DeviceKeeper)  # type: ignore[type-abstract]

    @property
    def sweeps(self) -> SweepKeeper | None:
        """The reconciler that knows how sweeps go on, or None if no capability does."""
        return self.own.find(SweepKeeper)  # type: ignore[type-abstract]

    def _is_slow(self, key: str) -> bool:
        """Return whether the work for a key waits for a server that a user chose."""
        if is_webhook_key(key):
            return True
        owner = self.own.find_owner(key)
        return owner is not None and owner.waits_outside

    @property
    def _share(self) -> WorkShare | None:
        return self._outside.share

    def _make_deferred(self, store: Store) -> Deferred:
        self.attempt_counts = AttemptCounts(self._clock.now())
        return Deferred(store, self._outside.notes, self.hint, self._note_written)

    def _wake(self, key: str) -> None:
        self._jobs.wake(key)

    def _note_written(self, changes: AtomicWrite) -> None:
        self.attempt_counts.note(changes)
        self.agents.gathered.note(changes)
        for job_id in {
            *(each.id for each in changes.jobs),
            *(each.job_id for each in changes.attempts),
        }:
            self._wake(job_id)

    def _make_advisor(self) -> DeadlineAdvisor:
        outside = self._outside
        history, egress = MarketHistory(self._store, self._clock), outside.egress
        advisor = DeadlineAdvisor(self._store, self.pool, self._clock, history, egress)
        advisor.read_egress_dates = outside.egress_dates
        return advisor

    def _make_warm(self) -> WarmPool:
        shared = self._share is not None
        return WarmPool(self._store, self._clock, self.agents, shared=shared)

    def _make_reporters(self, post: Post | None) -> tuple[BudgetKeeper, Webhooks]:
        given = self._store, self._clock, post
        return BudgetKeeper(*given), Webhooks(*given)

    def _make_jobs(self, ids: JobIds | None) -> JobService:
        return JobService(
            self._deferred,
            self._clock,
            ids or JobIds(self._clock),
            hint=self.hint,
            arrived=self._arrived,
            notify=self._notify,
            remove_files=self._remove_files,
            defers=self._share is None,
        )

    async def _remove_files(
        self, job: JobRecord, *, from_bucket: bool = True
    ) -> RemovedCheckpoints:
        """Delete an ended job's logs and checkpoints, and the job's results in a bucket. The job's
        rows are deleted later, so that an interrupted removal can be repeated.
        """
        if self._outside.deposits is not None:
            await asyncio.to_thread(self._outside.deposits.logs.remove, job.project, job.id)
        removed = await self.checkpoints.remove(job, from_bucket=from_bucket)
        left = await self.deposits.remove(job)
        return replace(removed, kept="; ".join(each for each in (removed.kept, left) if each))

    def _make_machines(self) -> MachineService:
        pool = MachinePool(self._store, self._warm)
        return MachineService(self._store, self._clock, pool, self.jobs, self.hint)

    async def list_services(self, project: str) -> list[KnownService]:
        """Return the services of a project; none if no capability runs services."""
        keeper = self.own.find(ServiceKeeper)  # type: ignore[type-abstract]
        return [] if keeper is None else await keeper.list_known(project)

    def _make_checkpoints(self) -> Checkpoints:
        providers, dependencies = self._providers, self._outside
        return Checkpoints(
            self._store,
            self._clock,
            dependencies.folders,
            storage=dependencies.storage,
            bucket_opener=self._make_opener(dependencies),
            shares_files=lambda name: name in providers and providers[name].manifest.shares_files,
        )

    def _make_opener(self, dependencies: ControlPlaneDependencies) -> BucketCheckpointOpener:
        return BucketCheckpointOpener(
            dependencies.open_secrets,
            dependencies.environment,
            self._clock.now,
            dependencies.read_targets,
        )

    def _make_transfers(self) -> tuple[Transfers, UnfinishedUploads]:
        dependencies = self._outside
        transfers = Transfers(
            self._store,
            self._clock,
            dependencies.open_secrets,
            dependencies.environment,
            dependencies.read_targets,
        )
        return transfers, UnfinishedUploads(self._store, self._clock, transfers)

    def _make_deposits(self) -> Deposits:
        return Deposits(
            self._store,
            self._clock,
            self._make_opener(self._outside),
            (self.agents, self.data, self.checkpoints, self.uploads),
            self.hint,
            self._outside.deposits,
        )

    def _make_agents(self) -> AgentSessions:
        dependencies = self._outside
        agent_dependencies = AgentDependencies(
            open_secrets=dependencies.open_secrets,
            checkpoint=self.checkpoints.ready,
            save_interval=self.checkpoints.save_interval,
            losses=self.checkpoints.losses_per_hour,
            deposit_after_s=lambda job: LEAVES_AFTER_S if self.deposits.find_url(job) else 0,
            egress=lambda url, offer: self.advisor.price_upload(url, offer),
            notice=lambda attempt: self.pool.notice(attempt.offer.account),
            accelerators=lambda job, attempt: attempt.offer.accelerator_count,
            read_blob=dependencies.read_blob,
            sweeps=lambda: self.sweeps,
            traced=dependencies.traced,
            replaces=lambda attempt: self.pool.can_replace(attempt.offer.account),
        )
        return AgentSessions(self._store, self._clock, self.hint, agent_dependencies)

    def _make_operator(self, installation: str) -> GangOperator:
        operator_dependencies = GangOperatorDependencies(
            pool=self.pool,
            agents=self.agents,
            installation=installation,
            agent_endpoint=self._outside.agent_endpoint,
        )
        return GangOperator(self._store, self._clock, operator_dependencies)

    def _make_queue(self) -> QueueReconciler:
        return QueueReconciler(
            self._store,
            self.pool,
            self._clock,
            advisor=self.advisor,
            warm=self._warm,
            machines=MachinePool(self._store, self._warm),
            pools=PoolNodes(self._store),
            budgets=self.budgets,
            fair_queue=self.fair_queue,
            name_gang=self._name_gang,
            hint=self.hint,
            notify=self._notify,
        )

    async def _look_at_step(self, job: JobRecord, step: EdgeStep) -> timedelta:
        """Look at a job that is a step of devices' models. While their capability is left out, the
        job waits, and says why.
        """
        if self.devices is not None:
            return await self.devices.step(job, step)
        if job.reason != NO_DEVICES:
            await self._store.commit(AtomicWrite(jobs=[replace(job, reason=NO_DEVICES)]))
        return _LOOK_AGAIN

    def _make_reconciler(self) -> JobReconciler:
        history = self.advisor.history
        schedules = ScheduleReconciler(
            self._store,
            self._clock,
            self.pool,
            history,
            self._start_run,
            self._arrived,
            self._look_at_step,
        )
        dependencies = JobReconcilerDependencies(
            pool=self.pool,
            agents=self.agents,
            deposits=self.deposits,
            uploads=self.uploads,
            operator=self._operator,
            budgets=self.budgets,
            hint=self.hint,
            notify=self._notify,
            standbys=StandbyGangs(self._clock, self.advisor, self._name_gang, self._find_block),
            warm=self._warm,
            pools=PoolNodes(self._store),
            schedules=schedules,
        )
        return JobReconciler(self._deferred, self._clock, dependencies)

    async def _find_block(self, job: JobRecord, gangs: Sequence[Attempt]) -> str:
        """Return which budget or limit keeps a running job from these further gangs, or ""."""
        paid = any(each.offer.rate.micros_per_hour for each in gangs)
        if paid and (reason := await self.budgets.find_block(job)):
            return reason
        return await self.fair_queue.find_limit(job, gangs, self._clock.now())

    def hint(self, key: str) -> None:
        """Reconcile this key now, because the state of the key's object has changed."""
        self._hint_after(key, timedelta(0))

    def _hint_after(self, key: str, after: timedelta) -> None:
        if self._concerns_me(key):
            self._driver.hint(key, after)
        if self._share is not None and not self._share.owns(key):
            self._share.send(SignalKind.HINT, key)

    def _concerns_me(self, key: str) -> bool:
        """Return whether this server reconciles the key, or follows what another one does to it."""
        if self._share is None or self._share.owns(key):
            return True
        return self.own.find_follower(key) is not None

    def _announce(self, key: str) -> None:
        if self._share is not None:
            self._share.send(SignalKind.HINT, key)

    def receive(self, signal: ServerSignal) -> None:
        """Handle a signal of another server."""
        match signal.kind:
            case SignalKind.HINT if self._share is not None and self._concerns_me(signal.key):
                after = self._queue.delay_of_arrival() if signal.key == QUEUE else _NOW
                self._driver.hint(signal.key, after)
            case SignalKind.GANG:
                self.agents.wake(signal.key)
            case SignalKind.LOOK:
                self._operator.look_now(signal.key)
            case SignalKind.MARKET:
                self.pool.learn_freed()
            case SignalKind.ACCOUNTS:
                self.pool.read_accounts()

    async def start(self) -> None:
        """Start the reconcilers, which resume all unfinished jobs."""
        await self._publish_hosts()
        await self._stop_again()
        if self._share is None:
            await self._resume()
        else:
            self._share.on_signal = self._share_with(self._share)
            await self._take_up(await self._share.start())
        for provider in self._providers.values():
            if host := ability(provider, RUNS_AGENTS_HERE):
                host.connect(self.agents)
        self._task = asyncio.create_task(self._run(), name="control")

    async def put_account(self, account: str, provider: Provider) -> None:
        """Use this provider for an account from now on, instead of the account's former provider.
        Each call uses either the former or the new provider.
        """
        former = self._providers.get(account)
        self._providers[account] = provider
        self._tasks.drop(account)
        if host := ability(provider, RUNS_AGENTS_HERE):
            host.connect(self.agents)
        self._tasks.add(account, provider)
        self.pool.expire()
        self.hint(QUEUE)
        await _close(former)

    async def drop_account(self, account: str) -> None:
        """Stop using the provider with this name, if one exists, without removing its gangs."""
        former = self._providers.pop(account, None)
        self._tasks.drop(account)
        self.pool.expire()
        await _close(former)

    def _share_with(self, share: WorkShare) -> Callable[[ServerSignal], None]:
        """Send the other servers the facts that are not in the database, and handle their signals.
        Return the handler of the other servers' signals.
        """
        self.agents.memory.shares = True
        self.agents.gathered.is_alone = lambda: len(share.servers) < 2
        self.agents.notify_others = lambda gang: share.send(SignalKind.GANG, gang)
        self.pool.tell_expired = lambda: share.send(SignalKind.MARKET)
        self.pool.tell_accounts = lambda: share.send(SignalKind.ACCOUNTS)
        self.pool.may_launch = lambda: share.valid
        others = share.on_signal

        def receive(signal: ServerSignal) -> None:
            self.receive(signal)
            others(signal)

        return receive

    async def _take_up(self, turn: LeaseTurn) -> None:
        """Resume the work for which this server has acquired leases. Forget earlier polls, which
        may be out of date."""
        if turn.lost or turn.gained:
            self._operator.start_over()
            self._jobs.start_over()
        if turn.gained:
            await self._resume()
        if RELAY_LEASE in (*turn.gained, *turn.lost):
            self._tasks.set_relaying(self._providers, self._relays_agents())

    def _relays_agents(self) -> bool:
        return self._share is None or self._share.holds(RELAY_LEASE)

    async def _resume(self) -> None:
        """Add all work of this server to the worklist."""
        after = {SWEEP: EVERY, HOSTS: _HOSTS_EVERY}
        if self._outside.retention is not None:
            after[RETENTION] = FIRST
        keys = [QUEUE, BUDGETS, *after]
        keys += [*await self._store.unfinished(), *await self._webhooks.unfinished()]
        keys += await self.node_pools.unfinished()
        keys += [*await self.maintenance.unfinished(), *await self.reservations.unfinished()]
        keys += await self.own.unfinished()
        for key in keys:
            if self._concerns_me(key):
                self._driver.hint(key, after.get(key, _NOW))

    async def stop(self) -> None:
        """Stop the reconcilers. The next start of the server resumes all work from the store."""
        for provider in self._providers.values():
            if host := ability(provider, RUNS_AGENTS_HERE):
                host.connect(None)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._share is not None:
            await self._share.close()
        await self.agents.close()
        await self.deposits.close()
        await self._deferred.write_pending()
        for provider in list(self._providers.values()):
            await _close(provider)

    async def _stop_again(self) -> None:
        """Apply the stops that an earlier server could not write to the store because the disk was
        full."""
        if self._outside.notes is None:
            return
        for job_id, reason in self._outside.notes.read().items():
            with suppress(RowNotFound):
                job = await self._store.job(job_id)
                await self.jobs.stop(job.project, job.id, reason)
        if not self._deferred.pending.is_set():
            self._outside.notes.write({})

    @property
    def running(self) -> bool:
        """Whether the reconcilers run. The reconcilers do not run before `start`, after `stop`, or
        after a crash; `failure` returns the error of a crash.
        """
        return self._task is not None and not self._task.done()

    @property
    def audit(self) -> BillAudit:
        """An object that compares bills with the providers' own records."""
        return BillAudit(self.store, self.pool)

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the control plane, or None. If an error has stopped the control
        plane, the server reports itself as unhealthy.
        """
        task = self._task
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    async def idle(self) -> bool:
        """Return whether no work is left; if so, the embedded server may exit."""
        if await self._store.unfinished():
            return False
        if await self.own.any_needed():
            return False
        return not await self.node_pools.any()

    async def down(self) -> OrphanReport:
        """Stop all services, pools and jobs, and immediately remove all gangs without a job. Each
        is done also if one before it fails, since what goes on may cost money; then raises the
        first error.
        """
        reports: list[OrphanReport] = []

        async def sweep() -> None:
            reports.append(await self.garbage_collector.sweep(remove=True, at_once=True))

        await take_all(
            partial(self.own.end_all, None), self.node_pools.stop_all, self._stop_jobs, sweep
        )
        return reports[0]

    async def _stop_jobs(self) -> None:
        reason = "all jobs are being stopped"
        await self.jobs.stop_waiting(await self._store.unfinished(), reason)

        async def stop(job_id: str) -> None:
            job = await self._store.job(job_id)
            await self.jobs.stop(job.project, job.id, reason, release=True)

        await take_all(*(partial(stop, each) for each in await self._store.unfinished()))

    async def reconcile(self, key: str) -> timedelta | None:
        """Pass the key to its reconciler, unless another server is responsible for the key."""
        share = self._share
        if share is None:
            return await self._reconcile(key)
        if not share.valid:
            return _LEASE_PAUSE
        if not share.owns(key):
            if (follower := self.own.find_follower(key)) is not None:
                return await follower.follow(key)
            share.send(SignalKind.HINT, key)
            return None
        with share.working(key), suppress(LeaseLost):
            again = await self._reconcile(key)
            return bound_wait(again) if key == QUEUE else again
        return None

    async def _reconcile(self, key: str) -> timedelta | None:
        if key == QUEUE:
            return await self._queue.reconcile(key)
        if key == SWEEP:
            return await self._sweep(key)
        if key == RETENTION:
            return await self.retention.reconcile()
        if key == BUDGETS:
            return await self.budgets.reconcile()
        if key == UPLOADS:
            await self.uploads.sweep(remove=True)
            await self.deposits.sweep()
            return None  # the next garbage collection retries failed aborts
        if key == HOSTS:
            await self._publish_hosts()
            return _HOSTS_EVERY
        for is_kind, reconcile in (
            (is_webhook_key, self._webhooks.reconcile),
            (is_pool_key, self.node_pools.reconcile),
            (is_node_key, self.maintenance.reconcile),
            (is_reservation_key, self.reservations.reconcile),
        ):
            if is_kind(key):
                return await reconcile(key)
        if (owner := self.own.find_owner(key)) is not None:
            return await self.own.reconcile(owner, key)
        return await self._reconcile_job(key)

    async def _reconcile_job(self, job_id: str) -> timedelta | None:
        again = await self._jobs.reconcile(job_id)
        await self.own.note_job(job_id)
        return again

    async def _sweep(self, key: str) -> timedelta | None:
        self.hint(UPLOADS)
        # done first, because the later steps write to the store, and a full disk refuses writes
        again = await self.garbage_collector.reconcile(key)
        await self.advisor.history.forget()
        await StorageMeter(self._store, self.pool, self._clock).run()
        await self.own.sweep()
        await post_discounts(self._store, self._outside.discounts, self._clock.now())
        if self._outside.tidy is not None:
            await self._outside.tidy(self._clock.now())
        return again

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._driver.run())
            group.create_task(self._settle())
            self.own.start(group)
            if self._share is not None:
                group.create_task(self._share.keep(self._take_up))
                group.create_task(self._share.exchange(self.agents.memory, self._clock))
                group.create_task(self._recheck())
            self._tasks.start(group, self._providers, relay=self._relays_agents())

    async def _recheck(self) -> None:
        """Periodically reconcile the jobs that other servers have changed, and those that wait for
        jobs that have ended, because hints about these jobs may have been lost.
        """
        seen: dict[str, int] = {}
        for count in itertools.count(1):
            await self._clock.sleep_until(self._clock.now() + RECHECK)
            try:
                found = await self._store.live_versions()
                keys = list(changed_ids(seen, found))
                keys += await self._store.dependencies.waiting_for_any([*seen.keys() - found])
                if count % _WEBHOOKS_EVERY == 0:
                    keys += await self._webhooks.unfinished()
                keys += await self.own.unfinished(again=True)
                keys += await self.maintenance.unfinished()
                keys += await self.reservations.unfinished()
            except StoreError as error:
                _log.warning("the jobs were not checked for changes: %s", error)
                continue
            for key in keys:
                if self._concerns_me(key):
                    self._driver.hint(key)
            seen = found

    async def _look_at(self, gang: str) -> None:
        """Poll a gang whose provider signals a change."""
        job_id = self._operator.find_job(gang)
        if job_id is None:
            try:
                attempt = await self._store.attempt_of_gang(gang)
            except RowNotFound:
                # No job polls an unknown gang, but its provider may make progress only when it is
                # polled.
                self.hint(SWEEP)
                return
            if attempt.phase is AttemptPhase.ENDED:
                return
            job_id = attempt.job_id
        self._operator.look_now(gang)
        if self._share is not None and not self._share.owns(job_id):
            self._share.send(SignalKind.LOOK, gang)
        self.hint(job_id)

    async def _settle(self) -> None:
        """Write the changes that were delayed by a full disk, as soon as the disk has space."""
        while True:
            await self._deferred.pending.wait()
            await self._clock.sleep_until(self._clock.now() + _ROOM_PAUSE)
            await self._deferred.write_pending()

    async def _publish_hosts(self) -> None:
        known = {host.name: host for host in await self._store.hosts()}
        for provider in list(self._providers.values()):  # accounts may be added meanwhile
            if shares := ability(provider, SHARES_HOSTS):
                try:
                    hosts = await shares.hosts()
                except ProviderError:
                    continue
                for host in hosts:
                    if known.get(host.name) != host:
                        await self._store.put_host(host)
                    if host.sick:
                        self.hint(node_key(host.name))

    async def _start_run(self, schedule: JobRecord, task: TaskSpec, run_id: str) -> JobRecord:
        """Submit one run of a repeating job, with the consent and the spending limit of the job's
        user. Raises StaleVersion if the run already exists.
        """
        return await self.jobs.submit(
            task,
            schedule.origin,
            schedule.project,
            user=schedule.user,
            account=schedule.account,
            consented=schedule.consented,
            ceiling=schedule.ceiling,
            job_id=run_id,
        )

    def _arrived(self) -> None:
        self._hint_after(QUEUE, self._queue.delay_of_arrival())

    def _notify(self, job_id: str, what: Delivery) -> None:
        self.hint(webhook_key(job_id, what))


async def _close(provider: Provider | None) -> None:
    if provider is not None and (closeable := ability(provider, CLOSEABLE)):
        await closeable.close()
