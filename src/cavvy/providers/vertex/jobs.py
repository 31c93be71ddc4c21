"""Runs gangs as custom jobs of Vertex AI."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.formats.services.vertex import (
    ANY_RESERVATION,
    CustomJobRequest,
    Strategy,
    make_custom_job,
    strip_gpus,
)
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.vertex.api import QUOTA, VertexApi, is_gone, read_time
from cavvy.providers.vertex.offers import VertexOffers, name_accelerator
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.records import INSTALLATION, make_mark

_SHOWN = timedelta(hours=6)  # ended jobs are listed for this long after their creation
_FULL = "offer unavailable"  # our code
_ENDED = {
    f"JOB_STATE_{each}"
    for each in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
}
_WAITING = {f"JOB_STATE_{each}" for each in ("QUEUED", "PENDING", "UNSPECIFIED")}
# Words in the error of a job that failed because there was no capacity or because a spot machine
# was reclaimed:
# https://cloud.google.com/vertex-ai/docs/training/use-spot-vms#preemption-handling and
# https://cloud.google.com/vertex-ai/docs/training/understanding-training-service#common-errors
_STOCKOUT = re.compile(r"stockout|resources are insufficient", re.IGNORECASE)
_RESERVATION = re.compile(r"projects/[^/]+/zones/([a-z0-9-]+)-[a-z]/reservations/[^/]+")


class VertexService:
    """Implements `ManagedService`. A job's id is `REGION/NUMBER`."""

    # The limit of names is that of `displayName`. Values of variables have no documented limit.
    # Google documents no time between SIGTERM and SIGKILL for custom jobs. They run on GKE, which
    # gives containers on spot machines 25 seconds by default:
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    traits = managed.ServiceTraits(
        hosts=managed.HostList(cluster="CLUSTER_SPEC"),
        name_limit=128,
        variable_limit=4096,
        stop_s=25,
        # https://cloud.google.com/vertex-ai/docs/training/understanding-training-service
        first_ends_all=True,
        ended_listed=_SHOWN,
        quota_codes=frozenset({QUOTA}),
    )

    def __init__(self, context: ProviderContext) -> None:
        self._settings, self._now = context.settings, context.now
        self._mark = make_mark(context.installation)
        self._credentials = GoogleCredentials(self._settings, "vertex")
        self._api = VertexApi(self._settings, self._credentials)
        self._offers = VertexOffers(context, "vertex", self._api)
        self._ended: dict[str, ServiceJob] = {}  # by id: jobs that cannot change any more
        self._going: frozenset[str] = frozenset()  # jobs that the last list showed as not ended
        # job id -> a job that Vertex AI would start again, because a cancelled job has no reason
        # any more
        self._reclaimed: dict[str, ServiceJob] = {}
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`."""
        account = str(self._settings.get("service_account") or "")
        return [
            ("project", self._credentials.project()),
            ("credentials", self._credentials.describe()),
            ("jobs run as", account or "Vertex AI's service agent for custom code"),
        ]

    async def offers(self) -> Sequence[Offer]:
        return await self._offers.list()

    async def submit(self, request: JobRequest) -> str:
        region = request.offer.region
        self._offers.check_region(region)
        job = self._make_job(request)
        body = {
            "displayName": request.name,
            "jobSpec": make_custom_job(job),
            "labels": dict(request.tags),
        }
        told = await self._api.create(region, body)
        return f"{region}/{str(told['name']).rpartition('/')[2]}"

    async def list(self) -> Sequence[ServiceJob]:
        now = self._now()
        going = " AND ".join(f'state!="{each}"' for each in sorted(_ENDED))
        young = f'create_time>"{(now - _SHOWN).isoformat()}"'
        found: dict[str, ServiceJob] = {}
        for region in self._offers.regions():
            for condition in (going, young):
                mine = f'labels.{INSTALLATION}="{self._mark}" AND {condition}'
                told = await self._api.list(region, mine)
                jobs = [self._read(region, each) for each in told if self._is_ours(each)]
                found |= {each.id: each for each in jobs}
        for each in self._going - found.keys():  # jobs that ended after more than `_SHOWN`
            job = await self.get(each)
            found |= {each: job} if job else {}
        self._going = frozenset(
            each for each, job in found.items() if job.state is not JobState.ENDED
        )
        self._ended = {each: job for each, job in self._ended.items() if _is_young(job, now)}
        self._reclaimed = {
            each: job for each, job in self._reclaimed.items() if each in self._going
        }
        return list(found.values())

    async def get(self, job: str) -> ServiceJob | None:
        if job in self._ended:
            return self._ended[job]
        told = await self._api.find(job)
        return None if told is None else self._read(job.partition("/")[0], told)

    async def stop(self, job: str) -> None:
        try:
            await self._api.cancel(job)
        except CloudFault as fault:
            if is_gone(fault):
                raise CloudFault(404, fault.code, fault.message) from fault
            raise

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == _FULL or _STOCKOUT.search(fault.message) is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    def _is_ours(self, told: Mapping[str, Any]) -> bool:
        return str(told.get("displayName")).startswith(f"{NAME_PREFIX}{self._mark}-")

    def _read(self, region: str, told: Mapping[str, Any]) -> ServiceJob:
        """Parse a reply. A reclaimed job still counts as reclaimed after its cancellation."""
        job = read_job(region, told)
        before = self._reclaimed.get(job.id)
        if job.state is JobState.RECLAIMED:
            self._reclaimed.setdefault(job.id, job)
            return self._reclaimed[job.id]
        if job.state is JobState.ENDED:
            if before is not None:
                job = replace(before, state=JobState.ENDED)
            self._ended[job.id] = job
        return job

    def _make_job(self, request: JobRequest) -> CustomJobRequest:
        gang, offer, settings = request.gang, request.offer, self._settings
        spot = offer.purchase is Purchase.SPOT
        return CustomJobRequest(
            image=find_image("vertex", gang, self._settings).replace("{region}", offer.region),
            command=request.entry.command,
            environment=request.entry.environment,
            machine_type=strip_gpus(offer.instance_type),
            accelerator_type=name_accelerator(offer),
            accelerators=offer.accelerator_count,
            nodes=request.nodes,
            disk_gib=gang.disk_gib or int(settings["disk_gib"]),
            strategy=Strategy.SPOT if spot else Strategy.STANDARD,
            longest_run=gang.job_limit or timedelta(seconds=int(settings["max_run_s"])),
            retries=False,  # only the control plane restarts jobs
            service_account=str(settings.get("service_account") or "") or None,
            network=str(settings.get("network") or "") or None,
            reservation=None if spot else self._reservation(gang, offer.region),
        )

    def _reservation(self, gang: GangSpec, region: str) -> str | None:
        """Return the reservation of a job, or None if the job uses no reservation. Raises Refused
        if the reservation's name is invalid, and CloudFault if the reservation is not in `region`.
        """
        named = str(gang.options.get("reservation") or self._settings.get("reservation") or "")
        if named in ("", "any"):
            return ANY_RESERVATION if named else None
        parts = _RESERVATION.fullmatch(named)
        if parts is None:
            raise Refused(
                f"[providers.vertex] reservation: {named} is not a name such as "
                "projects/PROJECT/zones/us-central1-a/reservations/NAME, or `any`"
            )
        if parts[1] != region:
            raise CloudFault(400, _FULL, f"the reservation {named} is not in {region}")
        return named


def read_job(region: str, told: Mapping[str, Any]) -> ServiceJob:
    """Parse a reply. A spot job whose machines were reclaimed either fails, or continues as a job
    that waits for new machines.
    """
    status, started = str(told["state"]), read_time(told.get("startTime"))
    reason = str((told.get("error") or {}).get("message") or "")
    spot = told["jobSpec"].get("scheduling", {}).get("strategy") == Strategy.SPOT
    stockout = status == "JOB_STATE_FAILED" and _STOCKOUT.search(reason) is not None
    state, ended = _read_state(status, started), None
    if state is JobState.ENDED:
        ended = read_time(told.get("endTime")) or read_time(told.get("updateTime"))
        started = started or ended  # a job that never started was not billed
        reason = reason or ("" if status == "JOB_STATE_SUCCEEDED" else f"Vertex AI: {status}")
    elif state is JobState.RECLAIMED:
        ended = read_time(told.get("updateTime"))
        reason = reason or "Vertex AI reclaimed the machines, and would start the job again"
    ran = told.get("startTime") is not None
    return ServiceJob(
        id=f"{region}/{str(told['name']).rpartition('/')[2]}",
        name=str(told["displayName"]),
        state=state,
        started_at=started,
        ended_at=ended,
        preempted=spot and ran and (stockout or state is JobState.RECLAIMED),
        no_capacity=stockout and not ran,
        reason=reason,
        waits=f"Vertex AI reports: {status} {reason}".rstrip() if state is JobState.WAITING else "",
    )


def _read_state(status: str, started: datetime | None) -> JobState:
    """Return the job's state for a status that Vertex AI reports. A job that waits after it has run
    counts as reclaimed, because Vertex AI would start the job again.
    """
    if status in _ENDED:
        return JobState.ENDED
    if status in _WAITING:
        return JobState.WAITING if started is None else JobState.RECLAIMED
    return JobState.RECLAIMED if status == "JOB_STATE_PAUSED" else JobState.RUNNING


def _is_young(job: ServiceJob, now: datetime) -> bool:
    return job.ended_at is None or now - job.ended_at < _SHOWN
