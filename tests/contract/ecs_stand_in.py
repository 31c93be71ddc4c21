"""A stand-in for Amazon ECS: one cluster with capacity providers, task definitions and tasks."""

from collections.abc import Mapping
from typing import Any

from tests.contract.aws_service import Answer, AwsStandIn

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import MemoryCloud, Rented
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.vm.cloud import CloudFault, MachineRequest, MachineState

CLUSTER = "training"
CAPACITY = ("FARGATE", "FARGATE_SPOT", "cpu", "gpu", "gpu-spot", "lab")
FULL = "Capacity is unavailable at this time. Please try again later or in a different zone."
_ACCOUNT = "arn:aws:ecs:us-east-1:123456789012"
_OFFER = Offer(provider="aws", region="here", instance_type="small", rate=HourlyRate(0))
_STATES = {
    MachineState.STARTING: "PROVISIONING",
    MachineState.RUNNING: "RUNNING",
    MachineState.ENDED: "STOPPED",
}


class EcsStandIn(AwsStandIn):
    """Tasks of one region. A task's ARN ends in the id of its machine, whose name is the family of
    the task definition.
    """

    services: Mapping[str, str] = {"AmazonEC2ContainerServiceV20141113": "ecs"}

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud)
        self.definitions: dict[str, dict[str, Any]] = {}  # the active ones, by family and revision
        self.inactive: set[str] = set()  # deregistered, and not deleted
        self.revisions: dict[str, int] = {}  # the newest, by family
        self.runs: dict[str, dict[str, Any]] = {}  # requests for tasks, by machine
        self.changes: dict[str, dict[str, Any]] = {}  # fields of tasks, by machine
        self.reason = FULL  # of tasks that are not placed
        self.refusal: Answer | None = None  # of requests for tasks

    def DescribeClusters(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["clusters"] != [CLUSTER]:
            return {"clusters": [], "failures": [{"reason": "MISSING"}]}
        told = {"clusterName": CLUSTER, "status": "ACTIVE", "capacityProviders": list(CAPACITY)}
        return {"clusters": [told], "failures": []}

    def RegisterTaskDefinition(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        family, fargate = body["family"], body["requiresCompatibilities"] == ["FARGATE"]
        if fargate and body.get("networkMode") != "awsvpc":
            raise Answer("ClientException", "Fargate only supports network mode ‘awsvpc’.")
        for container in body["containerDefinitions"]:
            if fargate and container.get("resourceRequirements"):
                raise Answer("ClientException", "Fargate does not support GPUs.")
        self.revisions[family] = revision = self.revisions.get(family, 0) + 1
        self.definitions[f"{family}:{revision}"] = body
        return {"taskDefinition": self._definition(f"{family}:{revision}", "ACTIVE")}

    def DeregisterTaskDefinition(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["taskDefinition"].rpartition("/")[2]
        if self.definitions.pop(name, None) is None:
            raise Answer("ClientException", "The specified task definition is inactive.")
        self.inactive.add(name)
        return {"taskDefinition": self._definition(name, "INACTIVE")}

    def DeleteTaskDefinitions(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        names = [each.rpartition("/")[2] for each in body["taskDefinitions"]]
        if len(names) > 10:
            raise Answer("InvalidParameterException", "At most 10 task definitions are allowed.")
        if not self.inactive.issuperset(names):
            raise Answer("ClientException", "Only inactive task definitions can be deleted.")
        self.inactive -= set(names)
        return {"taskDefinitions": [], "failures": []}

    def RunTask(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        family = body["taskDefinition"]
        definition = self.definitions.get(f"{family}:{self.revisions.get(family, 0)}")
        if definition is None:
            raise Answer("ClientException", "TaskDefinition not found.")
        (capacity,) = body["capacityProviderStrategy"]
        self._check_run(body, definition, capacity["capacityProvider"])
        if self.refusal is not None:
            raise self.refusal
        old = next((run for run in self.runs.values() if _token(run) == _token(body)), body)
        if old | {"definition": None} != body | {"definition": None}:
            raise Answer("ConflictException", "The client token was used for another request.")
        try:
            machine = self.start_task(region, family, body | {"definition": definition})
        except CloudFault as fault:
            if fault.code != "insufficient-capacity":
                raise
            return {"tasks": [], "failures": [{"reason": self.reason}]}
        return {"tasks": [self._task(machine)], "failures": []}

    def _check_run(self, body: dict[str, Any], definition: dict[str, Any], capacity: str) -> None:
        if body["cluster"] != CLUSTER or capacity not in CAPACITY:
            raise Answer("InvalidParameterException", "No such capacity provider.")
        if "launchType" in body or len(body["clientToken"]) > 64 or body["count"] != 1:
            raise Answer("InvalidParameterException", "The request is wrong.")
        network = body.get("networkConfiguration", {}).get("awsvpcConfiguration", {})
        needs_subnets = definition["networkMode"] == "awsvpc"
        if needs_subnets != bool(network.get("subnets")):
            raise Answer("InvalidParameterException", "Network Configuration is wrong.")
        if needs_subnets != capacity.startswith("FARGATE"):
            raise Answer("InvalidParameterException", "The capacity provider is not compatible.")

    def start_task(self, region: str, name: str, run: dict[str, Any]) -> Rented:
        """Start the machine of a task, or find the one that was started with this token."""
        if len(self.cloud.billed()) >= self.quota:
            raise CloudFault(400, "quota-exceeded", "the limit is reached")
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[name],
            user_data=["#!/bin/sh\n"],
            tags={"job": name, "region": region},
            token=run["clientToken"],
        )
        before = len(self.cloud.machines)
        try:
            (made,) = finish(self.cloud.create(request))
        finally:
            for each in self.cloud.machines[before:]:
                self.runs[each.id] = run
        return next(each for each in self.cloud.machines if each.id == made)

    def ListTasks(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        if "startedBy" in body and "desiredStatus" in body:
            raise Answer("InvalidParameterException", "startedBy must be the only filter.")
        shown = {each.id for each in finish(self.cloud.list())}
        stopped = body.get("desiredStatus") == "STOPPED"
        found = [
            self._arn(each.id)
            for each in self.cloud.machines
            if each.id in shown
            and (each.ended is not None) == stopped
            and body.get("startedBy") in (None, self.runs[each.id].get("startedBy"))
        ]
        at = int(body.get("nextToken", 0))
        more = {"nextToken": str(at + 2)} if at + 2 < len(found) else {}
        return {"taskArns": found[at : at + 2], **more}

    def DescribeTasks(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        tasks, failures = [], []
        for arn in body["tasks"]:
            machine = self._find(arn)
            known = machine is not None and machine.id not in self.undescribed
            if machine is not None and known and finish(self.cloud.get(machine.id)) is not None:
                tasks.append(self._task(machine))
            else:
                failures.append({"arn": arn, "reason": "MISSING"})
        return {"tasks": tasks, "failures": failures}

    def StopTask(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        machine = self._find(body["task"])
        if machine is None:
            raise Answer("InvalidParameterException", "The referenced task was not found.")
        if machine.ended is None:
            finish(self.cloud.delete(machine.id))
        found = self._find(body["task"])
        assert found is not None
        return {"task": self._task(found)}

    def add_task(self, name: str, started_by: str = "somebody") -> str:
        """A task that another program starts; the id of its machine."""
        shape = {"requiresCompatibilities": ["EC2"], "containerDefinitions": []}
        self.RegisterTaskDefinition("us-east-1", {"family": name, **shape})
        made = self.cloud.add(name, {"job": name, "region": "us-east-1"})
        self.runs[made] = {"startedBy": started_by, "definition": {}}
        return made

    def _find(self, arn: str) -> Rented | None:
        return next((each for each in self.cloud.machines if self._arn(each.id) == arn), None)

    def _definition(self, name: str, status: str) -> dict[str, Any]:
        family, _, revision = name.rpartition(":")
        arn = f"{_ACCOUNT}:task-definition/{name}"
        return {
            "taskDefinitionArn": arn,
            "family": family,
            "revision": int(revision),
            "status": status,
        }

    def _arn(self, machine: str) -> str:
        return f"{_ACCOUNT}:task/{CLUSTER}/{machine}"

    def _task(self, machine: Rented) -> dict[str, Any]:
        shown = finish(self.cloud.get(machine.id))
        status = _STATES[shown.state] if shown else "PROVISIONING"
        family, at = machine.name, machine.at.timestamp()
        told: dict[str, Any] = {
            "taskArn": self._arn(machine.id),
            "clusterArn": f"{_ACCOUNT}:cluster/{CLUSTER}",
            "taskDefinitionArn": f"{_ACCOUNT}:task-definition/{family}:{self.revisions[family]}",
            "lastStatus": status,
            "desiredStatus": "RUNNING" if machine.ended is None else "STOPPED",
            "createdAt": at,
            "startedBy": self.runs[machine.id].get("startedBy", ""),
            "containers": [{"name": family, "lastStatus": status}],
        }
        if status != "PROVISIONING":
            told |= {"pullStartedAt": at, "startedAt": at}
        if machine.ended is not None:
            told |= {"stoppedAt": machine.ended.timestamp(), "stopCode": "UserInitiated"}
            told["stoppedReason"] = "Cavvy removed the job"
        return told | self.changes.get(machine.id, {})


def _token(run: dict[str, Any]) -> object:
    return run.get("clientToken")
