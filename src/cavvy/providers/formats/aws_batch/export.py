"""Exports a task as a job of AWS Batch: `cavvy export aws-batch TASK.YAML`."""

from cavvy.domain.tasks import TaskSpec
from cavvy.providers.base import Refused
from cavvy.providers.formats.aws_batch import request
from cavvy.providers.formats.aws_batch.request import BatchJobRequest, BatchRetries, HostFolder
from cavvy.providers.formats.containers import (
    ALONE,
    ContainerSize,
    choose_size,
    list_container_variables,
    list_host_volumes,
)
from cavvy.providers.formats.index import FindOffers, JobFormat
from cavvy.providers.formats.machines import Machine, choose_machine, is_ec2_container_type
from cavvy.providers.formats.notes import list_notes
from cavvy.providers.formats.program import SHELL, make_program
from cavvy.providers.formats.script import write_script

_COVERED = frozenset(["limits.duration", "resources.spot", "retry", "secrets", "volumes"])
_SECRET = "arn:aws:secretsmanager:REGION:000000000000:secret:"
_ROLE = "arn:aws:iam::000000000000:role/ROLE"
_LOWEST_PRIORITY = -100  # the lowest priority that a task can have
# AWS Batch sets the address of the main node as a variable on all nodes except the main node.
_RANKS = (
    "NODE_RANK=$AWS_BATCH_JOB_NODE_INDEX",
    "MASTER_ADDR=${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i | cut -d' ' -f1)}",
    "export NODE_RANK MASTER_ADDR",
)
_DEFINE = "aws batch register-job-definition --cli-input-yaml file:///dev/stdin"
_SUBMIT = "aws batch submit-job --cli-input-yaml file:///dev/stdin"


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return a shell script with the requests RegisterJobDefinition and SubmitJob. Raises
    Refused."""
    machine = _choose_machine(task, find_offers)
    job = _make_request(task, choose_size(task, machine))
    calls = [
        (_DEFINE, request.make_job_definition(job)),
        (_SUBMIT, request.make_submission(job)),
    ]
    return write_script("aws-batch", task, _list_steps(task, job, machine), calls)


def _choose_machine(task: TaskSpec, find_offers: FindOffers) -> Machine:
    try:
        return choose_machine(task, find_offers, "aws", "AWS Batch", is_ec2_container_type)
    except Refused:
        other = choose_machine(task, find_offers, "aws", "AWS Batch", lambda name: True)
        raise Refused(
            "resources.gpu: containers of AWS Batch can reserve only NVIDIA's GPUs, but "
            f"{other.instance_type} has other accelerators"
        ) from None


def _make_request(task: TaskSpec, size: ContainerSize) -> BatchJobRequest:
    program = make_program(task, _RANKS if task.nodes > 1 else ALONE)
    return BatchJobRequest(
        name=task.name[: request.NAME_LENGTH],
        queue="QUEUE",
        image=task.image or "IMAGE",
        command=("sh", "-c", SHELL, program),
        cpus=size.cpus,
        memory_mib=size.memory_mib,
        gpus=size.accelerators,
        nodes=task.nodes,
        instance_type=task.resources.instance,
        environment=list_container_variables(task, size.accelerators),
        secrets={name: f"{_SECRET}{name}" for name in task.secrets},
        execution_role=_ROLE if task.secrets else None,
        folders=[
            HostFolder(source=each.source, path=each.path, read_only=each.read_only)
            for each in list_host_volumes(task)
        ],
        retries=_choose_retries(task),
        longest=task.limits.duration,
        priority=task.priority - _LOWEST_PRIORITY if task.priority else None,
        tags=task.tags,
    )


def _choose_retries(task: TaskSpec) -> BatchRetries:
    retry = task.retry
    counts = [retry.preemption, retry.node, retry.exit]
    most = max(request.ATTEMPTS if each is None else each for each in counts)
    codes = retry.exit_codes or None
    return BatchRetries(
        attempts=min(most + 1, request.ATTEMPTS), exit_codes=() if retry.exit == 0 else codes
    )


def _list_steps(task: TaskSpec, job: BatchJobRequest, machine: Machine) -> list[str]:
    mounted = {each.path for each in job.folders}
    left = [each.path for each in task.volumes if each.path not in mounted]
    gpu = machine.offer.accelerator if machine.offer else None
    steps = {
        "Run this script with the AWS CLI, version 2. Replace QUEUE with your job queue.": True,
        "Set minvCpus of the queue's compute environment to 0, so that the environment costs "
        "nothing without jobs.": True,
        f"resources.gpu: any GPU is accepted; use a queue whose machines have {gpu}, such as "
        f"{machine.instance_type}": bool(gpu and job.gpus),
        f"resources.instance: use a queue whose machines are {task.resources.instance}": bool(
            task.resources.instance and task.nodes == 1
        ),
        "resources.spot: the compute environment of the queue decides whether machines are "
        "spot instances": task.resources.spot != "never",
        f"secrets: replace the ARNs with the ARNs of {', '.join(task.secrets)} in Secrets Manager, "
        f"and {_ROLE} with an execution role that may read them": bool(task.secrets),
        f"volumes: the container does not mount {', '.join(left)}": bool(left),
        "nodes: CAVVY_HOSTS is not set; the nodes know only MASTER_ADDR": task.nodes > 1,
        "retry: AWS Batch restarts the program from its first line; only files in storage "
        "remain": job.retries.attempts > 1,
        "retry.delay: AWS Batch does not wait between attempts": bool(task.retry.delay),
        "priority: only a queue with a fair-share policy uses the priority; pass "
        "--share-identifier to such a queue": bool(task.priority),
        "limits.duration: the limit applies to each attempt": task.limits.duration is not None,
    }
    return [step for step, is_so in steps.items() if is_so] + list_notes(task, _COVERED)


FORMAT = JobFormat(title="AWS Batch", write=make_export)
