"""Instances of Vertex AI Workbench: each session is a managed notebook, which starts the agent.

Google runs a script on a new instance only from Cloud Storage, so the setting `script` names a
short script in Cloud Storage. The short script then runs Cavvy's own script, which is in the
instance's metadata: https://cloud.google.com/vertex-ai/docs/workbench/instances/manage-metadata
(2026-11-23)

Google bills a Workbench instance as a machine of Compute Engine, and adds a management fee for each
vCPU and each GPU. Google publishes the fees only on a web page, so the setting `fees` contains
them.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import Feature, ProviderContext, Refused
from cavvy.providers.formats.services.vertex import find_accelerator, is_custom_job_type, strip_gpus
from cavvy.providers.gcp import KEY_FILE, MACHINES, project
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.managed.notebooks import NOTEBOOK_TRAITS, NotebookEnds, make_start_script
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.settings import disk_setting, project_number, project_text, text
from cavvy.providers.vertex.api import QUOTA, VertexApi, read_time
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark
from cavvy.providers.vm.rest import Json

PRICING = "https://cloud.google.com/vertex-ai/pricing#notebooks"
_DOCS = "https://cloud.google.com/vertex-ai/docs/workbench"
_API = f"{_DOCS}/reference/rest/v2/projects.locations.instances"

MANIFEST = NotebookManifest(
    name="vertex-workbench",
    title="Vertex AI Workbench",
    cloud="cavvy.providers.vertex_workbench:WorkbenchInstances",
    rights="notebooks.instances.create, get, list and delete, and notebooks.operations.get (the "
    "role Notebooks Admin, roles/notebooks.admin, contains them), and iam.serviceAccounts.actAs "
    "for the account of the notebooks",
    unsupported={
        **list_unsupported_by_notebooks(
            "Google",
            "a Workbench instance",
            images=f"{_DOCS}/instances/introduction",
            api=_API,
            deletion=_API,
        ),
        Feature.VOLUMES: "a Workbench instance gets only new disks, no existing ones; copy data "
        f"from and to a bucket instead ({_API})",
        Feature.MOUNTS: "Cavvy mounts no folders on a Workbench instance; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.NETWORK: f"Google neither reports nor selects the speed of the network ({_API})",
        Feature.DISK: "`resources.disk` selects the size of the disk; its type cannot be selected "
        f"yet ({_API})",
    },
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("notebooks"),
        KEY_FILE,
        project_text(
            "zones",
            "The zones to use, separated by commas, such as `us-central1-a, us-central1-b`. "
            "Required.",
        ),
        project_text(
            "script",
            "The address in Cloud Storage of the script that starts Cavvy's script, such as "
            "`gs://my-bucket/cavvy.sh`; docs/guides/notebooks.md shows its three lines. The "
            "account of the "
            "notebooks needs the right to read the script. Required.",
        ),
        project_text(
            "fees",
            "Google's management fees in US dollars an hour, for each vCPU and for each GPU of a "
            f"type, such as `vCPU=0.01, T4=0.02`, from {PRICING}. Machines whose GPU has no "
            "fee here are not offered. This setting is required, because Google publishes these "
            "prices only on a web page. If a fee is 0, plans and bills do not contain it.",
        ),
        MACHINES,
        project_text(
            "service_account",
            "The e-mail address of the service account of the notebooks. The work in a session "
            "runs with the account's permissions. The default is the default account of Compute "
            "Engine.",
        ),
        project_text(
            "owner",
            "The e-mail address of the person who may open the notebooks' own Jupyter. By default, "
            "each person who may act as the service account may open Jupyter.",
        ),
        project_text(
            "network",
            "The network of notebooks, as projects/PROJECT/global/networks/NAME. The default is "
            "the project's network `default`.",
        ),
        project_text(
            "subnet",
            "The subnet of notebooks, as projects/PROJECT/regions/REGION/subnetworks/NAME. By "
            "default, Google selects the subnet of the zone's region.",
        ),
        disk_setting(
            "The size of a notebook's data disk, which contains the session's files, unless the "
            "task requests another size. Google bills this disk, and a boot disk of 150 GB, in "
            "addition to the instance.",
            100,
            minimum=10,
        ),
        project_number(
            "idle_stop_s",
            "Google stops a notebook whose own Jupyter has run no kernel for this time. Google "
            "does not see sessions that Cavvy opens; `--keep` ends idle sessions sooner.",
            default=259_200,
            minimum=600,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of the Notebooks API.",
            "https://notebooks.googleapis.com/v2",
        ),
    ),
)


_PROVIDER = "vertex-workbench"
SCRIPT = "cavvy-script"  # the key of the instance's metadata with the script
_AGE = timedelta(minutes=10)  # of offers
_SHOWN = timedelta(hours=6)  # requested deletions are remembered for this long
# Google's own Jupyter, and the folder of the data disk (2026-11-23):
# https://cloud.google.com/vertex-ai/docs/workbench/instances/introduction
_PROGRAMS, _FOLDER = "/opt/conda/bin", "/home/jupyter/.cavvy"
# https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-resource-availability and
# https://cloud.google.com/compute/resource-usage
_FULL = re.compile(
    r"ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources|stockout|"
    r"currently unavailable|Quota '\S+' exceeded",
    re.IGNORECASE,
)
# https://cloud.google.com/vertex-ai/docs/workbench/reference/rest/v2/projects.locations.instances
# (revision 20261006)
_WAITING = frozenset({"INITIALIZING", "PROVISIONING", "STARTING"})
_OFF = frozenset({"STOPPING", "STOPPED", "SUSPENDING", "SUSPENDED", "ORPHANED"})
_FEE = re.compile(r"(?P<part>[A-Za-z0-9-]+)\s*=\s*(?P<usd>\d{1,3}(?:\.\d{1,9})?)")
_CPU = "vcpu"
_MICROS = 1_000_000
# accelerator types of the Notebooks API, version 2, that custom jobs have too
_GPUS = frozenset(
    {
        *("NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_T4"),
        *("NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_L4", "NVIDIA_H100_80GB"),
        *("NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB", "NVIDIA_B200"),
    }
)


class _Deletion(NamedTuple):
    """A deletion that Google has accepted."""

    operation: str
    at: datetime


class WorkbenchInstances:
    """Implements `ManagedService`. A job's id is `ZONE/NAME`, where NAME is the name of its
    instance.
    """

    # A name is unique in a project and zone. Machines of Compute Engine have 90 seconds to end:
    # https://cloud.google.com/compute/docs/instances/deleting-instance (2026-11-23)
    traits = replace(NOTEBOOK_TRAITS, stop_s=90, quota_codes=frozenset({QUOTA}))

    def __init__(self, context: ProviderContext) -> None:
        self._settings, self._now = context.settings, context.now
        self._list_prices = context.list_prices
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._credentials = GoogleCredentials(self._settings, _PROVIDER)
        self._api = VertexApi(self._settings, self._credentials, "instances")
        self._offers: tuple[datetime, Sequence[Offer]] | None = None
        self._unpriced: Sequence[str] = ()
        self._jupyters: Mapping[str, str] = {}  # job -> address of its Jupyter, from the last list
        self._ends = NotebookEnds(self._now)
        self._creations: dict[str, str] = {}  # job -> the operation that creates it
        self._failed: dict[str, str] = {}  # job -> why its creation failed
        self._deletions: dict[str, _Deletion] = {}  # by job
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        account = str(self._settings.get("service_account") or "")
        facts = [
            ("project", self._credentials.project()),
            ("credentials", self._credentials.describe()),
            ("notebooks run as", account or "the default account of Compute Engine"),
        ]
        if self._unpriced:
            facts.append(("GPUs without a fee", ", ".join(self._unpriced)))
        return facts + [(f"notebook {job}", at) for job, at in sorted(self._jupyters.items())]

    async def offers(self) -> Sequence[Offer]:
        """Return the offers. Offers older than ten minutes are computed again, because the catalog
        may have been refreshed.
        """
        now = self._now()
        if self._offers is None or now - self._offers[0] >= _AGE:
            self._need("script")
            fees, zones = read_fees(self._need("fees")), self._zones()
            # a missing right is reported before a plan relies on it
            await asyncio.gather(*(self._api.check(each) for each in zones))
            patterns = list_setting(self._settings, "machines")
            regions = {each.rpartition("-")[0] for each in zones}
            known = [
                each
                for each in await asyncio.to_thread(self._list_prices, "gcp")
                if each.region in regions
                and any(fnmatchcase(each.instance_type, pattern) for pattern in patterns)
            ]
            self._unpriced = list_unpriced(known, fees)
            self._offers = now, make_offers(known, zones, fees)
        return self._offers[1]

    async def submit(self, request: JobRequest) -> str:
        zone = request.offer.zone or ""
        if zone not in self._zones():  # `list` would never return its notebooks
            raise Refused(f"the zone {zone} is not among the `zones` of the settings")
        job = f"{zone}/{request.name}"
        try:
            told = await self._api.create(zone, self._make(request), instanceId=request.name)
        except CloudFault as fault:
            if fault.code != "ALREADY_EXISTS":  # an earlier request created the instance
                raise
        else:
            self._creations[job] = str(told["name"])
        return job

    async def list(self) -> Sequence[ServiceJob]:
        found: dict[str, ServiceJob] = {}
        jupyters: dict[str, str] = {}
        for zone in self._zones():
            for told in await self._api.list(zone):
                name = str(told.get("name")).rpartition("/")[2]
                if not name.startswith(self._prefix):
                    continue
                job = await self._read(f"{zone}/{name}", told)
                found[job.id] = job
                if told.get("proxyUri") and job.state is JobState.RUNNING:
                    jupyters[job.id] = f"https://{told['proxyUri']}"
        self._ends.forget(found)
        since = self._now() - _SHOWN
        self._deletions = {
            job: each for job, each in self._deletions.items() if job in found or each.at > since
        }
        self._jupyters = jupyters
        return list(found.values())

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._api.find(job)
        if told is not None:
            return await self._read(job, told)
        if reason := await self._why_failed(job):
            self._ends.note(self._fail(_unlisted(job), reason))
        return self._ends.find(job)

    async def stop(self, job: str) -> None:
        """Delete the instance with its disks. `VmProvider` repeats this call until the instance no
        longer exists.
        """
        known = self._deletions.get(job)
        if known is not None:
            told = await self._api.operation(known.operation)
            if not told.get("error"):
                raise CloudFault(404, "deleting", "Google is deleting the notebook")
            del self._deletions[job]
        told = await self._api.delete(job)
        self._deletions[job] = deletion = _Deletion(str(told["name"]), self._now())
        self._ends.note(_end(_unlisted(job), deletion))

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code != QUOTA and _FULL.search(fault.message) is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    async def _read(self, job: str, told: Json) -> ServiceJob:
        """Parse an instance. An instance whose creation failed can still be listed as waiting, and
        an instance whose deletion was accepted can still be listed as running.
        """
        found = read_instance(job, told)
        deletion = self._deletions.get(job)
        if deletion is not None:
            found = _end(found, deletion)
        elif found.state is JobState.WAITING and (reason := await self._why_failed(job)):
            found = self._fail(found, reason)
        return self._ends.note(found)

    async def _why_failed(self, job: str) -> str:
        """Return why the creation of an instance failed, or "" if no failure is known."""
        operation = self._creations.get(job)
        if operation is not None:
            told = await self._api.operation(operation)
            if told.get("done"):
                del self._creations[job]
                if told.get("error"):
                    self._failed[job] = str(told["error"].get("message") or "Google gave no reason")
        return self._failed.get(job, "")

    def _fail(self, job: ServiceJob, reason: str) -> ServiceJob:
        """Return an instance whose creation failed. Google does not bill such an instance."""
        now, full = self._now(), _FULL.search(reason) is not None
        return replace(
            job,
            state=JobState.RECLAIMED,
            started_at=now,
            ended_at=now,
            no_capacity=full,
            reason=reason,
        )

    def _make(self, request: JobRequest) -> Mapping[str, Any]:
        """Return the body of the request that creates an instance."""
        settings, offer = self._settings, request.offer
        size = request.gang.disk_gib or int(settings["disk_gib"])
        setup: dict[str, Any] = {
            "machineType": strip_gpus(offer.instance_type),
            "dataDisks": [{"diskSizeGb": str(size)}],
            "metadata": {
                SCRIPT: make_start_script(request, _PROGRAMS, folder=_FOLDER, last="poweroff"),
                "post-startup-script": self._need("script"),
                "post-startup-script-behavior": "run_once",
                "idle-timeout-seconds": str(int(settings["idle_stop_s"])),
            },
        }
        if offer.accelerator is not None:
            setup["acceleratorConfigs"] = [
                {"type": find_gpu(offer), "coreCount": str(offer.accelerator_count)}
            ]
            setup["gpuDriverConfig"] = {"enableGpuDriver": True}
        if settings.get("service_account"):
            setup["serviceAccounts"] = [{"email": settings["service_account"]}]
        network = {name: settings[name] for name in ("network", "subnet") if settings.get(name)}
        if network:
            setup["networkInterfaces"] = [network]
        owner = {"instanceOwners": [settings["owner"]]} if settings.get("owner") else {}
        return {"gceSetup": setup, "labels": dict(request.tags), **owner}

    def _zones(self) -> Sequence[str]:
        self._need("zones")
        return list_setting(self._settings, "zones")

    def _need(self, name: str) -> str:
        value = str(self._settings.get(name) or "")
        if not value:
            raise Refused(f"[providers.{_PROVIDER}] {name}: not set; Workbench needs it")
        return value


def read_instance(job: str, told: Json) -> ServiceJob:
    """Parse an instance. `VmProvider` deletes an instance that is off. The bill begins with the
    instance's creation, some minutes before its start, because Google reports no other time.
    """
    status = str(told["state"])
    state = JobState.WAITING if status in _WAITING else JobState.RUNNING
    ended, reason = None, ""
    if status == "DELETED" or status in _OFF:
        state = JobState.ENDED if status == "DELETED" else JobState.RECLAIMED
        ended = read_time(told.get("updateTime"))
        reason = f"the notebook was stopped (Google reports: {status})"
    return ServiceJob(
        id=job,
        name=job.partition("/")[2],
        state=state,
        started_at=read_time(told.get("createTime")),
        ended_at=ended,
        reason=reason,
        waits=f"Google reports: {status}" if state is JobState.WAITING else "",
    )


def _end(job: ServiceJob, deletion: _Deletion) -> ServiceJob:
    """Return an instance whose deletion Google has accepted. Google no longer bills the instance's
    machine.
    """
    return replace(job, state=JobState.RECLAIMED, ended_at=job.ended_at or deletion.at)


def _unlisted(job: str) -> ServiceJob:
    """Return an instance with only an id, a name and a state."""
    return ServiceJob(id=job, name=job.partition("/")[2], state=JobState.RECLAIMED)


class Fees(Struct, frozen=True, kw_only=True):
    """Management fees in US dollars an hour, keyed by the lower-case name of the component."""

    usd: Mapping[str, Decimal]

    def of(self, offer: Offer) -> int | None:
        """Return the fee of a machine in micro-dollars an hour, rounded half up, or None if the fee
        is unknown.
        """
        gpu = Decimal(0)
        if offer.accelerator is not None:
            known = self.usd.get(offer.accelerator.lower())
            if known is None:
                return None
            gpu = known * offer.accelerator_count
        whole = self.usd[_CPU] * Decimal(str(offer.vcpus)) + gpu
        return int((whole * _MICROS).to_integral_value(ROUND_HALF_UP))


def read_fees(text: str) -> Fees:
    """Parse the setting `fees`. Raises Refused."""
    found: dict[str, Decimal] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        parts = _FEE.fullmatch(each)
        if parts is None:
            raise Refused(
                f"[providers.vertex-workbench] fees: {each!r} is not a fee such as `vCPU=0.01`"
            )
        found[parts["part"].lower()] = Decimal(parts["usd"])
    if _CPU not in found:
        raise Refused(
            "[providers.vertex-workbench] fees: the fee for a vCPU is not set; enter Google's "
            f"management fees from {PRICING}, such as `vCPU=0.01, T4=0.02`"
        )
    return Fees(usd=found)


def make_offers(known: Sequence[Offer], zones: Sequence[str], fees: Fees) -> Sequence[Offer]:
    """Return the offers in these zones, at prices that include the management fees. Machines with
    GPUs whose fee is unknown are omitted.
    """
    return [
        replace(
            each,
            provider="vertex-workbench",
            zone=zone,
            capacity=None,
            rate=HourlyRate(each.rate.micros_per_hour + fee),
            source=f"{each.source}, and the management fee of the setting `fees`",
        )
        for zone in zones
        for each in known
        if each.region == zone.rpartition("-")[0] and _is_sold(each)
        if (fee := fees.of(each)) is not None
    ]


def list_unpriced(known: Sequence[Offer], fees: Fees) -> Sequence[str]:
    """Return the GPUs whose fee is unknown."""
    without = [each for each in known if _is_sold(each) and fees.of(each) is None]
    return sorted({str(each.accelerator) for each in without})


def find_gpu(offer: Offer) -> str | None:
    """Return the name of the offer's accelerator type in the Notebooks API. Return None if the
    offer has no GPU, or if the API has no type for the offer's GPU.
    """
    if offer.accelerator is None:
        return None
    found = find_accelerator(offer.instance_type, offer.accelerator, offer.accelerator_memory_mib)
    return found if found in _GPUS else None


def _is_sold(offer: Offer) -> bool:
    """Return whether a Workbench instance can use the machine of this offer of Compute Engine."""
    whole = offer.purchase is Purchase.ON_DEMAND and offer.accelerator_part == 1
    if not whole or not is_custom_job_type(offer.instance_type):
        return False
    return offer.accelerator is None or find_gpu(offer) is not None
