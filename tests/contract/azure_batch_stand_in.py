"""A strict stand-in for an Azure Batch account over a cloud in memory: an HTTP server that checks
each request and each of its own replies against Microsoft's package azure-batch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.contract.azure_batch_description import check_value, find_operation
from tests.contract.azure_public import is_public, make_price, make_token

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    finish,
    name_states,
)
from cavvy.providers.vm.cloud import CloudFault, MachineRequest

REGION = "westeurope"
SIZES = ("Standard_NC4as_T4_v3", "Standard_D4s_v3")
# the public list's spot prices; the second is a placeholder, which is above every usual price
SPOT_USD = {"Standard_NC4as_T4_v3": 0.11, "Standard_D4s_v3": 1000.0}
_FEW = 10  # longer lists have longer pages, so that tests with many nodes are quick
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))
_IMAGE = {
    "publisher": "microsoft-dsvm",
    "offer": "ubuntu-hpc",
    "sku": "2204",
    "version": "latest",
}
_FORMULA = re.compile(
    r"share = \$PendingTasks\.GetSamplePercent\(TimeInterval_Minute \* 5\);\n"
    r"tasks = share < 70 \? 1 : max\(\$PendingTasks\.GetSample\(TimeInterval_Minute \* 5\)\);\n"
    r"\$Target(Dedicated|LowPriority)Nodes = tasks > 0 \? (\d+) : 0;\n"
    r"\$NodeDeallocationOption = taskcompletion;"
)


@dataclass(kw_only=True)
class BatchJob:
    """One job, with its tasks and the machines of its pool."""

    body: dict[str, Any]
    machines: tuple[str, ...]
    at: datetime
    spot: bool
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: datetime | None = None  # when a request or the last machine ended it
    # fields of replies that differ from the usual ones, by object
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


class AzureBatchStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                places      accelerators  CPUs  memory  disk  price  spot
    Standard_D4s_v3       westeurope  -             4     16GiB   -     0.24   -
    Standard_NC4as_T4_v3  westeurope  1xT4/16GiB    4     28GiB   -     0.658  0.11
    """

    key = "eyJ0.batch.token"
    denied = CloudFault(401, "AuthenticationFailed", "Server failed to authenticate the request.")
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(409, "JobCompleted", "The job is already in a completed state."),
        "too-many-requests": CloudFault(429, "TooManyRequests", "Too many requests."),
        "internal-error": CloudFault(500, "InternalError", "The server has an internal error."),
        "unavailable": CloudFault(503, "ServerBusy", "The server is busy."),
        "forbidden": CloudFault(403, "AuthorizationFailure", "The caller lacks a permission."),
        "insufficient-capacity": CloudFault(
            409, "PoolQuotaReached", "Pool quota for the account has been reached."
        ),
        "quota-exceeded": CloudFault(
            409, "ActiveJobAndScheduleQuotaReached", "The quota of active jobs has been reached."
        ),
    }
    states = name_states(starting="starting", running="running", ended="")

    def set_up(self) -> None:
        self.jobs: dict[str, BatchJob] = {}
        self.calls: list[str] = []
        self.deleted: list[str] = []
        self.prices_fail = False

    def authorize(self, request: RestRequest) -> None:
        if not is_public(request):
            super().authorize(request)

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": {"lang": "en-US", "value": fault.message}}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        if request.path == "/identity":
            return 200, make_token(request, self.key)
        if request.path == "/api/retail/prices":
            return 200, self._prices(request.query["$filter"])
        try:
            asked = find_operation(
                request.method, request.path, request.query, request.headers, request.body
            )
        except ValueError as error:
            raise CloudFault(400, "InvalidPropertyValue", str(error)) from error
        self.calls.append(asked.operation)
        match asked.operation:
            case "create job":
                self._create(request.body)
                return 201, None
            case "list jobs":
                return 200, self._list_jobs(request)
            case "get pool":
                return 200, self._checked("BatchPool", self._show_pool(self._pool(asked.name)))
            case "list nodes":
                return 200, self._list_nodes(self._pool(asked.name), request)
        job = self._find(asked.name)
        match asked.operation:
            case "get job":
                return 200, self._checked("BatchJob", self._show(job))
            case "terminate job":
                self._terminate(job)
                return 202, None
            case "delete job":
                self.deleted.append(asked.name)
                del self.jobs[asked.name]
                return 202, None
            case "add tasks":
                return 200, self._add(job, request.body["value"])
        tasks = self._page(list(job.tasks), request)
        rented = self._rented(job)
        tasks["value"] = [self._show_task(job, each, rented[int(each)]) for each in tasks["value"]]
        return 200, tasks

    def start_job(self, body: dict[str, Any], nodes: int) -> list[Rented]:
        """Start the machines of a job's pool. Raises CloudFault."""
        if len(self.cloud.billed()) + nodes > self.quota:
            raise CloudFault(400, "quota-exceeded")
        stem, _, count = str(body["id"]).rsplit("-", 2)
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[f"{stem}-{rank}-{count}" for rank in range(nodes)],
            user_data=["#!/bin/sh\n"] * nodes,
            tags={each["name"]: each["value"] for each in body["metadata"]},
            token=body["id"],
        )
        before = len(self.cloud.machines)
        try:
            finish(self.cloud.create(request))
        finally:  # a fault may be reported although the machines were made
            made = self.cloud.machines[before:]
            if made:
                formula = body["poolInfo"]["autoPoolSpecification"]["pool"]["autoScaleFormula"]
                self.jobs[body["id"]] = BatchJob(
                    body=body,
                    machines=tuple(each.id for each in made),
                    at=self.cloud.time,
                    spot="LowPriority" in formula,
                )
        return made

    def start_task(self, job: BatchJob, task: dict[str, Any]) -> None:
        """A task was added, whose node exists."""

    def exit_code(self, machine: Rented) -> int | None:
        """How the task of a machine ended, if it did."""
        return None

    def _create(self, body: dict[str, Any]) -> None:
        if wrong := _refusal(body):
            raise CloudFault(400, "InvalidPropertyValue", wrong)
        if body["id"] in self.jobs:
            raise CloudFault(409, "JobExists", "The specified job already exists.")
        pool = body["poolInfo"]["autoPoolSpecification"]["pool"]
        found = _FORMULA.fullmatch(pool["autoScaleFormula"])
        assert found is not None
        self.start_job(body, int(found[2]))

    def _find(self, name: str) -> BatchJob:
        """The job of a path, which is read only after the listing lag."""
        if name not in self.jobs:
            raise CloudFault(404, "JobNotFound", "The specified job does not exist.")
        return self.jobs[name]

    def _pool(self, name: str) -> BatchJob:
        for each in self.jobs.values():
            if self._pool_name(each) == name and self._state(each) == "active":
                return each
        raise CloudFault(404, "PoolNotFound", "The specified pool does not exist.")

    def _pool_name(self, job: BatchJob) -> str:
        return f"cavvy_{job.machines[0]}"

    def _rented(self, job: BatchJob) -> list[Rented]:
        machines = set(job.machines)
        return [each for each in self.cloud.machines if each.id in machines]

    def _state(self, job: BatchJob) -> str:
        changed = job.changes.get("job", {}).get("state")
        if changed and job.ended is None:
            return str(changed)
        if job.ended or all(each.ended for each in self._rented(job)):
            return "completed"
        return "active"

    def _show(self, job: BatchJob) -> dict[str, Any]:
        state, name = self._state(job), str(job.body["id"])
        told: dict[str, Any] = {
            **job.body,
            "url": f"{self.url}/jobs/{name}",
            "eTag": "0x8DC",
            "lastModified": _text(job.at),
            "creationTime": _text(job.at),
            "state": state,
            "stateTransitionTime": _text(job.at),
            "priority": 0,
            "executionInfo": {"startTime": _text(job.at), "poolId": self._pool_name(job)},
        }
        if state == "completed":
            ends = [each.ended for each in self._rented(job) if each.ended]
            end = _text(job.ended or max(ends))
            told["executionInfo"] |= {"endTime": end}
            told["stateTransitionTime"] = end
        change = job.changes.get("job", {})
        told["executionInfo"] |= change.get("executionInfo", {})
        return told

    def _list_jobs(self, request: RestRequest) -> dict[str, Any]:
        wanted = request.query.get("$filter", "")
        prefix = re.fullmatch(r"startswith\(id,'([\w-]+)'\)", wanted) if wanted else None
        if wanted and prefix is None:
            raise CloudFault(400, "InvalidQueryParameterValue", wanted)
        listed = {each.id for each in finish(self.cloud.list())}
        shown = [
            self._checked("BatchJob", self._show(job))
            for name, job in self.jobs.items()
            if (job.ended or job.machines[0] in listed)
            and (prefix is None or name.startswith(prefix[1]))
        ]
        others = [] if prefix else self.others
        return self._page([*shown, *others], request)

    def _show_task(self, job: BatchJob, name: str, rented: Rented) -> dict[str, Any]:
        code = self.exit_code(rented)
        if rented.ended or job.ended or code is not None:
            state = "completed"
        else:
            booted = self.cloud.time - rented.at >= self.cloud.boot_time
            state = "running" if booted else "active"
        told: dict[str, Any] = {
            **job.tasks[name],
            "url": f"{self.url}/jobs/{job.body['id']}/tasks/{name}",
            "eTag": "0x8DC",
            "lastModified": _text(job.at),
            "creationTime": _text(job.at),
            "state": state,
            "stateTransitionTime": _text(rented.ended or job.at),
            "executionInfo": {"retryCount": 0, "requeueCount": 0},
        }
        if state != "active":
            told["previousState"] = "active" if state == "running" else "running"
            told["executionInfo"]["startTime"] = _text(rented.at)
        if state == "completed":
            ended = {"endTime": _text(rented.ended or job.at), "exitCode": code or 0}
            told["executionInfo"] |= ended
            if code:
                told["executionInfo"] |= {"result": "failure", "failureInfo": _failure(code)}
        told |= job.changes.get(f"task {name}", {}) if not job.ended else {}
        return self._checked("BatchTask", told)

    def _add(self, job: BatchJob, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        if self._state(job) != "active":
            raise CloudFault(409, "JobNotActive", "The specified job is not in active state.")
        told = []
        for task in tasks:
            if wrong := _refuse_task(task):
                raise CloudFault(400, "InvalidPropertyValue", wrong)
            result: dict[str, Any] = {"status": "success", "taskId": task["id"]}
            if task["id"] in job.tasks:
                fault = CloudFault(409, "TaskExists", "The specified task already exists.")
                result |= {"status": "clienterror", "error": self.describe(fault)}
            else:
                job.tasks[task["id"]] = task
                self.start_task(job, task)
            told.append(result)
        return self._checked("BatchCreateTaskCollectionResult", {"value": told})

    def _show_pool(self, job: BatchJob) -> dict[str, Any]:
        count = len([each for each in self._rented(job) if not each.ended])
        pool = job.body["poolInfo"]["autoPoolSpecification"]["pool"]
        return {
            **pool,
            "id": self._pool_name(job),
            "url": f"{self.url}/pools/{self._pool_name(job)}",
            "eTag": "0x8DC",
            "lastModified": _text(job.at),
            "creationTime": _text(job.at),
            "state": "active",
            "stateTransitionTime": _text(job.at),
            "allocationState": "resizing",
            "currentDedicatedNodes": 0 if job.spot else count,
            "currentLowPriorityNodes": count if job.spot else 0,
            **job.changes.get("pool", {}),
        }

    def _list_nodes(self, job: BatchJob, request: RestRequest) -> dict[str, Any]:
        """The nodes; none before their allocation."""
        shown = [
            self._checked(
                "BatchNode",
                {
                    "id": f"tvmps_{each.id}_p",
                    "state": "running" if job.tasks else "idle",
                    "stateTransitionTime": _text(each.at),
                    "allocationTime": _text(each.at),
                    "vmSize": job.body["poolInfo"]["autoPoolSpecification"]["pool"]["vmSize"],
                    "ipAddress": "10.0.0.4",
                    "isDedicated": not job.spot,
                    **job.changes.get(f"node {number}", {}),
                },
            )
            for number, each in enumerate(self._rented(job))
            if each.ended is None and self.cloud.time - each.at >= self.cloud.boot_time
        ]
        nodes = [] if job.changes.get("nodes", {}).get("none") else shown
        return self._page(nodes, request)

    def _terminate(self, job: BatchJob) -> None:
        if self.cloud.fails_deletions:
            raise CloudFault(500, "internal-error")
        if self._state(job) == "completed":
            raise CloudFault(409, "not-found")
        for each in self._rented(job):
            if each.ended is None:
                finish(self.cloud.delete(each.id))
        job.ended = self.cloud.time

    def _prices(self, condition: str) -> dict[str, Any]:
        self.calls.append("prices")
        if self.prices_fail:
            raise CloudFault(503, "ServiceUnavailable", "later")
        assert condition == (
            f"serviceName eq 'Virtual Machines' and armRegionName eq '{REGION}' and priceType eq "
            "'Consumption' and contains(meterName, 'Spot')"
        )
        items = [
            make_price(size, REGION, usd / (1 + windows), kind=" Spot", windows=windows)
            for size, usd in SPOT_USD.items()
            for windows in (True, False)
        ]
        return {"Items": items, "NextPageLink": None}

    def _page(self, items: list[Any], request: RestRequest) -> dict[str, Any]:
        number = int(request.query.get("$skiptoken", 1))
        size = int(request.query.get("maxresults", 1000))
        size = min(size, self.page if len(items) <= _FEW else 100)
        start_at = (number - 1) * size
        shown, more = items[start_at : start_at + size], number * size < len(items)
        found: dict[str, Any] = {"odata.metadata": f"{self.url}/$metadata", "value": shown}
        if more:
            start = re.sub(r"&\$skiptoken=\d+", "", request.target)
            origin = self.url.removesuffix("/" + request.target.split("/")[1])
            found["odata.nextLink"] = f"{origin}{start}&$skiptoken={number + 1}"
        return found

    def _checked(self, model: str, told: dict[str, Any]) -> dict[str, Any]:
        check_value(told, model)
        return told


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _failure(code: int) -> dict[str, Any]:
    return {
        "category": "usererror",
        "code": "FailureExitCode",
        "message": "The task exited with an exit code representing a failure",
        "details": [{"name": "exit code", "value": str(code)}],
    }


def _refusal(body: dict[str, Any]) -> str:
    """What Azure Batch's documentation does not allow, beyond the description."""
    auto = body["poolInfo"]["autoPoolSpecification"]
    pool = auto["pool"]
    machine = pool["virtualMachineConfiguration"]
    variables = body["commonEnvironmentSettings"]
    good = {
        "id": re.fullmatch(r"[\w-]{1,64}", body["id"]),
        "autoPoolIdPrefix": len(auto["autoPoolIdPrefix"]) <= 20,
        "poolLifetimeOption": auto["poolLifetimeOption"] == "job",
        "keepAlive": auto["keepAlive"] is False,
        "enableAutoScale": pool["enableAutoScale"] and "targetDedicatedNodes" not in pool,
        "vmSize": pool["vmSize"] in SIZES,
        "autoScaleFormula": _FORMULA.fullmatch(pool["autoScaleFormula"]),
        "autoScaleEvaluationInterval": pool["autoScaleEvaluationInterval"] == "PT5M",
        "imageReference": machine["imageReference"] == _IMAGE,
        "nodeAgentSKUId": machine["nodeAgentSKUId"] == "batch.node.ubuntu 22.04",
        "onAllTasksComplete": "onAllTasksComplete" not in body,  # a job without tasks would end
        "environmentSettings": all("\n" not in each["value"] for each in variables),
        "maxTaskRetryCount": body["constraints"]["maxTaskRetryCount"] == 0,
    }
    return "".join(f"{name} is wrong" for name, fine in good.items() if not fine)


def _refuse_task(task: dict[str, Any]) -> str:
    good = {
        "id": re.fullmatch(r"\d{1,5}", task["id"]),
        "containerSettings": task["containerSettings"]["imageName"],
        "containerRunOptions": "--gpus"
        not in task["containerSettings"].get("containerRunOptions", ""),
        "commandLine": "\n" not in task["commandLine"],
        # otherwise the container's program is not root
        "userIdentity": task["userIdentity"]["autoUser"]
        == {"scope": "pool", "elevationLevel": "admin"},
    }
    return "".join(f"{name} is wrong" for name, fine in good.items() if not fine)
