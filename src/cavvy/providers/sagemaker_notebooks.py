"""Notebook instances of Amazon SageMaker: each session is a managed notebook, which starts the
agent.

When a notebook instance starts, the instance runs a script from a lifecycle configuration, which is
a separate object in SageMaker. The lifecycle configuration has the notebook's name, and is deleted
some time after the notebook. A notebook is first stopped and then deleted. Stopping a notebook ends
the bill of the notebook's instance, and deleting a notebook also deletes the disk:
https://docs.aws.amazon.com/sagemaker/latest/dg/nbi.html
"""

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.values import replace
from cavvy.providers.aws import ACCOUNT, REGIONS
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import Feature, ProviderContext, Refused
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.managed.notebooks import NOTEBOOK_TRAITS, make_start_script
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob
from cavvy.providers.sagemaker import INSTANCES
from cavvy.providers.sagemaker.objects import QUOTA, SageMakerObjects
from cavvy.providers.settings import disk_setting, project_text
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting

_DOCS = "https://docs.aws.amazon.com/sagemaker/latest"
_API = f"{_DOCS}/APIReference/API_CreateNotebookInstance.html"

MANIFEST = NotebookManifest(
    name="sagemaker-notebooks",
    title="Amazon SageMaker notebook instances",
    cloud="cavvy.providers.sagemaker_notebooks:NotebookInstances",
    rights="sagemaker:CreateNotebookInstance, DescribeNotebookInstance, ListNotebookInstances, "
    "StopNotebookInstance, DeleteNotebookInstance, CreateNotebookInstanceLifecycleConfig, "
    "ListNotebookInstanceLifecycleConfigs, "
    "DeleteNotebookInstanceLifecycleConfig and AddTags, pricing:GetProducts, and iam:PassRole for "
    "the role of the setting `role`",
    unsupported={
        **list_unsupported_by_notebooks(
            "SageMaker",
            "a notebook instance",
            images=f"{_DOCS}/dg/nbi.html",
            api=_API,
            deletion=f"{_DOCS}/dg/API_DeleteNotebookInstance.html",
        ),
        Feature.VOLUMES: "a notebook instance attaches no other disks; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.MOUNTS: "Cavvy mounts no folders on a notebook instance; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.NETWORK: f"SageMaker neither reports nor selects the speed of the network ({_API})",
        Feature.DISK: "SageMaker selects the type of the disk; `resources.disk` selects its size "
        f"({_API})",
        Feature.SELF_END: "a notebook instance can stop itself only if the role in `role` permits "
        "sagemaker:StopNotebookInstance, which Cavvy does not check; the disk of a stopped "
        "notebook instance is billed until Cavvy deletes the instance "
        f"({_DOCS}/APIReference/API_StopNotebookInstance.html)",
    },
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "role",
            "The ARN of the execution role of notebooks. The work in a session runs with the "
            "role's permissions. With the right sagemaker:StopNotebookInstance, a notebook whose "
            "agent has ended stops itself, even if the server is lost. Required.",
        ).for_setup(),
        INSTANCES,
        project_text(
            "platform",
            "The platform of notebooks, such as `notebook-al2023-v1`. By default, AWS selects the "
            "platform.",
        ),
        project_text(
            "subnet",
            "The subnet of notebooks, for connections to your network. By default, notebooks run "
            "in SageMaker's own network.",
        ),
        project_text("security_groups", "The security groups of notebooks, if `subnet` is set."),
        disk_setting(
            "The size of a notebook's disk, which contains the session's files, unless the task "
            "requests another size. AWS bills the disk in addition to the instance.",
            50,
            minimum=5,
        ),
    ),
)


_SCRIPT = "NotebookInstanceLifecycleConfig"
# SageMaker's own Jupyter, and the folder of the notebook's disk (2026-11-23):
# https://docs.aws.amazon.com/sagemaker/latest/dg/nbi-lifecycle-config-install.html
_PROGRAMS = "/home/ec2-user/anaconda3/envs/JupyterSystemEnv/bin:/home/ec2-user/anaconda3/bin"
_FOLDER = "/home/ec2-user/SageMaker/.cavvy"
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_NotebookInstanceLifecycleHook.html
# (2026-11-23)
_SCRIPT_LIMIT = 16384  # maximum characters of a script in base64
_OFF = frozenset({"Stopping", "Stopped", "Failed", "Updating"})
_DELETABLE = frozenset({"Stopped", "Failed"})
# "Insufficient notebook instance capacity. Retry later or with a different instance type.":
# https://github.com/aws/amazon-sagemaker-examples/issues/207
_FULL = re.compile(r"insufficient .*capacity|CapacityError", re.IGNORECASE)


class NotebookInstances(SageMakerObjects):
    """Implements `ManagedService`. A job's id is `REGION/NAME`, where NAME is the name of its
    notebook instance.
    """

    provider, title, use = "sagemaker-notebooks", "notebook", "Notebook"
    kind, parts, failed = "NotebookInstance", (_SCRIPT,), frozenset({"Failed"})
    # a name is unique in an account and region
    traits = replace(NOTEBOOK_TRAITS, quota_codes=frozenset({QUOTA}))

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        super().__init__(context, account)
        self._jupyters: Mapping[str, str] = {}  # job -> address of its Jupyter, from the last list

    def identity(self) -> Sequence[tuple[str, str]]:
        notebooks = sorted(self._jupyters.items())
        return [*super().identity(), *((f"notebook {job}", at) for job, at in notebooks)]

    @staticmethod
    def read(job: str, told: Mapping[str, Any]) -> ServiceJob:
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

    async def submit(self, request: JobRequest) -> str:
        region, name = request.offer.region, request.name
        await self._aws.check_region(region)
        body, script = self._make(request), [{"Content": _make_script(request)}]
        await self._create(region, _SCRIPT, **{f"{_SCRIPT}Name": name, "OnStart": script})
        await self._create(region, "NotebookInstance", **body)
        return f"{region}/{name}"

    async def list(self) -> Sequence[ServiceJob]:
        found = await self._list()
        self._jupyters = {
            job: f"https://{told['Url']}"
            for job, (read, told) in found.items()
            if told.get("Url") and read.state is JobState.RUNNING
        }
        return [job for job, _ in found.values()]

    async def stop(self, job: str) -> None:
        """Execute the next step toward the notebook's deletion. `VmProvider` repeats this call
        until the notebook has ended. A notebook must have started before it can be stopped, and
        must have stopped before it can be deleted.
        """
        told = await self._describe(job)
        if told is None:
            raise CloudFault(404, "ended", "the notebook instance does not exist")
        status = str(told["NotebookInstanceStatus"])
        if status in _DELETABLE:
            await self._change(job, "delete")
        elif status == "InService":
            await self._change(job, "stop")

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL.search(f"{fault.code}: {fault.message}") is not None

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
