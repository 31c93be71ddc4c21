"""Runs gangs as command jobs of Azure Machine Learning."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.azure.account import MakeCredential
from cavvy.providers.azure.cloud import FULL as AZURE_FULL
from cavvy.providers.azureml.api import WorkspaceApi, read_time
from cavvy.providers.azureml.clusters import FULL, Cluster, Clusters
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.formats.services.azureml import (
    CommandJobRequest,
    DataMount,
    make_job_resource,
)
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.records import make_mark
from cavvy.providers.vm.rest import Json

_SHOWN = timedelta(hours=6)  # ended jobs are reported for this long, and then archived
_ARCHIVED = 20  # maximum number of jobs that one poll archives
# seconds until the next attempt to archive a job after a failed attempt
_AGAIN = timedelta(hours=1)
_QUOTA = "ClusterQuotaReached"  # Cavvy's own code
# https://learn.microsoft.com/rest/api/azureml/jobs/get#jobstatus
_ENDED = frozenset({"Completed", "Failed", "Canceled"})
_WAITING = frozenset({"NotStarted", "Starting", "Provisioning", "Preparing", "Queued"})
# The error of a job whose node was reclaimed:
# https://github.com/Azure/MachineLearningNotebooks/issues/1242
_PREEMPTED = re.compile(r"preemption|pre-?empted", re.IGNORECASE)
_DATA = re.compile(r"(?P<name>[A-Za-z_]\w*)=azureml:(?P<asset>[\w.-]+):(?P<version>[\w.-]+)")
# Variables of the service that describe its own processes. The work must not see them, since it may
# start more processes.
_PROCESSES = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"


class AzureMlService:
    """Implements `ManagedService`. A job's id is its name."""

    # Microsoft documents neither the longest variable, nor the time between SIGTERM and SIGKILL, so
    # these values are assumptions.
    traits = managed.ServiceTraits(
        # https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
        hosts=managed.HostList(index="NODE_RANK"),
        name_limit=128,
        unique_names=True,
        variable_limit=4096,
        stop_s=30,
        # Microsoft does not document whether the other nodes go on once the first one has ended
        first_ends_all=True,
        ended_listed=_SHOWN,
        quota_codes=frozenset({_QUOTA, "QuotaExceeded"}),
    )

    def __init__(self, context: ProviderContext, make_credential: MakeCredential = None) -> None:
        self._settings, self._now = context.settings, context.now
        mark = make_mark(context.installation)
        self._tag, self._prefix = f"{NAME_PREFIX}{mark}", f"{NAME_PREFIX}{mark}-"
        self._api = WorkspaceApi(self._settings, make_credential, "azureml")
        self._clusters = Clusters(self._api, context)
        self._ended: dict[str, ServiceJob] = {}  # by name: jobs that cannot change any more
        # by name: running jobs with their starts, and jobs that Azure would start again
        self._running: dict[str, ServiceJob] = {}
        self._reclaimed: dict[str, ServiceJob] = {}
        # by name: when the service last refused to archive a job, and why
        self._refused: dict[str, tuple[datetime, str]] = {}
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which reads the
        clusters.
        """
        known, left = self._clusters.known, self._clusters.left_out
        facts = [("workspace", str(self._settings["workspace"]))]
        facts += [
            (
                f"cluster {each.name}",
                f"{each.size}, at most {each.most_nodes} nodes; Azure bills idle nodes for "
                f"{each.idle or 'an unknown time'} after a job"
                f"{f'; {each.quota}' if each.quota else ''}",
            )
            for each in known
            if each.name not in left
        ]
        if left:
            told = "; ".join(f"{name}: {why}" for name, why in left.items())
            facts.append(("clusters without offers", told))
        if self._refused:
            name, (_, why) = next(iter(self._refused.items()))
            more = f" and {len(self._refused) - 1} more" if len(self._refused) > 1 else ""
            facts.append(("jobs that cannot be archived", f"{name}{more}: {why}"))
        return facts

    async def offers(self) -> Sequence[Offer]:
        return await self._clusters.offers()

    async def submit(self, request: JobRequest) -> str:
        earlier = await self._api.job(request.name)
        if earlier is not None:  # an earlier request made the job
            return request.name
        cluster = await self._find_cluster(request)
        job = await self._make_job(request, cluster)
        body = make_job_resource(
            job, compute_id=cluster.id, environment_id=await self._api.environment(job.image)
        )
        await self._api.create(request.name, body)
        return request.name

    async def list(self) -> Sequence[ServiceJob]:
        now = self._now()
        listed = {
            str(each["name"]): each
            for each in await self._api.jobs(self._tag)
            if str(each.get("name")).startswith(self._prefix)
        }
        await self._clusters.remove_unused(_list_used(listed.values()))
        told = {name: each for name, each in listed.items() if not _is_old(each, now)}
        for known in (self._running, self._reclaimed, self._ended):
            for name in known.keys() - told.keys():
                del known[name]
        await self._archive([name for name in listed if name not in told])
        found = [await self._read(name, each) for name, each in told.items()]
        return [each for each in found if _is_young(each, now)]

    async def _archive(self, old: Sequence[str]) -> None:
        """Archive jobs that ended long ago, because long lists make each poll slower. If Azure
        refuses to archive a job, the poll continues, and `cavvy check` shows the refusal
        (`identity`).
        """
        now = self._now()
        self._refused = {name: each for name, each in self._refused.items() if name in old}
        due = [
            name
            for name in old
            if name not in self._refused or now - self._refused[name][0] >= _AGAIN
        ]
        for name in due[:_ARCHIVED]:
            try:
                await self._api.archive(name)
            except CloudFault as fault:
                self._refused[name] = now, str(fault)
            else:
                self._refused.pop(name, None)

    async def get(self, job: str) -> ServiceJob | None:
        if job in self._ended:
            return self._ended[job]
        told = await self._api.job(job)
        return None if told is None else await self._read(job, told)

    async def stop(self, job: str) -> None:
        try:
            await self._api.cancel(job)
        except CloudFault as fault:
            if fault.status not in (400, 409):
                raise
            # Azure does not document how it refuses to cancel a job that has ended
            told = await self._api.job(job)
            status = None if told is None else str(told["properties"]["status"])
            if status is None or status in _ENDED:
                raise CloudFault(404, fault.code, fault.message) from fault
            if status != "CancelRequested":
                raise

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == FULL or fault.code in AZURE_FULL

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    async def _read(self, name: str, told: Json) -> ServiceJob:
        """Parse a job. Query the run history only if the cached state is missing or out of date."""
        if name in self._ended:
            return self._ended[name]
        status = str(told["properties"]["status"])
        taken, running = self._reclaimed.get(name), self._running.get(name)
        if taken is not None and status not in _ENDED:
            return taken
        if running is not None and status not in _ENDED | _WAITING:
            return running
        job = read_job(told, await self._api.history(name), running.started_at if running else None)
        if job.state is JobState.RECLAIMED:
            self._reclaimed[name] = job
        elif job.state is JobState.RUNNING and job.started_at is not None:
            self._running[name] = job
        elif job.state is JobState.ENDED:
            if taken is not None:  # a job that was reclaimed keeps this reason
                job = replace(taken, state=JobState.ENDED, ended_at=job.ended_at)
            self._ended[name] = job
        return job

    async def _find_cluster(self, request: JobRequest) -> Cluster:
        """Return the compute cluster of a request's offer. Raises CloudFault if the cluster cannot
        run the job now.
        """
        offer = request.offer
        find = self._clusters.find(offer.zone) if offer.zone else self._clusters.prepare(offer)
        cluster = await find
        if cluster.quota:
            raise CloudFault(409, _QUOTA, f"the cluster {cluster.name}: {cluster.quota}")
        why_not = cluster.why_not
        if not why_not and request.nodes > cluster.most_nodes:
            why_not = (
                f"the cluster has at most {cluster.most_nodes} nodes, and the job needs "
                f"{request.nodes}"
            )
        if not why_not and cluster.size.lower() != offer.instance_type.lower():
            why_not = f"the cluster's machines are now {cluster.size}"
        if why_not:
            raise CloudFault(409, FULL, f"{cluster.name}: {why_not}")
        return cluster

    async def _make_job(self, request: JobRequest, cluster: Cluster) -> CommandJobRequest:
        gang = request.gang
        mounts = await self._read_data(gang)
        lines = [
            *([_PROCESSES] if request.nodes > 1 else []),
            *(f'export AZUREML_DATA_{each.name}="${{{{inputs.{each.name}}}}}"' for each in mounts),
            f"exec {shlex.join(request.entry.command)}",
        ]
        return CommandJobRequest(
            name=request.name,
            experiment=str(self._settings["experiment"]),
            command="\n".join(lines),
            image=find_image("azureml", gang, self._settings),
            compute=cluster.name,
            nodes=request.nodes,
            shared_memory_mib=request.offer.memory_mib or None,
            environment=request.entry.environment,
            inputs=mounts,
            longest=gang.job_limit or timedelta(seconds=int(self._settings["max_run_s"])),
            tags={**request.tags, self._tag: "1"},
        )

    async def _read_data(self, gang: GangSpec) -> Sequence[DataMount]:
        """Return a mount for each data asset that the option `data` names. Raises Refused."""
        text = str(gang.options.get("data") or "")
        mounts = []
        for each in filter(None, (part.strip() for part in text.split(","))):
            parts = _DATA.fullmatch(each)
            if parts is None:
                raise Refused(
                    f"resources.options.azureml.data: {each!r} is not of the form "
                    "NAME=azureml:ASSET:VERSION, such as `digits=azureml:digits:1`"
                )
            path = await self._api.path(f"data/{parts['asset']}/versions/{parts['version']}")
            mounts.append(DataMount(name=parts["name"], path=path))
        return mounts


def read_job(told: Json, run: Mapping[str, Any], began: datetime | None = None) -> ServiceJob:
    """Parse a job and the details of its run; `began` is the start time if this time is already
    known. If a node is reclaimed, Azure restarts the job or marks the job as failed. A job that
    waits again after it has run counts as reclaimed.
    """
    status = str(told["properties"]["status"])
    started, ended = began or read_time(run.get("startTimeUtc")), None
    error: Mapping[str, Any] = (run.get("error") or {}).get("error") or {}
    reason, state = str(error.get("message") or ""), JobState.RUNNING
    preempted = _PREEMPTED.search(f"{error.get('code')} {reason}") is not None
    if status in _ENDED:
        state, ended = JobState.ENDED, read_time(run.get("endTimeUtc")) or _changed_at(told)
        started = started or ended  # a job that never started was not billed
        reason = reason or ("" if status == "Completed" else f"Azure Machine Learning: {status}")
    elif status in _WAITING:
        state = JobState.WAITING if started is None else JobState.RECLAIMED
    elif status == "CancelRequested" and started is None:
        state = JobState.WAITING
    if state is JobState.RECLAIMED:
        reason = reason or (
            "Azure reclaimed the job's nodes; Cavvy ends the job, so that Azure does not restart it"
        )
    return ServiceJob(
        id=str(told["name"]),
        name=str(told["name"]),
        state=state,
        started_at=started,
        ended_at=ended,
        preempted=state is JobState.RECLAIMED or (status == "Failed" and preempted),
        reason=reason if state in (JobState.ENDED, JobState.RECLAIMED) else "",
        waits=f"Azure reports: {status} {reason}".rstrip() if state is JobState.WAITING else "",
    )


def _list_used(jobs: Iterable[Json]) -> Mapping[str, datetime | None]:
    """Return the clusters of jobs, with the end of their last job, or None while a job has not
    ended."""
    used: dict[str, datetime | None] = {}
    for each in jobs:
        name = str(each["properties"].get("computeId")).rpartition("/")[2]
        ended = _changed_at(each) if str(each["properties"]["status"]) in _ENDED else None
        last = used.get(name, ended)
        used[name] = max(ended, last) if ended and last else None
    return used


def _changed_at(told: Json) -> datetime | None:
    return read_time((told.get("systemData") or {}).get("lastModifiedAt"))


def _is_old(told: Json, now: datetime) -> bool:
    """Return whether a job ended so long ago that its run history need not be read."""
    changed = _changed_at(told)
    ended = str(told["properties"]["status"]) in _ENDED
    return ended and changed is not None and now - changed >= _SHOWN


def _is_young(job: ServiceJob, now: datetime) -> bool:
    return job.ended_at is None or now - job.ended_at < _SHOWN
