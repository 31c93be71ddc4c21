"""AWS Batch: each gang is one job in a queue, and the job's containers start the agent.

Offers are the instance types of the account's job queues, at the catalog's prices.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, TypedDict

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.aws import ACCOUNT, NOTICES
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import Feature, GangSpec, ProviderContext, Refused
from cavvy.providers.formats.services.aws_batch import (
    LOST_HOST,
    PRIORITY,
    BatchJobRequest,
    make_job_definition,
    make_submission,
)
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.aws import AwsService, Ec2Prices, JobDefinitions, list_revisions
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.notices import NoticeSource
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import INSTALLATION, make_mark

_GUIDE = "https://docs.aws.amazon.com/batch/latest/userguide"
_JOBS = f"{_GUIDE}/job_definition_parameters.html"

MANIFEST = JobManifest(
    name="aws-batch",
    title="AWS Batch",
    cloud="cavvy.providers.aws_batch:BatchService",
    # the instance's metadata announce the end of a spot instance 120 seconds in advance
    notice=timedelta(minutes=2),
    rights="batch:RegisterJobDefinition, DeregisterJobDefinition, SubmitJob, TerminateJob, "
    "ListJobs, DescribeJobs, DescribeJobQueues, DescribeComputeEnvironments and TagResource, and "
    "iam:PassRole for the roles that the settings name",
    unsupported={
        **list_unsupported_by_jobs("a job", page=_JOBS, disk=_JOBS),
        Feature.LOGIN: "AWS Batch pulls images with the rights of the compute environment's "
        "instances or of the role in `execution_role`; secrets for other registries are not "
        f"supported yet ({_GUIDE}/private-registry.html)",
        Feature.CAPACITY: "AWS Batch does not report free capacity; a job without capacity waits "
        f"({_GUIDE}/job_stuck_in_runnable_capacity.html)",
        Feature.VOLUMES: "a job mounts no EBS volumes; copy data from and to a bucket instead "
        f"({_JOBS})",
        Feature.MOUNTS: "a job is a container, in which host folders and EFS cannot be mounted yet "
        f"({_JOBS})",
        Feature.NETWORK: "the compute environment selects the network "
        f"({_GUIDE}/create-compute-environment.html)",
        Feature.DISK: "the compute environment's launch template selects the disk "
        f"({_GUIDE}/launch-templates.html)",
    },
    options={
        "image": "the container image, in the format of the setting `image`",
        "share": "the share identifier of the job, in place of the setting `share`",
        "priority": "0 to 9999; in a queue with a fair-share policy, a job starts before the "
        "jobs of the same share that have a lower priority",
    },
    docs="docs/guides/aws-batch.md",
    settings=(
        project_text(
            "regions",
            "The region of the queues. The default is the region of the AWS configuration.",
        ).for_setup(),
        *ACCOUNT,
        project_text(
            "queues",
            "The job queues to use, separated by commas. Each queue must have one compute "
            "environment with one instance type. Required.",
        ).for_setup(),
        project_text(
            "image",
            "The image of jobs whose task names no image. `{region}` stands for the region. "
            "Without "
            "this setting, each task must name an image.",
        ),
        project_text(
            "share",
            "The share identifier of jobs whose task names no share identifier. Queues with a "
            "fair-share policy need a share identifier; other queues do not use it.",
        ),
        project_text(
            "job_role",
            "The ARN of the role that gives the work its permissions. The default is no role.",
        ),
        project_text(
            "execution_role",
            "The ARN of the role that pulls the image. By default, the instances' own role pulls "
            "the image.",
        ),
        project_number(
            "memory_percent",
            "The percentage of an instance's memory that a job requests; ECS needs the rest.",
            default=90,
            minimum=1,
            unit="percent",
            whole=True,
        ),
    ),
)

_SHOWN = timedelta(hours=6)  # ended jobs are reported for this long
_MOST_DESCRIBED = 100  # maximum jobs in one call
_FULL = "offer unavailable"  # Cavvy's own code
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}\*?")
_ENDED = frozenset({"SUCCEEDED", "FAILED"})
_PURCHASES = {"EC2": Purchase.ON_DEMAND, "SPOT": Purchase.SPOT}


class _Share(TypedDict):
    """The fields of a BatchJobRequest that are set only if the queue has a fair-share policy,
    because AWS Batch rejects them for all other queues.
    """

    share: str | None
    priority: int | None


class BatchService:
    """Implements `ManagedService`. A job's id is the job's region, "/" and the job's id in AWS
    Batch.
    """

    # ECS waits 30 seconds after SIGTERM by default:
    # https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-agent-config.html
    traits = managed.ServiceTraits(
        hosts=managed.HostList(index="AWS_BATCH_JOB_NODE_INDEX"),
        name_limit=128,
        variable_limit=2048,
        stop_s=30,
        # https://docs.aws.amazon.com/batch/latest/userguide/job-lifecycle.html
        first_ends_all=True,
        ended_listed=_SHOWN,
    )

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._mark = make_mark(context.installation)
        self._aws = AwsService(
            "batch", self._settings, account, gone=frozenset(), provider="aws-batch"
        )
        self._definitions = JobDefinitions(self._aws, "job")
        self._queues = BatchQueues(self._aws, context)
        self._ended: dict[str, ServiceJob] = {}  # by id: jobs that cannot change any more

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which reads the
        queues."""
        left = [f"{queue}: {why}" for queue, why in self._queues.left_out.items()]
        return [
            ("queues", ", ".join(self._queues.names())),
            *([("queues without offers", "; ".join(left))] if left else []),
        ]

    async def offers(self) -> Sequence[Offer]:
        return await self._queues.offers()

    async def submit(self, request: JobRequest) -> str:
        region = await self._aws.only_region("queues")
        queue = request.offer.zone or ""
        if request.offer.region != region or queue not in self._queues.names():
            raise Refused(
                f"the queue {queue} in {request.offer.region} is not in the setting `queues`"
            )
        if request.nodes > 1 and request.offer.purchase is Purchase.SPOT:
            # https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html
            raise CloudFault(400, _FULL, "AWS Batch runs no gangs on spot instances")
        await self._check_offer(request.offer)
        job = self._make_job(request, queue)
        made = await self._aws.call(region, "register_job_definition", **make_job_definition(job))
        try:
            told = await self._aws.call(region, "submit_job", **make_submission(job))
        except CloudFault as fault:
            if not fault.uncertain:
                revisions = list_revisions(str(made["jobDefinitionArn"]))
                await self._definitions.remove(region, revisions)
                await self._check_offer(request.offer)
            raise
        return f"{region}/{told['jobId']}"

    async def list(self) -> Sequence[ServiceJob]:
        region, now = await self._aws.only_region("queues"), self._now()
        found: dict[str, Mapping[str, Any]] = {}
        for queue in self._queues.names():
            told = await self._aws.pages(
                region,
                "list_jobs",
                "jobSummaryList",
                "nextToken",
                jobQueue=queue,
                filters=[{"name": "JOB_NAME", "values": [f"{NAME_PREFIX}{self._mark}-*"]}],
            )
            found |= {str(each["jobId"]): each for each in told if not _is_old(each, now)}
        known = {f"{region}/{each}" for each in found}
        self._ended = {each: job for each, job in self._ended.items() if each in known}
        asked = [each for each in found if f"{region}/{each}" not in self._ended]
        jobs = {each.id: each for each in await self._describe(region, asked)}
        await self._definitions.tidy(region)
        # AWS Batch may list a job and not describe it for a moment
        listed = {f"{region}/{each}": read_job(region, found[each]) for each in asked}
        return list({**listed, **self._ended, **jobs}.values())

    async def get(self, job: str) -> ServiceJob | None:
        if job in self._ended:
            return self._ended[job]
        region, _, name = job.partition("/")
        return next(iter(await self._describe(region, [name])), None)

    async def stop(self, job: str) -> None:
        region, _, name = job.partition("/")
        if job in self._ended:
            raise CloudFault(404, "ended", "the job has ended")
        await self._aws.call(region, "terminate_job", jobId=name, reason="Cavvy removed the job")

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == _FULL

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return ()

    @staticmethod
    def list_notices(gang: GangSpec) -> Sequence[NoticeSource]:
        """Return EC2's notice sources for jobs on spot instances, or () for other jobs. Jobs on
        spot instances have one node and use the network of their instance, so these jobs can read
        the instance's metadata:
        https://docs.aws.amazon.com/batch/latest/userguide/networking-modes-jobs.html
        """
        return NOTICES if gang.offer.purchase is Purchase.SPOT else ()

    async def _check_offer(self, offer: Offer) -> None:
        """Raise CloudFault if the queue is disabled, or no longer has the offer's instances."""
        if offer.key not in [each.key for each in await self._queues.offers()]:
            raise CloudFault(400, _FULL, f"the queue {offer.zone} does not offer {offer.key} now")

    async def _describe(self, region: str, jobs: Sequence[str]) -> Sequence[ServiceJob]:
        found = []
        for start in range(0, len(jobs), _MOST_DESCRIBED):
            told = await self._aws.call(
                region, "describe_jobs", jobs=list(jobs[start : start + _MOST_DESCRIBED])
            )
            for each in told.get("jobs", ()):
                job = read_job(region, each)
                found.append(job)
                if job.state is JobState.ENDED:
                    self._ended[job.id] = job
                    if each.get("tags", {}).get(INSTALLATION) == self._mark:
                        self._definitions.retire(str(each["jobDefinition"]))
        return found

    def _make_job(self, request: JobRequest, queue: str) -> BatchJobRequest:
        gang, offer, settings = request.gang, request.offer, self._settings
        image = find_image("aws-batch", gang, settings)
        return BatchJobRequest(
            name=request.name,
            queue=queue,
            image=image.replace("{region}", offer.region),
            command=request.entry.command,
            cpus=int(offer.vcpus),
            memory_mib=offer.memory_mib * int(settings["memory_percent"]) // 100,
            gpus=offer.accelerator_count,
            nodes=request.nodes,
            instance_type=offer.instance_type,
            environment=request.entry.environment,
            job_role=str(settings.get("job_role") or "") or None,
            execution_role=str(settings.get("execution_role") or "") or None,
            longest=gang.job_limit,
            tags=request.tags,
            **self._read_share(gang, queue),
        )

    def _read_share(self, gang: GangSpec, queue: str) -> _Share:
        """Return the share and the priority of a job in a queue with a fair-share policy; other
        queues accept neither a share nor a priority. Raises Refused.
        """
        priority = gang.options.get("priority")
        if priority is not None and not (type(priority) is int and 0 <= priority <= PRIORITY):
            raise Refused(
                f"resources.options.aws-batch.priority: {priority!r} is not a whole number from 0 "
                f"to {PRIORITY}"
            )
        if queue not in self._queues.fair_share:
            return _Share(share=None, priority=None)
        share = str(gang.options.get("share") or self._settings.get("share") or "")
        if not _SHARE.fullmatch(share):
            raise Refused(
                f"[providers.aws-batch] share: the queue {queue} has a fair-share policy, so each "
                "job needs a share identifier of letters and digits; set `share` here or in the "
                f"task's options (the current value is {share!r})"
            )
        return _Share(share=share, priority=priority)


def read_job(region: str, told: Mapping[str, Any]) -> ServiceJob:
    """Parse a job in a reply of DescribeJobs or ListJobs."""
    status, reason = str(told["status"]), str(told.get("statusReason") or "")
    started, ended = _time(told.get("startedAt")), _time(told.get("stoppedAt"))
    state = JobState.RUNNING if status == "RUNNING" else JobState.WAITING
    if status in _ENDED:
        state = JobState.ENDED
        ended = ended or _time(told["createdAt"])
        started = started or ended
    return ServiceJob(
        id=f"{region}/{told['jobId']}",
        name=str(told["jobName"]),
        state=state,
        started_at=started,
        ended_at=ended if state is JobState.ENDED else None,
        preempted=status == "FAILED" and _lost_host(told),
        reason="" if status == "SUCCEEDED" or state is not JobState.ENDED else reason,
        # the reason of a job that blocks its queue begins with CAPACITY or MISCONFIGURATION:
        # https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html
        waits=f"AWS Batch reports: {status} {reason}".rstrip() if state is JobState.WAITING else "",
    )


def _lost_host(told: Mapping[str, Any]) -> bool:
    """Return whether the job's instance was reclaimed or lost. If a user or Cavvy stopped the job,
    the job's status reason contains the text of the stop request.
    """
    stopped = told.get("isTerminated") or told.get("isCancelled")
    return not stopped and fnmatchcase(str(told.get("statusReason") or ""), LOST_HOST)


def _is_old(told: Mapping[str, Any], now: datetime) -> bool:
    ended = _time(told.get("stoppedAt"))
    return ended is not None and now - ended > _SHOWN


def _time(millis: int | None) -> datetime | None:
    """Parse a time in milliseconds since 1970. Returns None if `millis` is None or 0."""
    return datetime.fromtimestamp(millis / 1000, UTC) if millis else None


class BatchQueues:
    """The queues that the settings name. An offer's zone is the name of its queue."""

    def __init__(self, aws: AwsService, context: ProviderContext) -> None:
        self._aws, self._settings = aws, context.settings
        self._prices = Ec2Prices(context)
        self.left_out: Mapping[str, str] = {}  # the reason by queue
        self.fair_share: frozenset[str] = frozenset()  # the queues with a fair-share policy

    def names(self) -> Sequence[str]:
        """Return the names of the queues in the settings. Raises Refused if the settings name no
        queue."""
        named = list_setting(self._settings, "queues")
        if not named:
            raise Refused("[providers.aws-batch] queues: not set; name the job queues to use")
        return named

    async def offers(self) -> Sequence[Offer]:
        """Return one offer for each queue whose instance type and price are known. Raises
        CloudFault, Refused.
        """
        region = await self._aws.only_region("queues")
        told = await self._aws.pages(
            region, "describe_job_queues", "jobQueues", "nextToken", jobQueues=list(self.names())
        )
        await self._prices.refresh()
        self.fair_share = frozenset(
            str(each["jobQueueName"]) for each in told if each.get("schedulingPolicyArn")
        )
        found, left_out = [], {}
        for queue in told:
            name = str(queue["jobQueueName"])
            offer = await self._read(region, queue)
            if isinstance(offer, str):
                left_out[name] = offer
            else:
                found.append(offer)
        missing = set(self.names()) - {str(each["jobQueueName"]) for each in told}
        self.left_out = left_out | dict.fromkeys(sorted(missing), "the queue does not exist")
        return found

    async def _read(self, region: str, queue: Mapping[str, Any]) -> Offer | str:
        """Return the offer of a queue, or the reason why the queue has no offer."""
        order = queue["computeEnvironmentOrder"]
        if (queue["state"], queue["status"]) != ("ENABLED", "VALID"):
            return "the queue is disabled or invalid"
        if len(order) != 1:
            return f"the queue has {len(order)} compute environments; exactly one is required"
        told = await self._aws.call(
            region,
            "describe_compute_environments",
            computeEnvironments=[order[0]["computeEnvironment"]],
        )
        for each in told["computeEnvironments"]:
            resources = each.get("computeResources", {})
            types, kind = resources.get("instanceTypes", []), str(resources.get("type"))
            if kind not in _PURCHASES:
                return f"the queue's compute environment has the type {kind}; EC2 or SPOT is needed"
            if len(types) != 1 or "." not in types[0]:
                return (
                    "the queue's compute environment must have one instance type, such as g5.xlarge"
                )
            return self._price(region, str(queue["jobQueueName"]), types[0], _PURCHASES[kind])
        return "the queue's compute environment does not exist"

    def _price(self, region: str, queue: str, name: str, purchase: Purchase) -> Offer | str:
        """Return the offer at the catalog's price, or the reason why no offer exists."""
        found = self._prices.find(region, name, purchase)
        if isinstance(found, str):
            return found
        return replace(found, provider="aws-batch", zone=queue, capacity=None)
