"""What users are told about machines and jobs of services that do not start."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.domain.values import replace
from cavvy.providers.aws_batch import read_job as read_batch_job
from cavvy.providers.azure_batch.service import JobParts, read_live
from cavvy.providers.azureml.jobs import read_job as read_azureml_job
from cavvy.providers.azureml_notebooks import read_instance as read_compute_instance
from cavvy.providers.base import GangState
from cavvy.providers.ecs import read_task
from cavvy.providers.managed.provider import ManagedCloud
from cavvy.providers.managed.service import JobState, ServiceJob, ServiceTraits
from cavvy.providers.sagemaker.jobs import read_job as read_training_job
from cavvy.providers.sagemaker_endpoints import SageMakerEndpoints
from cavvy.providers.sagemaker_notebooks import NotebookInstances
from cavvy.providers.vast import _read as read_vast
from cavvy.providers.vertex.jobs import read_job as read_vertex_job
from cavvy.providers.vertex_workbench import read_instance as read_workbench
from cavvy.providers.vm.cloud import CloudMachine, MachineState
from cavvy.providers.vm.records import MachineBill, VmNode, make_record, sight
from cavvy.providers.vm.status import make_seen

NOW = datetime(2030, 1, 1, tzinfo=UTC)
TIME = NOW.isoformat()
STUCK = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement is too high."
Json = dict[str, Any]


def tell_task(status: str, **more: Any) -> Json:
    return {
        "taskArn": "t",
        "taskDefinitionArn": "d/cv-1:1",
        "lastStatus": status,
        "createdAt": NOW,
        **more,
    }


@pytest.mark.parametrize(
    ("status", "reason", "waits"),
    [
        ("RUNNABLE", "", "AWS Batch reports: RUNNABLE"),
        ("RUNNABLE", STUCK, f"AWS Batch reports: RUNNABLE {STUCK}"),
        ("STARTING", "", "AWS Batch reports: STARTING"),
        ("RUNNING", "", ""),
        ("FAILED", STUCK, ""),
    ],
)
def test_aws_batch(status: str, reason: str, waits: str) -> None:
    told = {"jobId": "1", "jobName": "cv", "createdAt": 1_700_000_000_000, "status": status}
    job = read_batch_job("us-east-1", {**told, "statusReason": reason})
    assert job.waits == waits
    assert job.reason == (STUCK if status == "FAILED" else "")


def test_ecs() -> None:
    assert read_task(tell_task("PROVISIONING")).waits == "ECS reports: PROVISIONING"
    pulls = tell_task("PENDING", pullStartedAt=NOW, containers=[{"reason": "CannotPull: x"}, {}])
    assert read_task(pulls).waits == "ECS reports: PENDING CannotPull: x"
    for status in ("RUNNING", "DEPROVISIONING", "STOPPED"):
        assert read_task(tell_task(status)).waits == ""


def test_sagemaker() -> None:
    def tell(secondary: str, *messages: str) -> str:
        moves = [{"Status": "x", "StartTime": NOW, "StatusMessage": each} for each in messages]
        told = {
            "TrainingJobName": "cv",
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": secondary,
            "CreationTime": NOW,
            "SecondaryStatusTransitions": moves,
        }
        return read_training_job("us-east-1/cv", told).waits

    assert tell("Starting") == "SageMaker reports: Starting"
    assert (
        tell("Downloading", "Preparing the instances", "Downloading the training image")
        == "SageMaker reports: Downloading Downloading the training image"
    )
    assert tell("Training", "Training image download completed.") == ""
    endpoint = {"EndpointName": "cv", "EndpointStatus": "Creating"}
    assert SageMakerEndpoints.read("r/cv", endpoint).waits == "SageMaker reports: Creating"
    notebook = {"NotebookInstanceName": "cv", "NotebookInstanceStatus": "Pending"}
    assert NotebookInstances.read("r/cv", notebook).waits == "SageMaker reports: Pending"


def test_google() -> None:
    told = {"name": "p/1", "displayName": "cv", "jobSpec": {}, "state": "JOB_STATE_QUEUED"}
    assert read_vertex_job("r", told).waits == "Vertex AI reports: JOB_STATE_QUEUED"
    assert read_vertex_job("r", {**told, "state": "JOB_STATE_RUNNING"}).waits == ""
    told = {"state": "PROVISIONING", "createTime": TIME}
    assert read_workbench("r/cv", told).waits == "Google reports: PROVISIONING"


def test_azure_machine_learning() -> None:
    told = {"name": "cv", "properties": {"status": "Queued"}}
    assert read_azureml_job(told, {}).waits == "Azure reports: Queued"
    assert read_azureml_job(told, {"startTimeUtc": TIME}).waits == ""
    inner = {"state": "Creating", "errors": [{"error": {"code": "Slow", "message": "wait"}}]}
    compute = {"name": "cv", "properties": {"properties": inner}}
    assert read_compute_instance(compute).waits == "Azure reports: Creating Slow: wait"


@pytest.mark.parametrize(
    ("nodes", "tasks", "waits"),
    [
        ([], [], "Azure Batch has allocated 0 of 2 nodes, and the pool is resizing"),
        (["idle"], [], "Azure Batch has allocated 1 of 2 nodes, and the pool is resizing"),
        (["idle", "starting"], [], "Azure Batch reports: the node 1 is starting"),
        (["waitingforstarttask"] * 2, [], "Azure Batch reports: the node 0 is waitingforstarttask"),
        (["running"] * 2, ["preparing"], "Azure Batch reports: the task 0 is preparing"),
        (["running"] * 2, ["running"] * 2, ""),
    ],
)
def test_azure_batch(nodes: list[str], tasks: list[str], waits: str) -> None:
    parts = JobParts(
        job={"id": "cv-2", "state": "active"},
        nodes_wanted=2,
        nodes=[{"id": str(n), "state": state} for n, state in enumerate(nodes)],
        tasks=[{"id": str(n), "state": state} for n, state in enumerate(tasks)],
        pool={"allocationState": "resizing"},
    )
    assert read_live(parts).waits == waits


def test_vast() -> None:
    told = {"id": 1, "label": "cv", "actual_status": "loading"}
    denied = "Error response from daemon:\n pull access denied"
    assert read_vast({**told, "status_msg": denied}).waits == (
        "Vast.ai reports: loading Error response from daemon: pull access denied"
    )
    assert read_vast({**told, "actual_status": None}).waits == "Vast.ai reports: provisioning"
    assert read_vast({**told, "actual_status": "running", "status_msg": "ok"}).waits == ""


def test_a_service_passes_on_what_its_job_waits_for() -> None:
    class Service:
        traits = ServiceTraits()

    cloud = ManagedCloud(Service())  # type: ignore[arg-type]  # only its traits are read
    job = ServiceJob(id="j", name="cv-a-b-c-0-2", state=JobState.WAITING, waits="RUNNABLE")
    assert [each.waits for each in cloud._machines(job)] == ["RUNNABLE"] * 2


@pytest.mark.parametrize("boots_free", [True, False])
def test_a_gang_waits_for_what_its_machines_wait_for_until_they_start(boots_free: bool) -> None:
    def see(node: VmNode, machine: CloudMachine) -> VmNode:
        free = boots_free and machine.state is MachineState.STARTING
        over = machine.state is MachineState.ENDED
        bill = MachineBill(free=free, boots_free=boots_free, over=over)
        return sight(node, machine, NOW, bill)

    node = VmNode(rank=0, id="m", asked_at=NOW - timedelta(minutes=5))
    machine = CloudMachine(id="m", name="n", state=MachineState.STARTING, waits="no capacity")
    record = make_record("g", 1, NOW)
    node = see(node, machine)
    seen = make_seen(replace(record, nodes=(node,)), {})
    assert (seen.state, seen.reason) == (GangState.STARTING, "no capacity")
    node = see(node, replace(machine, state=MachineState.RUNNING, waits="", address="10.0.0.1"))
    seen = make_seen(replace(record, nodes=(node,)), {})
    assert (seen.state, seen.reason) == (GangState.RUNNING, "")
    ended = replace(machine, state=MachineState.ENDED, waits="", reason="reclaimed")
    assert make_seen(replace(record, nodes=(see(node, ended),)), {}).reason == "reclaimed"
