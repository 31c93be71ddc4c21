"""Runs sessions on notebook instances of Amazon SageMaker:
https://docs.aws.amazon.com/sagemaker/latest/dg/nbi.html

When a notebook instance starts, the instance runs a script from a lifecycle configuration, which is
a separate object in SageMaker. The lifecycle configuration has the notebook's name, and is deleted
some time after the notebook. A notebook is first stopped and then deleted. Stopping a notebook ends
the bill of the notebook's instance, and deleting a notebook also deletes the disk.
"""

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.managed.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.managed.notebooks import NOTEBOOK_TRAITS, NotebookEnds, make_start_script
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.sagemaker.offers import InstanceOffers
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark

_PROVIDER = "sagemaker-notebooks"
_NOTEBOOK, _SCRIPT = "NotebookInstance", "NotebookInstanceLifecycleConfig"  # kinds of objects
# SageMaker's own Jupyter, and the folder of the notebook's disk (2026-11-23):
# https://docs.aws.amazon.com/sagemaker/latest/dg/nbi-lifecycle-config-install.html
_PROGRAMS = "/home/ec2-user/anaconda3/envs/JupyterSystemEnv/bin:/home/ec2-user/anaconda3/bin"
_FOLDER = "/home/ec2-user/SageMaker/.cavvy"
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_NotebookInstanceLifecycleHook.html
# (2026-11-23)
_SCRIPT_LIMIT = 16384  # maximum characters of a script in base64
_OFF = frozenset({"Stopping", "Stopped", "Failed", "Updating"})
_DELETABLE = frozenset({"Stopped", "Failed"})
# SageMaker reports missing notebooks, taken names and wrong states with one code
_INVALID = "ValidationException"
_TAKEN = re.compile(r"duplicate|already exists", re.IGNORECASE)
# "Insufficient notebook instance capacity. Retry later or with a different instance type.":
# https://github.com/aws/amazon-sagemaker-examples/issues/207
_FULL = re.compile(r"insufficient .*capacity|CapacityError", re.IGNORECASE)


class NotebookInstances:
    """Implements `ManagedService`. A job's id is `REGION/NAME`, where NAME is the name of its
    notebook instance.
    """

    # a name is unique in an account and region
    traits = replace(NOTEBOOK_TRAITS, quota_codes=frozenset({"ResourceLimitExceeded"}))

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._aws = AwsService(
            "sagemaker", self._settings, account, gone=frozenset(), provider=_PROVIDER
        )
        self._offers = InstanceOffers(self._aws, context, _PROVIDER, "Notebook")
        self._jupyters: Mapping[str, str] = {}  # job -> address of its Jupyter, from the last list
        self._ends = NotebookEnds(self._now)
        self._leftovers = LeftoverSearch()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""
        facts = [("role", self._role())]
        if unknown := self._offers.unknown:
            facts.append(("instance types that are not in the catalog", ", ".join(unknown)))
        return facts + [(f"notebook {job}", at) for job, at in sorted(self._jupyters.items())]

    async def offers(self) -> Sequence[Offer]:
        self._role()
        return await self._offers.list(Purchase.ON_DEMAND)

    async def submit(self, request: JobRequest) -> str:
        region, name = request.offer.region, request.name
        await self._aws.check_region(region)
        body = self._make(request)
        await self._create(
            region,
            "create_notebook_instance_lifecycle_config",
            **{f"{_SCRIPT}Name": name, "OnStart": [{"Content": _make_script(request)}]},
        )
        await self._create(region, "create_notebook_instance", **body)
        return f"{region}/{name}"

    async def list(self) -> Sequence[ServiceJob]:
        found: dict[str, ServiceJob] = {}
        jupyters: dict[str, str] = {}
        for region in await self._aws.regions():
            told = await self._aws.named(region, self._prefix, "list_notebook_instances", _NOTEBOOK)
            for name, each in told.items():
                job = f"{region}/{name}"
                failed = each["NotebookInstanceStatus"] == "Failed"
                # only a description contains the reason
                read = await self.get(job) if failed and job not in self._ends else None
                found[job] = read or self._ends.note(read_notebook(job, each))
                if each.get("Url") and found[job].state is JobState.RUNNING:
                    jupyters[job] = f"https://{each['Url']}"
            await self._tidy(region, {job.partition("/")[2] for job in found})
        self._ends.forget(found)
        self._jupyters = jupyters
        return list(found.values())

    async def get(self, job: str) -> ServiceJob | None:
        told = await self._describe(job)
        if told is not None:
            return self._ends.note(read_notebook(job, told))
        return self._ends.find(job)

    async def stop(self, job: str) -> None:
        """Execute the next step toward the notebook's deletion. `VmProvider` repeats this call
        until the notebook has ended. A notebook must have started before it can be stopped, and
        must have stopped before it can be deleted.
        """
        told = await self._describe(job)
        if told is None:
            raise CloudFault(404, "ended", "the notebook instance does not exist")
        region, _, name = job.partition("/")
        status = str(told["NotebookInstanceStatus"])
        if status in _DELETABLE:
            step = "delete_notebook_instance"
        elif status == "InService":
            step = "stop_notebook_instance"
        else:
            return
        try:
            await self._aws.call(region, step, NotebookInstanceName=name)
        except CloudFault as fault:
            if fault.code == _INVALID:  # the state has changed since it was read
                raise CloudFault(409, fault.code, fault.message) from fault
            raise

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL.search(f"{fault.code}: {fault.message}") is not None

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    async def _create(self, region: str, operation: str, **body: Any) -> None:
        """Create an object. If the object already exists, an earlier request created it."""
        try:
            await self._aws.call(region, operation, **body)
        except CloudFault as fault:
            if fault.code != _INVALID or not _TAKEN.search(fault.message):
                raise

    async def _describe(self, job: str) -> Mapping[str, Any] | None:
        region, _, name = job.partition("/")
        try:
            return await self._aws.call(
                region, "describe_notebook_instance", NotebookInstanceName=name
            )
        except CloudFault as fault:
            # the one argument is a name that SageMaker accepted before, so the error means that the
            # name is unknown
            if fault.code == _INVALID:
                return None
            raise

    async def _tidy(self, region: str, notebooks: set[str]) -> None:
        """Delete scripts whose notebook was deleted or never created. If deleting a script fails,
        the next search for such scripts deletes the script.
        """
        now = self._now()
        if not self._leftovers.is_due(region, now):
            return
        with suppress(CloudFault):
            scripts = await self._aws.named(
                region,
                self._prefix,
                "list_notebook_instance_lifecycle_configs",
                _SCRIPT,
                CreationTimeBefore=now - UNUSED,
            )
            for name in sorted(scripts.keys() - notebooks)[:MOST_DELETED]:
                await self._aws.call(
                    region, "delete_notebook_instance_lifecycle_config", **{f"{_SCRIPT}Name": name}
                )

    def _make(self, request: JobRequest) -> Mapping[str, Any]:
        """Return the body of the request that creates a notebook instance."""
        settings = self._settings
        body: dict[str, Any] = {
            "NotebookInstanceName": request.name,
            "InstanceType": request.offer.instance_type,
            "RoleArn": self._role(),
            "LifecycleConfigName": request.name,
            "VolumeSizeInGB": request.gang.disk_gib or int(settings["disk_gib"]),
            "InstanceMetadataServiceConfiguration": {"MinimumInstanceMetadataServiceVersion": "2"},
            "Tags": [{"Key": key, "Value": value} for key, value in request.tags.items()],
        }
        if settings.get("platform"):
            body["PlatformIdentifier"] = settings["platform"]
        if settings.get("subnet"):
            body["SubnetId"] = settings["subnet"]
            body["SecurityGroupIds"] = list(list_setting(settings, "security_groups"))
        return body

    def _role(self) -> str:
        role = str(self._settings.get("role") or "")
        if not role:
            raise Refused(f"[providers.{_PROVIDER}] role: not set; each notebook needs a role")
        return role


def read_notebook(job: str, told: Mapping[str, Any]) -> ServiceJob:
    """Parse a notebook instance in a reply. `VmProvider` deletes a notebook that is stopped or
    failed. The bill begins with the notebook's creation, some minutes before its start, because
    SageMaker reports no other time. The bill ends at the last change of the notebook's state.
    """
    status, reason = str(told["NotebookInstanceStatus"]), str(told.get("FailureReason") or "")
    created, ended = told.get("CreationTime"), None
    state = JobState.WAITING if status == "Pending" else JobState.RUNNING
    if status == "Deleting" or status in _OFF:
        ended = told.get("LastModifiedTime")
        state = JobState.ENDED if status == "Deleting" else JobState.RECLAIMED
        reason = reason or f"the notebook instance was stopped (SageMaker reports: {status})"
    return ServiceJob(
        id=job,
        name=str(told["NotebookInstanceName"]),
        state=state,
        # a notebook instance that failed to start is not billed
        started_at=ended if status == "Failed" else created,
        ended_at=ended,
        no_capacity=status == "Failed" and _FULL.search(reason) is not None,
        reason=reason if ended else "",
        waits=f"SageMaker reports: {status}" if state is JobState.WAITING else "",
    )


def _make_script(request: JobRequest) -> str:
    """Return the script that starts the agent, in base64. Raises Refused if SageMaker would not
    accept the script. When the agent has ended, the script tries to stop the notebook.
    """
    region = request.offer.region
    last = ["aws", "sagemaker", "stop-notebook-instance", "--region", region]
    last += ["--notebook-instance-name", request.name]
    script = make_start_script(request, _PROGRAMS, folder=_FOLDER, last=shlex.join(last))
    text = base64.b64encode(script.encode()).decode()
    if len(text) > _SCRIPT_LIMIT:
        raise Refused(
            f"the notebook's script has {len(text)} characters in base64, and SageMaker allows "
            f"{_SCRIPT_LIMIT}; shorten `server.advertise` or the certificate"
        )
    return text
