"""Runs gangs as jobs of Azure Batch. Each job has its own pool with an autoscale formula; the state
of a gang is read from its job, and from the job's tasks, pool and nodes.

In accounts with the allocation mode "user subscription", pools use Azure's spot virtual machines:
https://learn.microsoft.com/azure/batch/batch-spot-vms
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, Scalar, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.providers.azure.account import MakeCredential
from cavvy.providers.azure.price_list import AzurePrices
from cavvy.providers.azure_batch.api import BatchApi
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.formats import is_azure_type
from cavvy.providers.formats.services.azure_batch import (
    ID_LENGTH,
    RANK_VARIABLE,
    AzureBatchGang,
    make_gang_job,
    make_gang_tasks,
)
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.prices import PriceError, PriceQuery
from cavvy.providers.vm.cloud import NAME_PREFIX, BillEnd, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark

# the states of a job that has ended: it has no pool any more
ENDED = frozenset({"completed", "deleting"})
# https://learn.microsoft.com/rest/api/batchservice/batch-status-and-error-codes
POOL_QUOTA = "AutoPoolCreationFailedWithQuotaReached"
_BROKEN = frozenset({"unusable", "starttaskfailed"})
_BOOTS = frozenset({"creating", "starting", "waitingforstarttask", "rebooting", "reimaging"})
_UNBILLED = frozenset({"preempted", "deallocated"})
_WAITS = frozenset({"active", "preparing"})


Json = Mapping[str, Any]
_SHOWN = timedelta(hours=6)  # ended jobs are reported for this long, and then deleted
_AGE = timedelta(minutes=10)  # of offers
_FULL = frozenset({"PoolQuotaReached", POOL_QUOTA})
# statuses of faults that may not occur again if the request is repeated or the rights are changed
_NOT_REFUSED = frozenset({401, 403, 404, 408, 409, 425, 429})
_AT_ONCE = 8  # jobs that are read at the same time
_PRICE_AGE = timedelta(hours=1)


class AzureBatchService:
    """Implements `ManagedService`. The id of a job is the id that the job has in the Azure Batch
    account.
    """

    # Ids are limited to 64 characters and unique in the account. Azure documents no limit of
    # variables, and no time between SIGTERM and SIGKILL, so those values are assumptions; Docker
    # waits 10 seconds by default.
    traits = managed.ServiceTraits(
        hosts=managed.HostList(index=RANK_VARIABLE),
        name_limit=ID_LENGTH,
        unique_names=True,
        variable_limit=4096,
        stop_s=10,
        ended_listed=_SHOWN,
        bill_ends=BillEnd.REPORTED,
        quota_codes=frozenset({"ActiveJobAndScheduleQuotaReached"}),
    )

    def __init__(self, context: ProviderContext, make_credential: MakeCredential = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._list_prices = context.list_prices
        self._spot = SpotPrices(self._settings, self._now) if self._settings.get("spot") else None
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._api = BatchApi(self._settings, make_credential)
        self._offers: tuple[datetime, Sequence[Offer]] | None = None
        self._ended: dict[str, ServiceJob] = {}  # by id: jobs that cannot change any more
        self._started: dict[str, datetime] = {}  # by id: the start of the bill, as nodes report it
        # by id: the job when it was first seen as reclaimed
        self._reclaimed: dict[str, ServiceJob] = {}
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which reads the
        prices."""
        name, region = self._api.account()
        facts = [("Batch account", name), ("region", region)]
        if self._spot is not None and self._spot.fault:
            facts.append(("spot prices", self._spot.fault))
        return facts

    async def offers(self) -> Sequence[Offer]:
        """Return the offers. Cached offers expire after ten minutes, because the catalog is
        refreshed from time to time.
        """
        now = self._now()
        if self._offers is None or now - self._offers[0] >= _AGE:
            await self._api.check()  # a missing right is reported before a plan relies on it
            usual = self._select(await asyncio.to_thread(self._list_prices, "azure"))
            spot: Sequence[Offer] = ()
            if self._spot is not None:
                spot = await self._spot.offers(self._api.account()[1], usual)
            self._offers = now, [*usual, *spot]
        return self._offers[1]

    def _select(self, known: Sequence[Offer]) -> Sequence[Offer]:
        """Return Azure's on-demand offers that a pool of the account can use."""
        _, region = self._api.account()
        patterns = list_setting(self._settings, "sizes")
        return [
            replace(each, provider="azure-batch", zone=None, capacity=None)
            for each in known
            if each.region == region
            and each.purchase is Purchase.ON_DEMAND
            and is_batch_type(each)
            and any(fnmatchcase(each.instance_type, pattern) for pattern in patterns)
        ]

    async def submit(self, request: JobRequest) -> str:
        _, region = self._api.account()
        if request.offer.region != region:  # `list` would never return its jobs
            raise Refused(
                f"the region {request.offer.region} is not the region of the Batch account"
            )
        body = make_gang_job(self._make_gang(request))
        existing = await self._api.create_job(body)
        if existing is None or existing["state"] == "active":
            tasks = make_gang_tasks(body, range(request.nodes))
            try:
                await self._api.add_tasks(request.name, tasks)
            except CloudFault as fault:
                if _is_refused(fault):  # the machines of the job would wait for its tasks
                    with suppress(CloudFault):
                        await self._api.terminate(request.name)
                raise
        return request.name

    async def list(self) -> Sequence[ServiceJob]:
        now, limit = self._now(), asyncio.Semaphore(_AT_ONCE)

        async def read(told: Mapping[str, Any]) -> ServiceJob | CloudFault | Refused | None:
            try:
                async with limit:
                    return await self._read(told)
            except (CloudFault, Refused) as fault:
                return fault

        told = [each for each in await self._api.jobs(self._prefix) if not _is_deleting(each)]
        answers = await asyncio.gather(*(read(each) for each in told))
        jobs: dict[str, ServiceJob] = {}
        for each in answers:
            if isinstance(each, ServiceJob):
                jobs[each.id] = each
            elif each is not None:
                raise each
        for job in jobs.values():
            if job.state is JobState.ENDED and job.ended_at and now - job.ended_at > _SHOWN:
                with suppress(CloudFault):  # the job then stays, which costs nothing
                    await self._api.delete_job(job.id)
        self._forget(set(jobs))
        return list(jobs.values())

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._api.job(job)
        return None if told is None else await self._read(told)

    async def stop(self, job: str) -> None:
        await self._api.terminate(job)

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code in _FULL

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    async def _read(self, told: Mapping[str, Any]) -> ServiceJob | None:
        """Return the state of the job that Azure describes in `told`, or None if the job has been
        deleted in the meantime. If Azure reclaimed the job's nodes, the returned state contains the
        reason even after the job has ended.
        """
        name = str(told["id"])
        if name in self._ended:
            return self._ended[name]
        before = self._reclaimed.get(name)
        if told["state"] not in ENDED and before is not None:
            return before
        tasks = await self._api.tasks(name)
        if tasks is None:  # the job is queried, since its machines are billed as long as it exists
            again = await self._api.job(name)
            if again is None or _is_deleting(again):
                return None
            told = again
        if told["state"] not in ENDED:
            return before or await self._read_live(told, tasks)
        job = read_ended(told, tasks or (), self._started.get(name))
        if before is not None:
            job = replace(
                job,
                ended_at=before.ended_at or job.ended_at,
                preempted=before.preempted,
                no_capacity=before.no_capacity,
                reason=before.reason or job.reason,
            )
        if tasks is not None:
            self._ended[name] = job
        return job

    async def _read_live(
        self, told: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]] | None
    ) -> ServiceJob:
        """Return the state of a job that has not ended. Add the job's missing tasks: tasks are
        missing if the server stopped during the submission, or if a reply was lost. If Azure Batch
        refuses the tasks, the job counts as reclaimed, so that Cavvy ends the job. `tasks` is None
        if the tasks could not be read.
        """
        name, pool = str(told["id"]), (told.get("executionInfo") or {}).get("poolId")
        wanted = int(name.rpartition("-")[2])
        missing = set() if tasks is None else set(range(wanted)) - {int(t["id"]) for t in tasks}
        active = told["state"] == "active"
        refused = await self._add_missing(told, missing) if missing and active else ""
        nodes = await self._api.nodes(pool) if pool else []
        parts = JobParts(job=told, nodes_wanted=wanted, tasks=tasks or (), nodes=nodes)
        if pool and len(nodes) < wanted:
            parts = replace(parts, pool=await self._api.pool(pool))
        job, start = read_live(parts), find_start(nodes)
        if refused:
            job = replace(job, state=JobState.RECLAIMED, reason=refused)
        if start is not None:
            self._started[name] = min(start, self._started.get(name, start))
        job = self._remember_start(job)
        if job.state is JobState.RECLAIMED:
            self._reclaimed[name] = job
        return job

    def _remember_start(self, job: ServiceJob) -> ServiceJob:
        """Replace the job's start time with the first start time that Azure reported, and return
        the job. Azure reports no start time while it briefly lists no nodes.
        """
        if job.name not in self._started:
            return job
        state = JobState.RUNNING if job.state is JobState.WAITING else job.state
        return replace(job, started_at=self._started[job.name], state=state)

    async def _add_missing(self, told: Mapping[str, Any], missing: set[int]) -> str:
        """Add the tasks of the missing ranks. Return why Azure Batch refuses the tasks, or "" if
        Azure Batch accepts the tasks.
        """
        try:
            await self._api.add_tasks(str(told["id"]), make_gang_tasks(told, sorted(missing)))
        except CloudFault as fault:
            if fault.status == 404:  # the next poll asks whether the job still exists
                return ""
            if not _is_refused(fault):
                raise
            return f"Azure Batch refused the tasks of the job: {fault}"
        return ""

    def _forget(self, known: set[str]) -> None:
        """Discard the cached data of jobs that the account no longer lists."""
        self._ended = {each: job for each, job in self._ended.items() if each in known}
        self._started = {each: at for each, at in self._started.items() if each in known}
        self._reclaimed = {each: job for each, job in self._reclaimed.items() if each in known}

    def _make_gang(self, request: JobRequest) -> AzureBatchGang:
        gang, offer = request.gang, request.offer
        return AzureBatchGang(
            name=request.name,
            vm_size=offer.instance_type,
            image=find_image("azure-batch", gang, self._settings),
            # a variable of Azure Batch must be one line, so the script is encoded as a whole
            program="".join(request.entry.environment.values()),
            nodes=request.nodes,
            gpus=offer.accelerator_count,
            spot=offer.purchase is Purchase.SPOT,
            longest=gang.longest and gang.longest + gang.grace + gang.lease,
            subnet=str(self._settings.get("subnet") or "") or None,
            metadata=request.tags,
        )


def _is_deleting(told: Mapping[str, Any]) -> bool:
    return bool(told["state"] == "deleting")


def _is_refused(fault: CloudFault) -> bool:
    """Return whether Azure Batch would refuse the same request again."""
    return 400 <= fault.status < 500 and fault.status not in _NOT_REFUSED


def is_batch_type(offer: Offer) -> bool:
    """Return whether an Azure Batch pool can use the offer's VM size. The VM image of pools
    contains only NVIDIA's drivers.
    """
    other = offer.accelerator is not None and offer.accelerator.startswith("MI")
    return is_azure_type(offer.instance_type) and not other and offer.accelerator_part == 1


class SpotPrices:
    """Reads and caches the spot offers of a region. If the list cannot be read, the prices from the
    last successful read are still used, and `fault` contains the reason.
    """

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self._base, self._now = str(settings.get("prices_endpoint") or "").rstrip("/"), now
        self._read_at: datetime | None = None
        self._offers: Sequence[Offer] = ()
        self.fault = ""

    async def offers(self, region: str, usual: Sequence[Offer]) -> Sequence[Offer]:
        """Return spot offers for the VM sizes of the on-demand offers in `usual`."""
        if self._read_at is None or self._now() - self._read_at >= _PRICE_AGE:
            try:
                self._offers = await asyncio.to_thread(self._fetch, region, usual)
                self._read_at, self.fault = self._now(), ""
            except PriceError as error:
                self.fault = str(error)
        return self._offers

    def _fetch(self, region: str, usual: Sequence[Offer]) -> Sequence[Offer]:
        """Read the list; blocks. Raises PriceError."""
        machines = {each.instance_type: each for each in usual}
        only = (
            f"armRegionName eq '{region}' and priceType eq 'Consumption' and "
            "contains(meterName, 'Spot')"
        )
        query = PriceQuery(
            machines=machines,
            today=self._now().date(),
            progress=lambda _: None,
            pause=lambda _: None,  # not called, because only one attempt is made
        )
        found = AzurePrices(base=self._base, tries=1, timeout_s=10, only=only).find(query)
        return [
            each
            for each in found
            # a spot price at or above the usual price means that no spot capacity exists
            if each.purchase is Purchase.SPOT and each.rate < machines[each.instance_type].rate
        ]


class JobParts(Struct, frozen=True, kw_only=True):
    """A job that has not ended, with its tasks, pool and nodes."""

    job: Json
    nodes_wanted: int
    tasks: Sequence[Json] = ()
    nodes: Sequence[Json] = ()
    pool: Json | None = None  # only if nodes are missing


def read_live(parts: JobParts) -> ServiceJob:
    """Return the state of a job that has not ended."""
    started = find_start(parts.nodes)
    if parts.job["state"] == "terminating":
        state = JobState.WAITING if started is None else JobState.RUNNING
        return _make(parts.job, state, started)
    if lost := _find_preemption(parts):
        return ServiceJob(
            id=str(parts.job["id"]),
            name=str(parts.job["id"]),
            state=JobState.RECLAIMED,
            started_at=started or _find_task_start(parts.tasks) or lost,
            ended_at=lost if parts.nodes_wanted == 1 else None,
            preempted=True,
            reason="Azure reclaimed a spot machine; Cavvy ends the job, so that Azure Batch does "
            "not restart the task",
        )
    if broken := _find_broken(parts.nodes):
        return _make(parts.job, JobState.RECLAIMED, started, broken)
    done = [each for each in parts.tasks if each["state"] == "completed"]
    if len(done) >= parts.nodes_wanted:
        start = started or _find_task_start(parts.tasks)
        return _make(parts.job, JobState.RECLAIMED, start, _describe_failure(done))
    if missing := _find_resize_error(parts):
        job = _make(parts.job, JobState.RECLAIMED, started, missing)
        return replace(job, no_capacity=True)
    job = _make(parts.job, JobState.WAITING if started is None else JobState.RUNNING, started)
    return replace(job, waits=_tell_wait(parts))


def read_ended(job: Json, tasks: Sequence[Json], started: datetime | None) -> ServiceJob:
    """Return the state of a job that has ended. `started` is the time from which Azure bills the
    job. If `started` is None because Azure no longer lists the nodes, use the start of the job's
    first task instead.
    """
    told = job.get("executionInfo") or {}
    ended = _time(told.get("endTime")) or _time(job["stateTransitionTime"])
    error = told.get("schedulingError") or {}
    reason = f"{error['code']}: {error.get('message', '')}" if error.get("code") else ""
    return ServiceJob(
        id=str(job["id"]),
        name=str(job["id"]),
        state=JobState.ENDED,
        started_at=started or _find_task_start(tasks) or ended,
        ended_at=ended,
        no_capacity=error.get("code") == POOL_QUOTA,
        reason=reason or _describe_failure(tasks),
    )


def find_start(nodes: Sequence[Json]) -> datetime | None:
    """Return the time when the first node was allocated; Azure bills the node from this time."""
    times = [_time(each.get("allocationTime")) for each in nodes]
    return min((each for each in times if each is not None), default=None)


def _find_preemption(parts: JobParts) -> datetime | None:
    """Return when a spot node was reclaimed, or None if no node was reclaimed. For a reclaimed
    node, Azure Batch reports that the node is preempted, or that the node's task is waiting again.
    """
    lost = [each["stateTransitionTime"] for each in parts.nodes if each["state"] in _UNBILLED]
    for each in parts.tasks:
        told = each.get("executionInfo") or {}
        again = each["state"] in _WAITS and each.get("previousState") == "running"
        if again or told.get("requeueCount") or told.get("retryCount"):
            since = told.get("lastRequeueTime") or told.get("lastRetryTime")
            lost.append(since or each["stateTransitionTime"])
    return min((time for each in lost if (time := _time(each))), default=None)


def _find_broken(nodes: Sequence[Json]) -> str:
    """Return why one of the nodes cannot run tasks, or "" if all nodes are usable."""
    for each in nodes:
        if each["state"] in _BROKEN:
            errors = [f"{one.get('code')}: {one.get('message')}" for one in each.get("errors", ())]
            return f"the node {each['id']} is {each['state']} {'; '.join(errors)}".strip()
    return ""


def _find_resize_error(parts: JobParts) -> str:
    """Return why the pool has too few nodes, or "" if the pool is still growing or has enough
    nodes."""
    pool = parts.pool
    if pool is None or pool.get("allocationState") != "steady":
        return ""
    errors = [f"{each.get('code')}: {each.get('message')}" for each in pool.get("resizeErrors", ())]
    return "; ".join(errors)


def _tell_wait(parts: JobParts) -> str:
    """Return what the job's tasks wait for: nodes, nodes that start, or an image. Return "" if all
    tasks run.
    """
    if len(parts.nodes) < parts.nodes_wanted:
        growth = (parts.pool or {}).get("allocationState")
        state = f", and the pool is {growth}" if growth else ""
        return f"Azure Batch has allocated {len(parts.nodes)} of {parts.nodes_wanted} nodes{state}"
    for what, found, waits in (("node", parts.nodes, _BOOTS), ("task", parts.tasks, _WAITS)):
        for each in found:
            if each["state"] in waits:
                return f"Azure Batch reports: the {what} {each['id']} is {each['state']}"
    return ""


def _describe_failure(tasks: Sequence[Json]) -> str:
    """Return why the first failed task failed, or "" if no task failed."""
    for each in tasks:
        failure = (each.get("executionInfo") or {}).get("failureInfo")
        if failure:
            return f"the task {each['id']} failed: {failure.get('code')}: {failure.get('message')}"
    return ""


def _find_task_start(tasks: Sequence[Json]) -> datetime | None:
    times = [_time((each.get("executionInfo") or {}).get("startTime")) for each in tasks]
    return min((each for each in times if each is not None), default=None)


def _make(job: Json, state: JobState, started: datetime | None, reason: str = "") -> ServiceJob:
    name = str(job["id"])
    return ServiceJob(id=name, name=name, state=state, started_at=started, reason=reason)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
