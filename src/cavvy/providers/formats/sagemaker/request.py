"""Builds the request CreateTrainingJob of SageMaker.

Limits are from the service model 2017-07-24 of botocore.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any

from cavvy.domain.values import Struct, field

NAME_LENGTH = 63  # maximum length of a name, which consists of letters, digits and hyphens
# maximum characters of an argument, which has no line breaks; maximum number of arguments
ARGUMENT_LENGTH, ARGUMENTS = 256, 100
# maximum characters of an environment variable; maximum number of variables
VARIABLE_LENGTH, VARIABLES = 512, 100
HYPERPARAMETER_LENGTH, HYPERPARAMETERS = 2500, 100
CHANNELS = 20
LONGEST_RUN = timedelta(days=28)  # the largest quota of MaxRuntimeInSeconds
GRANTED_RUN = timedelta(days=5)  # the quota of MaxRuntimeInSeconds that each account has
LONGEST_WARM = timedelta(hours=6)  # KeepAlivePeriodInSeconds
VOLUME_GIB = 30  # the default volume size of SageMaker's Python SDK

# The families of instance types that training jobs can use, and the types of these families that
# training jobs cannot use. TrainingInstanceType in the service model lists all types.
_FAMILIES = (
    "c4 c5 c5n c6i c7i c7i-flex c8i c8i-flex g4dn g5 g6 g6e g7 g7e m4 m5 m6i m7i m7i-flex m8i "
    "m8i-flex p3 p3dn p4d p4de p5 p5e p5en p6-b200 p6-b300 p6e-gb200 r5 r5d r6i r7i r8i r8i-flex "
    "t3 trn1 trn1n trn2"
)
_MISSING = (
    "c4.large c5.12xlarge c5.24xlarge c5.large c5n.large c6i.large c7i-flex.large c8i-flex.large "
    "c8i.large m4.large m5.16xlarge m5.8xlarge t3.micro t3.nano t3.small"
)


class DataChannel(Struct, frozen=True, kw_only=True):
    """S3 objects that SageMaker makes available in /opt/ml/input/data/NAME: all objects whose URI
    starts with `uri`. If `stream` is True, an object is read from S3 only when the program opens
    the file.
    """

    name: str
    uri: str
    stream: bool = False


class TrainingJobRequest(Struct, frozen=True, kw_only=True):
    """The values of a request to SageMaker. `longest_wait` limits the total time for which a job on
    spot instances waits and runs. `warm` is how long SageMaker keeps the instances for the next
    job; SageMaker bills this time.
    """

    name: str
    image: str
    role: str
    instance_type: str  # such as ml.g5.xlarge
    instances: int = 1
    volume_gib: int = VOLUME_GIB
    entrypoint: Sequence[str]
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    channels: Sequence[DataChannel] = ()
    output_uri: str
    checkpoint_uri: str | None = None  # SageMaker keeps it equal to /opt/ml/checkpoints
    longest_run: timedelta = timedelta(days=1)
    longest_wait: timedelta | None = None
    spot: bool = False
    warm: timedelta = timedelta(0)
    retries: int = 0  # how often SageMaker may start the job again after faults of SageMaker
    tags: Mapping[str, str] = field(default_factory=dict)
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()


def is_training_type(instance_type: str) -> bool:
    """Return whether training jobs can use this instance type of EC2. SageMaker's name for the type
    has the prefix `ml.`.
    """
    family, _, size = instance_type.partition(".")
    known = family in _FAMILIES.split() and "metal" not in size
    return known and instance_type not in _MISSING.split()


def make_texts(values: Mapping[Any, Any]) -> dict[str, str]:
    """Convert hyperparameters to the strings that SageMaker accepts."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
    }


def fits_hyperparameters(values: Mapping[str, str]) -> bool:
    """Return whether SageMaker accepts these hyperparameters."""
    return len(values) <= HYPERPARAMETERS and all(
        len(each) <= HYPERPARAMETER_LENGTH and "\n" not in each for each in values.values()
    )


def make_training_job(job: TrainingJobRequest) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob."""
    algorithm: dict[str, Any] = {
        "TrainingImage": job.image,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": list(job.entrypoint),
    }
    if job.arguments:
        algorithm["ContainerArguments"] = list(job.arguments)
    resources: dict[str, Any] = {
        "InstanceType": job.instance_type,
        "InstanceCount": job.instances,
        "VolumeSizeInGB": job.volume_gib,
    }
    if job.warm:
        resources["KeepAlivePeriodInSeconds"] = ceil(job.warm.total_seconds())
    stop = {"MaxRuntimeInSeconds": ceil(job.longest_run.total_seconds())}
    if job.spot:
        wait = max(job.longest_wait or job.longest_run, job.longest_run)
        stop["MaxWaitTimeInSeconds"] = ceil(wait.total_seconds())
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": algorithm,
        "RoleArn": job.role,
        "ResourceConfig": resources,
        "StoppingCondition": stop,
        "OutputDataConfig": {"S3OutputPath": job.output_uri},
        "EnableManagedSpotTraining": job.spot,
    }
    return request | _make_optional(job)


def _make_optional(job: TrainingJobRequest) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "InputDataConfig": [_make_channel(each) for each in job.channels],
        "CheckpointConfig": {"S3Uri": job.checkpoint_uri} if job.checkpoint_uri else None,
        "HyperParameters": dict(job.hyperparameters),
        "Environment": dict(job.environment),
        "RetryStrategy": {"MaximumRetryAttempts": min(job.retries, 30)} if job.retries else None,
        "VpcConfig": {"Subnets": list(job.subnets), "SecurityGroupIds": list(job.security_groups)}
        if job.subnets
        else None,
        "Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()],
    }
    return {key: value for key, value in parts.items() if value}


def _make_channel(channel: DataChannel) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": channel.uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {
        "ChannelName": channel.name,
        "DataSource": {"S3DataSource": source},
        "InputMode": "FastFile" if channel.stream else "File",
    }
