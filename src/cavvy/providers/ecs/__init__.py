"""Amazon ECS: each rank of a gang is one task of a cluster, and the task's container starts the
agent.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.aws import ACCOUNT, NOTICES
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import Feature, GangSpec, ProviderContext, Refused
from cavvy.providers.ecs.capacity import PURCHASES, Capacity, EcsCapacity, parse_capacity
from cavvy.providers.formats.services.ecs import (
    EcsTaskRequest,
    LaunchType,
    make_run,
    make_task_definition,
)
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.aws import AwsService, JobDefinitions
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.notices import NoticeSource
from cavvy.providers.settings import project_flag, project_number, project_text
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark

_GUIDE = "https://docs.aws.amazon.com/AmazonECS/latest/developerguide"
_TASKS = f"{_GUIDE}/task_definition_parameters.html"
_STORAGE = f"{_GUIDE}/fargate-task-storage.html"

MANIFEST = JobManifest(
    name="ecs",
    title="Amazon ECS",
    cloud="cavvy.providers.ecs:EcsService",
    # Fargate: SIGKILL follows SIGTERM after 120 seconds; the agent needs 10 of them for its last
    # report. EC2: the instance's metadata announce the end of a spot instance 120 seconds in
    # advance.
    notice=timedelta(seconds=110),
    rights="ecs:RegisterTaskDefinition, DeregisterTaskDefinition, DeleteTaskDefinitions, RunTask, "
    "StopTask, ListTasks, DescribeTasks, DescribeClusters and TagResource, and iam:PassRole for "
    "the roles that the settings name",
    unsupported={
        **list_unsupported_by_jobs("a task", page=_TASKS, disk=_STORAGE),
        Feature.LOGIN: "ECS pulls images with the rights of the role in `execution_role` or, on "
        "EC2, of the instances' role; secrets for other registries are not supported yet "
        f"({_GUIDE}/private-auth.html)",
        Feature.CAPACITY: "ECS does not report free capacity; a task without capacity fails or "
        f"waits, and Cavvy tries the next best offer ({_GUIDE}/api_failures_messages.html)",
        Feature.VOLUMES: "ECS creates a new volume for each task, and attaches no existing volume; "
        f"copy data from and to a bucket instead ({_GUIDE}/ebs-volumes.html)",
        Feature.MOUNTS: "a task is a container, in which host folders and EFS cannot be mounted "
        f"yet ({_TASKS})",
        Feature.NETWORK: f"ECS neither reports nor selects the speed of the network ({_TASKS})",
        Feature.DISK: "a task on Fargate has 20 GiB, and larger disks are not supported yet "
        f"({_STORAGE}); the Auto Scaling group selects the disks of its instances",
    },
    options={
        "image": "the container image, in the format of the setting `image`",
        "launch_type": "`EC2` or `FARGATE`, for exported files only; the setting `capacity` "
        "selects where jobs run",
    },
    docs="docs/guides/ecs.md",
    settings=(
        project_text(
            "regions",
            "The region of the cluster. The default is the region of the AWS configuration.",
        ).for_setup(),
        *ACCOUNT,
        project_text("cluster", "The name of the cluster that runs the tasks.", "default"),
        project_text(
            "capacity",
            "The capacity providers of the cluster to use, separated by commas: `FARGATE`, "
            "`FARGATE_SPOT`, and `NAME=INSTANCE_TYPE` for a capacity provider whose Auto Scaling "
            "group has one instance type. `/spot` after the type means spot instances. `/paid` "
            "means instances that are already paid for, so that tasks cost nothing. Required.",
        ),
        project_text(
            "subnets",
            "The subnets of tasks on Fargate, separated by commas. Required for Fargate.",
        ),
        project_text(
            "security_groups",
            "The security groups of tasks on Fargate, separated by commas. The default is the "
            "default security group of the VPC.",
        ),
        project_flag(
            "public_address",
            "Tasks on Fargate get a public address, which is billed. Without a public address, "
            "the subnets need another route to the server, such as a NAT gateway.",
            default=True,
        ),
        project_text(
            "image",
            "The image of jobs whose task names no image. `{region}` stands for the region. "
            "Without "
            "this setting, each task must name an image.",
        ),
        project_text(
            "execution_role",
            "The ARN of the role that pulls the image and writes logs. Fargate needs this role "
            "for images in Amazon ECR and for `log_group`.",
        ),
        project_text(
            "task_role",
            "The ARN of the role that gives the work its permissions. The default is no role.",
        ),
        project_text(
            "log_group",
            "The log group of CloudWatch to which ECS copies the output of containers. By default, "
            "ECS copies no output; Cavvy stores the logs of jobs in any case.",
        ),
        project_number(
            "memory_percent",
            "The percentage of an instance's memory that a task requests; ECS needs the rest.",
            default=90,
            minimum=1,
            unit="percent",
            whole=True,
        ),
    ),
)


RANK = "CAVVY_CONTAINER_RANK"  # the environment variable with a container's rank
_MOST_DESCRIBED = 100  # maximum tasks in one call
_FULL = "not placed"  # Cavvy's own code
# the longest time between SIGTERM and SIGKILL on Fargate:
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ContainerDefinition.html
_STOP = timedelta(seconds=120)
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_Task.html; examples of interrupted
# tasks of Fargate Spot have either code, and those of a terminated instance the latter
_INTERRUPTED = frozenset({"SpotInterruption", "TerminationNotice"})
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-lifecycle-explanation.html
_STARTS = frozenset({"PROVISIONING", "PENDING", "ACTIVATING"})
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/api_failures_messages.html: the starts
# of the reasons. No other field of a task says so: none of the seven values of `stopCode`
# (https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_Task.html) is about capacity, and
# TaskFailedToStart also stands for images that cannot be pulled and agents that are not connected.
_NO_ROOM = ("RESOURCE:", "Capacity is unavailable", "EMPTY CAPACITY PROVIDER")
# a cluster has a maximum number of tasks that wait for instances; ECS has no code for this:
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-quotas.html
_QUEUE_FULL = "Tasks provisioning capacity limit exceeded"
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/ECS_Idempotency.html
_CONFLICT = "ConflictException"
_NO_GPU = (
    "Fargate has no GPUs (https://docs.aws.amazon.com/AmazonECS/latest/developerguide/"
    "fargate-tasks-services.html), and the setting `capacity` names only Fargate; add a capacity "
    "provider with GPU instances, such as `gpu=g5.xlarge`"
)


class EcsService:
    """Implements `ManagedService`. A job is one task of ECS, and its id is the task's ARN. The name
    of the job is the family of its task definition.
    """

    # stopped tasks are listed for at least an hour:
    # https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_ListTasks.html
    traits = managed.ServiceTraits(
        hosts=managed.HostList(index=RANK),
        name_limit=128,
        unique_names=True,
        variable_limit=2048,
        stop_s=_STOP.total_seconds(),
        single=True,
        ended_listed=timedelta(hours=1),
    )

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings = context.settings
        self._started_by = f"cavvy-{make_mark(context.installation)}"
        self._aws = AwsService("ecs", self._settings, account, gone=frozenset(), provider="ecs")
        self._definitions = JobDefinitions(self._aws, "task", deletes=True)
        self._capacity = EcsCapacity(self._aws, context)
        self._ended: dict[str, ServiceJob] = {}  # by id: tasks that cannot change any more
        self._live: dict[str, ServiceJob] = {}  # by id: other tasks, as last described
        self._foreign: frozenset[str] = (
            frozenset()
        )  # stopped tasks that are not this installation's

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which reads the
        cluster."""
        left = [f"{name}: {why}" for name, why in self._capacity.left_out.items()]
        return [
            ("cluster", self._capacity.cluster),
            *([("capacity without offers", "; ".join(left))] if left else []),
        ]

    async def offers(self) -> Sequence[Offer]:
        return await self._capacity.offers()

    async def submit(self, request: JobRequest) -> str:
        region = await self._aws.only_region("cluster")
        entries = {each.name: each for each in parse_capacity(self._settings)}
        capacity = entries.get(request.offer.zone or "")
        if request.offer.region != region or capacity is None:
            raise Refused(
                f"the capacity provider {request.offer.zone} in {request.offer.region} is not in "
                "the setting `capacity`"
            )
        if request.offer.key not in [each.key for each in await self._capacity.offers()]:
            reason = self._capacity.left_out.get(capacity.name, "other machines are offered")
            raise CloudFault(400, _FULL, f"{request.offer.key} is not offered now: {reason}")
        task = self._make_task(request, capacity)
        made = await self._aws.call(
            region, "register_task_definition", **make_task_definition(task)
        )
        definition = str(made["taskDefinition"]["taskDefinitionArn"])
        try:
            told = await self._aws.call(region, "run_task", **make_run(task))
        except CloudFault as fault:
            if not fault.uncertain:
                await self._definitions.remove(region, [definition])
            raise _read_refusal(fault) from fault
        if not told.get("tasks"):
            await self._definitions.remove(region, [definition])
            raise CloudFault(400, _FULL, _tell_failures(told.get("failures", ())))
        return str(told["tasks"][0]["taskArn"])

    async def list(self) -> Sequence[ServiceJob]:
        region, cluster = await self._aws.only_region("cluster"), self._capacity.cluster
        # ECS allows no second filter together with `startedBy`, which selects only tasks that
        # should run. They are listed first, so that a task that stops between the two calls is not
        # missed.
        found: dict[str, None] = {}
        for wanted in ({"startedBy": self._started_by}, {"desiredStatus": "STOPPED"}):
            told = await self._aws.pages(
                region, "list_tasks", "taskArns", "nextToken", cluster=cluster, **wanted
            )
            found |= dict.fromkeys(map(str, told))
        self._ended = {each: job for each, job in self._ended.items() if each in found}
        self._foreign &= found.keys()
        unknown = [each for each in found if each not in self._ended and each not in self._foreign]
        described = await self._describe(region, unknown)
        # ECS may list a task and not describe it for a moment
        lost = found.keys() & self._live.keys() - {each.id for each in described}
        jobs = [*described, *(self._live[each] for each in sorted(lost - self._ended.keys()))]
        self._live = {each.id: each for each in jobs if each.state is not JobState.ENDED}
        listed = {each.id: each for each in (*self._ended.values(), *jobs)}
        await self._definitions.tidy(region)
        return list(listed.values())

    async def get(self, job: str) -> ServiceJob | None:
        if job in self._ended:
            return self._ended[job]
        return next(iter(await self._describe(await self._aws.only_region("cluster"), [job])), None)

    async def stop(self, job: str) -> None:
        if job in self._ended:
            raise CloudFault(404, "ended", "the task has ended")
        region, cluster = await self._aws.only_region("cluster"), self._capacity.cluster
        try:
            await self._aws.call(
                region, "stop_task", cluster=cluster, task=job, reason="Cavvy removed the job"
            )
        except CloudFault as fault:
            # the same code as for other wrong arguments means that the task is no longer known
            if fault.code == "InvalidParameterException" and await self.get(job) is None:
                raise CloudFault(404, fault.code, fault.message) from fault
            raise

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == _FULL

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        try:
            entries = parse_capacity(self._settings)
        except Refused:  # `offers` reports the problem
            return ()
        serverless = not any(each.instance_type for each in entries)
        if serverless and all(each.accelerators for each in task.resources.choices):
            return [Objection("resources.gpu", _NO_GPU)]
        return ()

    @staticmethod
    def list_notices(gang: GangSpec) -> Sequence[NoticeSource]:
        """Return EC2's notice sources for tasks on spot instances, and () for other tasks. Tasks on
        spot instances use the network of their instance, so the tasks can read the instance's
        metadata. On Fargate Spot, a task gets SIGTERM instead of a notice.
        """
        offer = gang.offer
        spot = offer.purchase is Purchase.SPOT and offer.zone not in PURCHASES
        return NOTICES if spot else ()

    async def _describe(self, region: str, tasks: Sequence[str]) -> Sequence[ServiceJob]:
        """Return the given tasks that belong to this installation. Tasks that ECS no longer reports
        are omitted.
        """
        found = []
        for start in range(0, len(tasks), _MOST_DESCRIBED):
            told = await self._aws.call(
                region,
                "describe_tasks",
                cluster=self._capacity.cluster,
                tasks=list(tasks[start : start + _MOST_DESCRIBED]),
            )
            for each in told.get("tasks", ()):
                if each.get("startedBy") != self._started_by:
                    self._foreign |= {str(each["taskArn"])}
                    continue
                job = read_task(each)
                found.append(job)
                if job.state is JobState.ENDED:
                    self._ended[job.id] = job
                    self._definitions.retire(str(each["taskDefinitionArn"]))
        return found

    def _make_task(self, request: JobRequest, capacity: Capacity) -> EcsTaskRequest:
        gang, offer, settings = request.gang, request.offer, self._settings
        on_fargate = not capacity.instance_type
        subnets = list_setting(settings, "subnets")
        if on_fargate and not subnets:
            raise Refused("[providers.ecs] subnets: not set; tasks on Fargate need a subnet")
        part = 100 if on_fargate else int(settings["memory_percent"])
        return EcsTaskRequest(
            name=request.name,
            cluster=self._capacity.cluster,
            image=find_image("ecs", gang, self._settings).replace("{region}", offer.region),
            command=request.entry.command,
            launch_type=LaunchType.FARGATE if on_fargate else LaunchType.EC2,
            cpus=int(offer.vcpus),
            memory_mib=offer.memory_mib * part // 100,
            gpus=offer.accelerator_count,
            instance_types=() if on_fargate else (capacity.instance_type,),
            environment={**request.entry.environment, RANK: str(request.rank)},
            execution_role=self._read("execution_role"),
            task_role=self._read("task_role"),
            log_group=self._read("log_group"),
            log_region=offer.region,
            capacity=capacity.name,
            host_network=not on_fargate,
            subnets=subnets,
            security_groups=list_setting(settings, "security_groups"),
            public_address=bool(settings["public_address"]),
            started_by=self._started_by,
            token=hashlib.sha256(request.name.encode()).hexdigest()[:32],
            grace=_STOP,
            tags=request.tags,
        )

    def _read(self, name: str) -> str | None:
        """Return the value of a setting, or None if it is unset or empty."""
        return str(self._settings.get(name) or "") or None


def read_task(told: Mapping[str, Any]) -> ServiceJob:
    """Parse a task in a reply of DescribeTasks. Billing starts when the pull of the task's image
    starts. An instance that already has the image can skip the pull (`ECS_IMAGE_PULL_BEHAVIOR`); in
    this case, billing starts when the task starts.
    """
    pulled, stopped = told.get("pullStartedAt") or told.get("startedAt"), told.get("stoppedAt")
    code, reason = str(told.get("stopCode") or ""), str(told.get("stoppedReason") or "")
    state = JobState.WAITING if pulled is None else JobState.RUNNING
    if told["lastStatus"] == "STOPPED":
        state = JobState.ENDED
        stopped = stopped or told["createdAt"]
        pulled = pulled or stopped
    ended: datetime | None = stopped if state is JobState.ENDED else None
    codes = [each["exitCode"] for each in told.get("containers", ()) if "exitCode" in each]
    return ServiceJob(
        id=str(told["taskArn"]),
        name=str(told["taskDefinitionArn"]).rpartition("/")[2].rpartition(":")[0],
        state=state,
        started_at=pulled,
        ended_at=ended,
        preempted=code in _INTERRUPTED,
        no_capacity=code == "TaskFailedToStart" and reason.startswith(_NO_ROOM),
        reason="" if ended is None or codes == [0] else _tell_end(reason, codes),
        waits=_tell_wait(told),
    )


def _tell_wait(told: Mapping[str, Any]) -> str:
    """Return the status of a task whose containers do not run yet, or ""."""
    if told["lastStatus"] not in _STARTS:
        return ""
    reasons = [str(each["reason"]) for each in told.get("containers", ()) if each.get("reason")]
    return f"ECS reports: {' '.join([told['lastStatus'], *reasons])}"


def _read_refusal(fault: CloudFault) -> CloudFault:
    """Convert the fault of RunTask to the form that `providers.vm` expects."""
    if fault.code == "ClientException" and fault.message.startswith(_QUEUE_FULL):
        return CloudFault(fault.status, _FULL, fault.message)
    if fault.code == _CONFLICT:  # an earlier request started the task; the next list contains it
        return CloudFault(409, fault.code, fault.message)
    return fault


def _tell_end(reason: str, codes: Sequence[int]) -> str:
    """Return why a task ended, with the exit code of its container."""
    shown = ", ".join(map(str, codes))
    return f"{reason} (exit code {shown})" if shown else reason


def _tell_failures(failures: Sequence[Mapping[str, Any]]) -> str:
    """Return why RunTask started no task. The failures in a reply of RunTask mean that capacity is
    missing or unsuitable; for any other problem, RunTask itself returns an error.
    """
    found = [
        f"{each.get('reason', 'no reason')}{': ' + each['detail'] if each.get('detail') else ''}"
        for each in failures
    ]
    return "; ".join(found) or "ECS started no task, and stated no reason"
