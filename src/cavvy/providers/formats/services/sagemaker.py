"""The job format of SageMaker: builds the request CreateTrainingJob, for the provider and for
`cavvy export sagemaker TASK.YAML`.

Limits are from the service model 2017-07-24 of botocore.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from cavvy.domain.tasks import SpotPolicy, TaskSpec, Transfer
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import list_variables
from cavvy.providers.formats import FindOffers, JobFormat, Machine, choose_machine
from cavvy.providers.formats.notes import dump_yaml, list_notes, write_comments
from cavvy.providers.formats.program import link_folder, make_program, split_program

_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_BUCKET = "s3://BUCKET"
_COVERED = frozenset(
    ["checkpoint", "inputs", "limits.duration", "outputs", "resources.spot", "retry", "workdir"]
)
# The shell joins its arguments to the program; see `split_program`.
_START = 'p=$(printf %b "$@") && exec "$(command -v bash || command -v sh)" -c "$p"'
_FOLDER = "/opt/ml"  # the folder that SageMaker shares with the container
_INPUTS = f"{_FOLDER}/input/data"
_PLACED = re.compile(rf"{_INPUTS}/(?P<name>[A-Za-z0-9._-]{{1,64}})/?")
# Read the hosts of the job. The list is sorted, and is the same on every host.
_RANKS = (
    f"CAVVY_CONFIG=$(tr -d ' \\n\"' < {_FOLDER}/input/config/resourceconfig.json)",
    "CAVVY_HOST=$(printf %s \"$CAVVY_CONFIG\" | sed 's/.*current_host:\\([^,}]*\\).*/\\1/')",
    "CAVVY_HOSTS=$(printf %s \"$CAVVY_CONFIG\" | grep -o '[{,]hosts:\\[[^]]*' | head -n 1 | "
    "sed 's/.*\\[//')",
    "MASTER_ADDR=${CAVVY_HOSTS%%,*}",
    "NODE_RANK=0",
    "for each in $(printf %s \"$CAVVY_HOSTS\" | tr , ' '); do",
    '    [ "$each" = "$CAVVY_HOST" ] && break',
    "    NODE_RANK=$((NODE_RANK + 1))",
    "done",
    "export CAVVY_HOSTS MASTER_ADDR NODE_RANK",
)

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


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return the request as YAML for `aws sagemaker create-training-job --cli-input-yaml`. Raises
    Refused.
    """
    named = task.resources.instance
    if named is not None and named.startswith("ml."):
        need = replace(task.resources, instance=named.removeprefix("ml."))
        task = replace(task, resources=need)
    machine = choose_machine(task, find_offers, "aws", "SageMaker training", is_training_type)
    job = _make_request(task, machine)
    notes = [
        f"Run: aws sagemaker create-training-job --cli-input-yaml file://{task.name}.yaml",
        f"Replace {_ROLE} with the role that SageMaker assumes for the job.",
        *_list_steps(task, job),
        *list_notes(task, _COVERED | ({"limits.deadline"} if job.longest_wait else set())),
    ]
    document = dump_yaml(make_training_job(job))
    return "\n".join([*write_comments("sagemaker", task, notes), document])


def _make_request(task: TaskSpec, machine: Machine) -> TrainingJobRequest:
    outputs = [each for each in task.outputs if each.target.startswith("s3://")]
    program, environment = _make_container(task, machine)
    arguments = split_program(program, ARGUMENT_LENGTH, ARGUMENTS)
    if arguments is None:
        size = ARGUMENT_LENGTH * ARGUMENTS
        raise Refused(
            f"run: SageMaker passes at most {size} characters to a container; move the program to "
            "a file of the working folder"
        )
    channels = _list_channels(task)
    if len(channels) > CHANNELS:
        raise Refused(f"inputs: a training job has at most {CHANNELS} channels")
    return TrainingJobRequest(
        name=make_name(task.name),
        image=task.image or "IMAGE",
        role=_ROLE,
        instance_type=f"ml.{machine.instance_type}",
        instances=task.nodes,
        volume_gib=task.resources.disk_gib or VOLUME_GIB,
        entrypoint=("sh", "-c", _START, "sh"),
        arguments=arguments,
        environment=environment,
        hyperparameters=_list_hyperparameters(task),
        channels=channels,
        output_uri=outputs[0].target if outputs else f"{_BUCKET}/{task.name}/output",
        checkpoint_uri=_find_checkpoints(task),
        longest_run=_find_longest_run(task),
        longest_wait=task.limits.deadline_after if _is_spot(task) else None,
        spot=_is_spot(task),
        warm=timedelta(0) if _is_spot(task) else min(task.keep, LONGEST_WARM),
        retries=task.retry.node if task.retry.node is not None else 30,
        tags=task.tags,
    )


def _find_longest_run(task: TaskSpec) -> timedelta:
    """Return the maximum running time: the task's limit, but at most SageMaker's own maximum. For a
    task without a limit, return the time until its deadline, but at most the time that SageMaker
    grants to every account.
    """
    if task.limits.duration is None:
        return min(task.limits.deadline_after or GRANTED_RUN, GRANTED_RUN)
    return min(task.limits.duration, LONGEST_RUN)


def _find_checkpoints(task: TaskSpec) -> str | None:
    if task.checkpoint is None:
        return None
    storage = task.checkpoint.storage or ""
    return storage if storage.startswith("s3://") else f"{_BUCKET}/{task.name}/checkpoints"


def make_name(name: str) -> str:
    """Return a name that SageMaker accepts: letters and digits, with single hyphens between
    them."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", name)[:NAME_LENGTH].strip("-") or "job"


def _is_spot(task: TaskSpec) -> bool:
    return task.resources.spot is not SpotPolicy.NEVER


def _list_hyperparameters(task: TaskSpec) -> dict[str, str]:
    values = make_texts(task.params)
    # the container gets values that do not fit only as CAVVY_PARAM_...
    return values if fits_hyperparameters(values) else {}


def _make_container(task: TaskSpec, machine: Machine) -> tuple[str, dict[str, str]]:
    """Return the shell program of the container, and the container's environment variables. If
    SageMaker rejects a variable as too long, or allows no more variables, the shell program exports
    the variable instead.
    """
    variables = {
        **list_variables(task, task.nodes),
        "NPROC_PER_NODE": str(machine.accelerators or 1),
    }
    fitting = {
        name: value
        for name, value in list(variables.items())[:VARIABLES]
        if len(value) <= VARIABLE_LENGTH
    }
    prepare = [
        *(
            f"export {name}={shlex.quote(value)}"
            for name, value in variables.items()
            if name not in fitting
        ),
        *_RANKS,
        f"mkdir -p {_FOLDER}/code {_FOLDER}/model && cd {_FOLDER}/code || exit 1",
    ]
    if task.workdir is not None:
        prepare.append(f"cp -R {_FOLDER}/input/data/workdir/. . || exit 1")
    for name, each in zip(_name_channels(task), task.inputs, strict=True):
        prepare += _link_input(each, f"{_INPUTS}/{name}")
    if task.checkpoint is not None:
        prepare += link_folder(f"{_FOLDER}/checkpoints", task.checkpoint.path)
    finish = [
        f"[ $CAVVY_CODE != 0 ] || cp -R {shlex.quote(each.source)} {_FOLDER}/model/ || CAVVY_CODE=1"
        for each in task.outputs
    ]
    return make_program(task, prepare, finish), fitting


def _list_channels(task: TaskSpec) -> list[DataChannel]:
    """Return the data channels: one for the working folder, then one for each input."""
    channels = []
    if task.workdir is not None:
        channels.append(DataChannel(name="workdir", uri=f"{_BUCKET}/{task.name}/workdir/"))
    for name, each in zip(_name_channels(task), task.inputs, strict=True):
        uri = each.source if each.source.startswith("s3://") else f"{_BUCKET}/{task.name}/{name}/"
        channels.append(DataChannel(name=name, uri=uri, stream=each.stream))
    return channels


def _name_channels(task: TaskSpec) -> Sequence[str]:
    """Return the names of the channels of the inputs. SageMaker puts a channel in the folder of its
    name, so an input whose target is such a folder has the name of it.
    """
    placed = [_PLACED.fullmatch(each.target) for each in task.inputs]
    used = {"workdir", *(each["name"] for each in placed if each)}
    names = []
    for number, (each, place) in enumerate(zip(task.inputs, placed, strict=True)):
        name = "" if place is None or place["name"] == "workdir" else place["name"]
        if not name:
            name = re.sub(r"[^A-Za-z0-9]+", "-", each.target).strip("-")[:50] or "input"
            while name in used:
                name += f"-{number}"
            used.add(name)
        names.append(name)
    return names


def _link_input(each: Transfer, folder: str) -> list[str]:
    """Return the lines that link an input's target to its data channel. If the channel contains one
    file, the link points to this file.
    """
    name = PurePosixPath(each.source).name
    file = shlex.quote(f"{folder}/{name}")
    if each.target.rstrip("/") == folder:
        return []  # SageMaker puts it there
    return [
        *link_folder(folder, each.target),
        f"[ ! -f {file} ] || ln -sfn {file} {shlex.quote(each.target.rstrip('/'))}",
    ]


def _list_steps(task: TaskSpec, job: TrainingJobRequest) -> list[str]:
    """Return the steps for the user, and the differences from a job that Cavvy runs."""
    workdir, inputs = task.workdir, list(zip(_name_channels(task), task.inputs, strict=True))
    targets = [each.target for each in task.outputs]
    others = [each for each in targets if each != job.output_uri]
    steps = {
        f"name: SageMaker calls the job {job.name}; the name of a job can be used only once": True,
        "image: SageMaker pulls images from Amazon ECR; push this image there, and change "
        "TrainingImage": task.image is not None and ".dkr.ecr." not in task.image,
        f"Replace {_BUCKET} with your own bucket.": any(
            _BUCKET in each
            for each in (job.output_uri, job.checkpoint_uri or "", *(c.uri for c in job.channels))
        ),
        "workdir: copy it first: "
        + (
            f"git clone {workdir.git} workdir && git -C workdir checkout "
            f"{workdir.commit or 'HEAD'} && aws s3 cp --recursive workdir"
            if workdir and workdir.git
            else f"aws s3 cp --recursive {(workdir.path if workdir else None) or '.'}"
        )
        + f" {_BUCKET}/{task.name}/workdir/": workdir is not None,
        **{
            f"inputs: copy {each.source} to {_BUCKET}/{task.name}/{name}/ first": True
            for name, each in inputs
            if not each.source.startswith("s3://")
        },
        "outputs: SageMaker stores all outputs together as "
        f"{job.output_uri.rstrip('/')}/{job.name}/"
        "output/model.tar.gz": bool(targets),
        f"outputs: copy the outputs' files to {', '.join(others)} yourself": bool(others),
        "resources.spot: the job runs on spot instances only; SageMaker does not change to "
        "on-demand": task.resources.spot is SpotPolicy.AUTO,
        "keep: SageMaker keeps no spot instances in its managed warm pools": bool(task.keep)
        and job.spot,
        f"limits.duration: reduced to {LONGEST_RUN.days} days": (
            (task.limits.duration or timedelta(0)) > LONGEST_RUN
        ),
        f"limits.duration: not set, so SageMaker stops the job after {_show(job.longest_run)} "
        f"(MaxRuntimeInSeconds); up to {LONGEST_RUN.days} days need a higher quota": (
            task.limits.duration is None
        ),
        f"limits.duration: more than {GRANTED_RUN.days} days need a higher quota": (
            task.limits.duration is not None and job.longest_run > GRANTED_RUN
        ),
        "retry: SageMaker restarts the job only after faults of SageMaker itself": True,
    }
    return [step for step, is_so in steps.items() if is_so]


def _show(length: timedelta) -> str:
    """Return a length of time in days or hours, such as "5 days"."""
    hours = length.total_seconds() / 3600
    return f"{hours:g} hours" if hours < 48 else f"{hours / 24:g} days"


FORMAT = JobFormat(title="Amazon SageMaker training", write=make_export)
