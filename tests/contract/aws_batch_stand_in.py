"""A stand-in for AWS Batch: queues with one compute environment each, and their jobs."""

from collections.abc import Mapping
from typing import Any

from tests.contract.aws_service import Answer, AwsStandIn

from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_stand_in import finish
from cavvy.providers.vm.cloud import CloudFault, MachineState

# queue: the type and the instance types of its compute environment
QUEUES: Mapping[str, tuple[str, list[str]]] = {
    "cpu": ("EC2", ["m5.large"]),
    "gpu": ("EC2", ["g4dn.xlarge"]),
    "gpu-spot": ("SPOT", ["g4dn.xlarge"]),
    "mixed": ("EC2", ["g4dn.xlarge", "g4dn.2xlarge"]),
    "serverless": ("FARGATE", []),
}
_STATES = {
    MachineState.STARTING: "RUNNABLE",
    MachineState.RUNNING: "RUNNING",
    MachineState.ENDED: "FAILED",
}


class BatchStandIn(AwsStandIn):
    """Jobs of one region. A job's id is the id of its first machine."""

    services: Mapping[str, str] = {"": "batch"}

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud)
        self.definitions: dict[str, dict[str, Any]] = {}  # by name and revision
        self.revisions: dict[str, int] = {}  # the newest, by name
        self.fair: set[str] = set()  # queues with a fair-share policy
        self.disabled = ""  # a queue that the next description shows as disabled
        self.reasons: dict[str, str] = {}  # why jobs ended, by job
        self.sizes: dict[str, int] = {}  # the containers of jobs, by name

    def DescribeJobQueues(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        disabled, self.disabled = self.disabled, ""
        return {
            "jobQueues": [
                {
                    "jobQueueName": name,
                    "jobQueueArn": _arn("job-queue", name),
                    "state": "DISABLED" if name == disabled else "ENABLED",
                    "status": "VALID",
                    "priority": 1,
                    **(
                        {"schedulingPolicyArn": _arn("scheduling-policy", "fair")}
                        if name in self.fair
                        else {}
                    ),
                    "computeEnvironmentOrder": [
                        {"order": 1, "computeEnvironment": _arn("compute-environment", name)}
                    ],
                }
                for name in body["jobQueues"]
                if name in QUEUES
            ]
        }

    def DescribeComputeEnvironments(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        found = []
        for arn in body["computeEnvironments"]:
            kind, types = QUEUES[arn.rpartition("/")[2]]
            resources = {"type": kind, "maxvCpus": 256, "minvCpus": 0, "instanceTypes": types}
            name = arn.rpartition("/")[2]
            found.append(
                {
                    "computeEnvironmentName": name,
                    "computeEnvironmentArn": arn,
                    "computeResources": resources,
                }
            )
        return {"computeEnvironments": found}

    def RegisterJobDefinition(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["jobDefinitionName"]
        self.revisions[name] = revision = self.revisions.get(name, 0) + 1
        self.definitions[f"{name}:{revision}"] = body
        arn = _arn("job-definition", f"{name}:{revision}")
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def DeregisterJobDefinition(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        self.definitions.pop(body["jobDefinition"].rpartition("/")[2], None)
        return {}

    def SubmitJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        name, wanted = body["jobName"], body["jobDefinition"]
        newest = f"{wanted}:{self.revisions.get(wanted, 0)}"
        definition = self.definitions.get(newest)
        if definition is None or body["jobQueue"] not in QUEUES:
            raise Answer("ClientException", "JobDefinition or JobQueue not found.")
        nodes = definition.get("nodeProperties", {}).get("numNodes", 1)
        if nodes > 1 and QUEUES[body["jobQueue"]][0] != "EC2":
            raise Answer("ClientException", "Multi-node parallel jobs need EC2.")
        self.bodies[region, name] = body | {"definition": definition, "newest": newest}
        if (body["jobQueue"] in self.fair) != ("shareIdentifier" in body):
            raise Answer("ClientException", "shareIdentifier is for fair-share queues only.")
        self.sizes[name] = nodes
        try:
            made = self.start(region, name, nodes)
        except CloudFault as fault:
            if fault.code != "insufficient-capacity":
                raise
            self.disabled = body["jobQueue"]  # somebody has just disabled the queue
            raise Answer("ClientException", "the queue cannot accept the job") from fault
        return {"jobId": made[-nodes].id, "jobName": name}

    def ListJobs(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        ((prefix,),) = [each["values"] for each in body["filters"]]
        shown = finish(self.cloud.list())
        found = []
        for name in self.jobs(region):
            queue = self.bodies[region, name]["jobQueue"]
            if not name.startswith(prefix.removesuffix("*")) or queue != body["jobQueue"]:
                continue
            listed = {each.id for each in shown}
            for told in self._jobs(region, name):
                if told["jobId"] in listed:
                    fields = ("jobId", "jobName", "status", "createdAt")
                    found.append({field: told[field] for field in fields})
        at = int(body.get("nextToken", 0))
        more = {"nextToken": str(at + 2)} if at + 2 < len(found) else {}
        return {"jobSummaryList": found[at : at + 2], **more}

    def DescribeJobs(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        told = [each for _, name in self.bodies for each in self._jobs(region, name)]
        wanted = set(body["jobs"]) - self.undescribed
        return {"jobs": [each for each in told if each["jobId"] in wanted]}

    def TerminateJob(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        for each in self._members(region, body["jobId"]):
            if each.ended is None:
                finish(self.cloud.delete(each.id))
        return {}

    def add_job(self, name: str) -> str:
        """A job of one container that another program submits; its id."""
        region, shape = "us-east-1", {"jobDefinitionName": name, "type": "container"}
        self.RegisterJobDefinition(region, shape)
        self.bodies[region, name] = {"jobQueue": "cpu", "newest": f"{name}:1"}
        self.sizes[name] = 1
        return self.cloud.add(name, {"job": name, "region": region})

    def _members(self, region: str, job: str) -> list[Any]:
        """The machines of the job with this id."""
        first = next(each for each in self.cloud.machines if each.id == job)
        count = self.sizes[first.tags["job"]]
        all_of = self.machines(region, first.tags["job"])
        at = all_of.index(first)
        return all_of[at : at + count]

    def _jobs(self, region: str, name: str) -> list[dict[str, Any]]:
        """The descriptions of the jobs with this name; a name may have several."""
        count = self.sizes[name]
        made, found = self.machines(region, name), []
        for first in made[::count]:
            shown = finish(self.cloud.get(first.id))
            if shown is None:
                continue
            status, millis = _STATES[shown.state], int(first.at.timestamp() * 1000)
            asked = self.bodies[region, name]
            told = {
                "jobId": first.id,
                "jobName": name,
                "jobQueue": _arn("job-queue", asked["jobQueue"]),
                "jobDefinition": _arn("job-definition", asked["newest"]),
                "status": status,
                "createdAt": millis,
                "startedAt": millis if status != "RUNNABLE" else 0,
            }
            if asked.get("tags"):
                told["tags"] = asked["tags"]
            if first.ended is not None:
                told["stoppedAt"] = int(first.ended.timestamp() * 1000)
                told["statusReason"] = self.reasons.get(first.id, "Cavvy removed the job")
            found.append(told)
        return found


def _arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:us-east-1:123456789012:{kind}/{name}"
