"""Runs gangs as training jobs of SageMaker.

Selects the task inputs that SageMaker itself copies to the nodes as data channels.

An input becomes a channel under two conditions. The input's target must be the folder of a channel,
such as `/opt/ml/input/data/train`. The input's source must be a folder in an S3 bucket that is
known to be in the job's region:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_S3DataSource.html. As on every
provider, the agent copies the inputs that are not channels.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec, Transfer
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.formats.services.sagemaker import (
    CHANNELS,
    HYPERPARAMETER_LENGTH,
    HYPERPARAMETERS,
    LONGEST_RUN,
    DataChannel,
    TrainingJobRequest,
    fits_hyperparameters,
    make_texts,
    make_training_job,
)
from cavvy.providers.managed import service as managed
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.managed.service import JobRequest, JobState, ServiceJob, find_image
from cavvy.providers.sagemaker.objects import INVALID, QUOTA, InstanceOffers, object_to_image
from cavvy.providers.vm.cloud import NAME_PREFIX, BillEnd, CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import make_mark

_SHOWN = timedelta(hours=6)  # `list` returns ended jobs for this long after their last change
_GONE = frozenset({"ResourceNotFound"})
# DescribeTrainingJob also reports a missing job with the code of wrong arguments. The call's one
# argument is a name that SageMaker accepted when the job was created, so the error means that the
# job is missing.
_UNKNOWN = INVALID
# "How Amazon SageMaker AI Runs Your Training Image", in the guide for developers:
# https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo.html
_HOSTS = managed.HostList(
    hosts="SM_HOSTS",
    current="SM_CURRENT_HOST",
    file="/opt/ml/input/config/resourceconfig.json",
)
# The code before the colon of a reason if SageMaker had no capacity, which AWS Batch reads too:
# https://docs.aws.amazon.com/batch/latest/userguide/sm_job_stuck_in_runnable_capacity.html
_FULL = "CapacityError"
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
_STARTS = frozenset(
    {
        "Pending",
        "Starting",
        "LaunchingMLInstances",
        "PreparingTrainingStack",
        "Downloading",
        "DownloadingTrainingImage",
    }
)
_ENDED = frozenset({"Completed", "Failed", "Stopped", "Deleting"})
# The states of a warm pool that is billed to its job. A pool that is "Reused" is billed to the next
# job: https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
_WARM = frozenset({"Available", "InUse"})

_INPUTS = "/opt/ml/input/data"
_TARGET = re.compile(rf"{_INPUTS}/(?P<name>[A-Za-z0-9._-]{{1,64}})/?")
_MODES = {"File": False, "FastFile": True}  # whether objects are read only when they are opened


class SageMakerService:
    """Implements `ManagedService`. A job's id is `REGION/NAME`."""

    # The API documents the limits. A name is unique in an account and region. SageMaker does not
    # document how long a new job may be missing from lists, so that value is an assumption.
    traits = managed.ServiceTraits(
        hosts=_HOSTS,
        name_limit=63,
        unique_names=True,
        variable_limit=512,
        # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StopTrainingJob.html
        stop_s=120,
        list_lag=timedelta(seconds=30),
        ended_listed=_SHOWN,
        bill_ends=BillEnd.REPORTED,
        quota_codes=frozenset({QUOTA}),
    )

    def __init__(self, context: ProviderContext, account: AwsAccount | None = None) -> None:
        self._settings, self._now = context.settings, context.now
        self._prefix = f"{NAME_PREFIX}{make_mark(context.installation)}-"
        self._aws = AwsService(
            "sagemaker", self._settings, account, gone=_GONE, provider="sagemaker"
        )
        self._offers = InstanceOffers(self._aws, context, "sagemaker", "Training")
        self.list_placed = list_placed
        self._kept: dict[str, ServiceJob] = {}  # ended jobs whose instances are kept, by id
        # job id -> the ended job, which cannot change any more
        self._ended: dict[str, ServiceJob] = {}
        self._live: dict[str, ServiceJob] = {}  # by id: other jobs, as last described

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which finds the
        instance types that are not in the catalog.
        """
        needed = [(name, self._need(name)) for name in ("role", "bucket")]
        return [*needed, *self._offers.facts()]

    async def offers(self) -> Sequence[Offer]:
        for name in ("role", "bucket"):
            self._need(name)
        return await self._offers.list(Purchase.ON_DEMAND, Purchase.SPOT)

    async def submit(self, request: JobRequest) -> str:
        job = self._make_job(request)
        region = request.offer.region
        await self._aws.check_region(region)
        try:
            await self._aws.call(region, "create_training_job", **make_training_job(job))
        except CloudFault as fault:
            if fault.code != "ResourceInUse":  # ResourceInUse: an earlier request created the job
                raise
        return f"{region}/{request.name}"

    async def list(self) -> Sequence[ServiceJob]:
        since = self._now() - _SHOWN
        found: dict[str, ServiceJob] = {}
        for region in await self._aws.regions():
            for wanted in ({"StatusEquals": "InProgress"}, {"LastModifiedTimeAfter": since}):
                told = await self._aws.pages(
                    region,
                    "list_training_jobs",
                    "TrainingJobSummaries",
                    NameContains=self._prefix,
                    MaxResults=100,
                    **wanted,
                )
                for each in told:
                    name = str(each["TrainingJobName"])
                    if name.startswith(self._prefix) and f"{region}/{name}" not in found:
                        job = await self._read_listed(f"{region}/{name}", each)
                        found |= {job.id: job} if job else {}
        self._ended = {each: job for each, job in self._ended.items() if each in found}
        self._kept = {each: job for each, job in self._kept.items() if each in found}
        self._live = {each: job for each, job in found.items() if job.state is not JobState.ENDED}
        return list(found.values())

    async def _read_listed(self, job: str, summary: Mapping[str, Any]) -> ServiceJob | None:
        """Return the description of a listed job. If SageMaker temporarily does not describe the
        job, return the job's last known state. Return None if the job was deleted; only ended jobs
        can be deleted.
        """
        found = await self.get(job)
        if found is not None or summary["TrainingJobStatus"] in _ENDED:
            return found
        name = str(summary["TrainingJobName"])
        return self._live.get(job) or ServiceJob(id=job, name=name, state=JobState.WAITING)

    async def get(self, job: str) -> ServiceJob | None:
        if job in self._ended:
            return self._ended[job]
        region, _, name = job.partition("/")
        try:
            told = await self._aws.call(region, "describe_training_job", TrainingJobName=name)
        except CloudFault as fault:
            if fault.status == 404 or fault.code == _UNKNOWN:
                return None
            raise
        found = read_job(job, told)
        self._kept.pop(job, None)
        if found.state is JobState.ENDED:
            self._ended[job] = found
        elif found.state is JobState.KEPT:
            self._kept[job] = found
        return found

    async def stop(self, job: str) -> None:
        if job in self._ended or job in self._kept:
            raise CloudFault(404, "ended", "the training job has ended")
        region, _, name = job.partition("/")
        try:
            await self._aws.call(region, "stop_training_job", TrainingJobName=name)
        except CloudFault as fault:
            if fault.code == INVALID:  # the job has ended, or is stopping
                raise CloudFault(404, fault.code, fault.message) from fault
            raise

    async def release(self, job: str) -> None:
        """End the job's warm pool, if a warm pool exists."""
        found = await self.get(job)
        if found is not None and found.state is JobState.KEPT:
            region, _, name = job.partition("/")
            await self._aws.call(
                region,
                "update_training_job",
                TrainingJobName=name,
                ResourceConfig={"KeepAlivePeriodInSeconds": 0},
            )

    def is_full(self, fault: CloudFault) -> bool:
        return _FULL in (fault.code, _read_code(fault.message))

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return () if task.image is None else object_to_image(task.image)

    def _make_job(self, request: JobRequest) -> TrainingJobRequest:
        gang, offer = request.gang, request.offer
        spot = offer.purchase is Purchase.SPOT
        options, bucket = gang.options, self._need("bucket").rstrip("/")
        run = min(
            gang.job_limit or timedelta(seconds=int(self._settings["max_run_s"])), LONGEST_RUN
        )
        wait = timedelta(seconds=int(self._settings["spot_wait_s"]))
        channels = list_channels(gang)
        warm_s = int(options.get("warm_s", self._settings["warm_s"]))
        return TrainingJobRequest(
            name=request.name,
            role=self._need("role"),
            image=find_image("sagemaker", gang, self._settings).replace("{region}", offer.region),
            instance_type=offer.instance_type,
            instances=request.nodes,
            volume_gib=gang.disk_gib or int(self._settings["disk_gib"]),
            entrypoint=request.entry.command,
            environment={**list_variables(channels, offer), **request.entry.environment},
            hyperparameters=_list_hyperparameters(gang),
            channels=channels,
            output_uri=str(options.get("output") or f"{bucket}/output"),
            checkpoint_uri=str(
                options.get("checkpoints") or f"{bucket}/checkpoints/{request.name}"
            ),
            longest_run=run,
            longest_wait=run + wait,
            spot=spot,
            warm=timedelta(seconds=0 if spot else warm_s),  # warm pools have no spot instances
            tags=request.tags,
            subnets=list_setting(self._settings, "subnets"),
            security_groups=list_setting(self._settings, "security_groups"),
        )

    def _need(self, name: str) -> str:
        value = str(self._settings.get(name) or "")
        if not value:
            raise Refused(f"[providers.sagemaker] {name}: not set; SageMaker needs it for each job")
        return value


def read_job(job: str, told: Mapping[str, Any]) -> ServiceJob:
    """Parse a reply of DescribeTrainingJob. A job that waits for instances after an interruption
    counts as reclaimed, because SageMaker would start it again. A job whose instances are in a warm
    pool has the state KEPT, and the bill of the job ends when the pool ends.
    """
    status, secondary = str(told["TrainingJobStatus"]), str(told.get("SecondaryStatus"))
    started = told.get("TrainingStartTime")
    ended: datetime | None = None
    interrupted = next(
        (
            each["StartTime"]
            for each in told.get("SecondaryStatusTransitions", ())
            if each["Status"] == "Interrupted"
        ),
        None,
    )
    failure = str(told.get("FailureReason") or "")
    reason = failure
    if status in _ENDED:
        state = JobState.ENDED
        ended = _read_end(told) or interrupted
        started = started or told["CreationTime"]
        pool = told.get("WarmPoolStatus", {})
        kept_s = int(pool.get("ResourceRetainedBillableTimeInSeconds") or 0)
        ended = (ended or started) + timedelta(seconds=kept_s)
        reason = reason or ("" if status == "Completed" else f"SageMaker reports: {secondary}")
        if pool.get("Status") in _WARM:
            state, ended = JobState.KEPT, None
    elif interrupted is not None:
        # the billable time is known once the job is stopped
        state, ended = JobState.RECLAIMED, None
        reason = "SageMaker reclaimed the spot instances"
    else:
        state = JobState.RUNNING if started else JobState.WAITING
    return ServiceJob(
        id=job,
        name=str(told["TrainingJobName"]),
        state=state,
        started_at=started,
        ended_at=ended,
        preempted=interrupted is not None,
        no_capacity=_read_code(failure) == _FULL or secondary == "MaxWaitTimeExceeded",
        reason=reason,
        waits=_tell_wait(told),
    )


def _tell_wait(told: Mapping[str, Any]) -> str:
    """Return the status of a job whose containers do not run yet, with SageMaker's description, or
    ""."""
    secondary = str(told.get("SecondaryStatus"))
    if secondary not in _STARTS:
        return ""
    (*_, last) = told.get("SecondaryStatusTransitions") or [{}]
    message = str(last.get("StatusMessage") or "")
    return f"SageMaker reports: {secondary} {message}".rstrip()


def _read_end(told: Mapping[str, Any]) -> datetime | None:
    """Return the time when the bill of an ended training job ended, or None if the reply does not
    state this time. The time of the job's warm pool is not included.
    """
    started, billed = told.get("TrainingStartTime"), told.get("BillableTimeInSeconds")
    end: datetime | None = told.get("TrainingEndTime")
    if started and billed is not None:
        end = started + timedelta(seconds=int(billed))
    return end


def _read_code(reason: str) -> str:
    """Return the code at the start of a failure's reason, such as CapacityError or AlgorithmError.
    DescribeTrainingJob has no field that contains only the code: the secondary status of each job
    that failed is Failed, and AWS advises against reading the status messages
    (https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_SecondaryStatusTransition.html).
    """
    return reason.partition(":")[0].strip()


def _list_hyperparameters(gang: GangSpec) -> Mapping[str, str]:
    """Return the parameters in the task and in the options. If a parameter is in the task and in
    the options, the value in the options is used. Raises Refused if the options exceed SageMaker's
    limits. If all parameters together exceed SageMaker's limits, the task's parameters are omitted;
    the work also gets all parameters as environment variables.
    """
    named = read_texts(gang.options, "hyperparameters")
    if not fits_hyperparameters(named):
        raise Refused(
            f"resources.options.sagemaker.hyperparameters: SageMaker allows {HYPERPARAMETERS} "
            f"values of at most {HYPERPARAMETER_LENGTH} characters, without line ends"
        )
    found = {**make_texts(gang.params), **named}
    return found if fits_hyperparameters(found) else named


def list_channels(gang: GangSpec) -> Sequence[DataChannel]:
    """Return the data channels of a job, from the option `channels` and from the job's inputs.
    Raises Refused.
    """
    stream, named = _read_mode(gang), read_texts(gang.options, "channels")
    own = [DataChannel(name=name, uri=uri, stream=stream) for name, uri in named.items()]
    chosen = [
        DataChannel(name=_name(each), uri=each.source, stream=stream) for each in _choose(gang)
    ]
    if both := sorted({each.name for each in chosen} & named.keys()):
        raise Refused(
            f"resources.options.sagemaker.channels: an input has the target "
            f"{_INPUTS}/{both[0]} too; remove the channel or the input"
        )
    return own + chosen


def list_placed(gang: GangSpec) -> Sequence[str]:
    """Return the targets of the inputs that are channels."""
    return [each.target for each in _choose(gang)]


def list_variables(channels: Sequence[DataChannel], offer: Offer) -> Mapping[str, str]:
    """Return the environment variables that scripts for SageMaker read most often. SageMaker's
    training toolkit, the entry point of AWS's images, normally sets the variables, but Cavvy's
    command replaces the toolkit:
    https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    folders = {
        f"SM_CHANNEL_{re.sub('[^A-Z0-9]', '_', each.name.upper())}": f"{_INPUTS}/{each.name}"
        for each in channels
    }
    return {
        **folders,
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_NUM_GPUS": str(offer.accelerator_count),
    }


def read_texts(options: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """Return the option `name` as a table with string values. Raises Refused."""
    found = options.get(name) or {}
    if not isinstance(found, Mapping):
        raise Refused(f"resources.options.sagemaker.{name} must be a table of names and values")
    return make_texts(found)


def _choose(gang: GangSpec) -> Sequence[Transfer]:
    fitting = [
        each
        for each in gang.inputs
        if _name(each)
        # The prefix of a folder ends with a slash; else it would select train2 for train too.
        and each.source.startswith("s3://")
        and each.source.endswith("/")
        and not each.stream  # the work expects a pipe
        and each.mount is None
        # SageMaker does not read buckets in other regions. The region is unknown if the server
        # cannot query it, and for buckets at endpoints other than Amazon's, which SageMaker cannot
        # reach.
        and each.region == gang.offer.region
    ]
    return fitting[: CHANNELS - len(read_texts(gang.options, "channels"))]


def _name(each: Transfer) -> str:
    """Return the name of the channel whose folder is the target of an input, or "" if the target is
    another path."""
    found = _TARGET.fullmatch(each.target)
    return "" if found is None or found["name"] in (".", "..") else found["name"]


def _read_mode(gang: GangSpec) -> bool:
    mode = str(gang.options.get("input_mode", "File"))
    if mode not in _MODES:
        raise Refused(
            f"resources.options.sagemaker.input_mode: {mode} is not one of {', '.join(_MODES)}"
        )
    return _MODES[mode]
