"""A strict stand-in for one workspace of Azure Machine Learning, its run history and Azure's list of
prices, over a cloud in memory. It checks each request and each of its own replies
(`azureml_description`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.contract.azure_public import cut_page, is_public, make_price, make_token
from tests.contract.azureml_description import (
    GROUP,
    OPERATIONS,
    SUBSCRIPTION,
    WORKSPACE,
    check,
    find_operation,
)

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    finish,
    name_states,
)
from cavvy.providers.vm.cloud import CloudFault, MachineRequest, MachineState

ROOT = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/"
    f"Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
)
PREEMPTED = (
    "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run "
    "has failed or restarted. Reason: Received pre-emption warning signal"
)
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))
# name: size, priority, most nodes, other fields
CLUSTERS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "cpu": ("STANDARD_DS3_V2", "Dedicated", 300, {}),
    "gpu": ("STANDARD_NC4AS_T4_V3", "Dedicated", 300, {}),
    "gpu-low": ("STANDARD_NC4AS_T4_V3", "LowPriority", 300, {}),
    "tiny": ("STANDARD_DS5_V2", "Dedicated", 1, {}),
    "unpriced": ("STANDARD_Z9", "Dedicated", 4, {}),
    "free": ("STANDARD_DS3_V2", "LowPriority", 4, {}),  # no price of low priority
    "old": ("STANDARD_DS3_V2", "Dedicated", 4, {"osType": "Windows"}),
}
LOW_USD = 0.1052  # of Standard_NC4as_T4_v3
# by name: the kinds of compute targets that a size may have
SIZES = {
    "Standard_DS3_v2": ["AmlCompute", "ComputeInstance"],
    "STANDARD_NC4AS_T4_V3": ["AmlCompute", "ComputeInstance"],
    "Standard_DS5_v2": ["ComputeInstance"],
    "Standard_Z9": ["AmlCompute"],  # without a price
}
CREATION = timedelta(seconds=40)  # of a cluster
_SIZES = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices/locations"


@dataclass(frozen=True, kw_only=True)
class CommandJob:
    """One job, with the machines of its containers."""

    name: str
    body: dict[str, Any]
    machines: tuple[str, ...]


class AzureMlStandIn(RestStandIn):
    """The APIs in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                places          accelerators  CPUs  memory  disk  price  spot
    Standard_DS3_v2       eastus/cpu      -             4     14GiB   -     0.293  -
    Standard_NC4as_T4_v3  eastus/gpu-low  1xT4/16GiB    4     28GiB   -     -      0.1052
    Standard_NC4as_T4_v3  eastus/gpu      1xT4/16GiB    4     28GiB   -     0.526  -
    Standard_DS5_v2       eastus/tiny     -             16    56GiB   -     1.17   -
    """

    key = "eyJ0.test.token"
    denied = CloudFault(401, "InvalidAuthenticationToken", "The access token is invalid.")
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(400, "UserError", "The run has already ended."),
        "forbidden": CloudFault(403, "AuthorizationFailed", "The client has no authorization."),
        "insufficient-capacity": CloudFault(409, "SkuNotAvailable", "The size is not available."),
        "quota-exceeded": CloudFault(409, "QuotaExceeded", "The quota of cores is reached."),
        "too-many-requests": CloudFault(429, "TooManyRequests", "Too many requests."),
    }
    states = name_states(starting="Queued", running="Running", ended="Completed")

    def set_up(self) -> None:
        self.jobs: dict[str, CommandJob] = {}
        self.environments: dict[str, str] = {}  # version -> image
        self.statuses: dict[str, str] = {}  # by job, instead of the machines'
        self.errors: dict[str, str] = {}  # messages of the run history, by job
        self.prices_fail = False
        # by name: clusters that a request has made, and when
        self.made: dict[str, tuple[dict[str, Any], datetime]] = {}
        self.creation_error: dict[str, str] = {}  # of the clusters that are made
        self.calls: list[str] = []
        self.tags: list[str] = []  # that lists asked for
        self.archived: list[str] = []
        self.archive_fault: CloudFault | None = None
        self._cancelled: set[str] = set()

    def authorize(self, request: RestRequest) -> None:
        if not is_public(request):
            super().authorize(request)

    def describe(self, fault: CloudFault) -> object:
        return {"error": {"code": fault.code, "message": fault.message}}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        if request.path == "/api/retail/prices":
            return 200, self._prices(request.query["$filter"])
        if request.path == "/identity":
            return 200, make_token(request, self.key)
        if request.path == f"{_SIZES}/eastus/vmSizes" and request.method == "GET":
            shown = [
                {"name": name, "vCPUs": 4, "gpus": 0, "supportedComputeTypes": kinds}
                for name, kinds in SIZES.items()
            ]
            return 200, {"value": shown}
        try:
            operation, name = find_operation(
                request.method, request.path, request.query, request.body
            )
        except ValueError as error:
            raise CloudFault(400, "BadRequest", str(error)) from error
        self.calls.append(operation)
        status, told = self._do(operation, name, request)
        described = OPERATIONS[operation].reply
        if described is not None:
            listed = "value" in told
            for each in told["value"] if listed else [told]:
                if each not in self.others:
                    check(each, described, operation, reply=True)
        return status, told

    def preempt(self, name: str) -> None:
        """Azure takes the nodes of a job back, and fails the job."""
        self.statuses[name], self.errors[name] = "Failed", PREEMPTED

    def start_job(self, name: str, body: dict[str, Any], nodes: int) -> list[Rented]:
        """Start the machines of a job. Raises CloudFault."""
        if len(self.cloud.billed()) + nodes > self.quota:
            raise CloudFault(400, "quota-exceeded")
        stem, _, count = name.rsplit("-", 2)
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[f"{stem}-{rank}-{count}" for rank in range(nodes)],
            user_data=["#!/bin/sh\n"] * nodes,
            tags=body["properties"]["tags"],
            token=name,
        )
        before = len(self.cloud.machines)
        try:
            finish(self.cloud.create(request))
        finally:  # a fault may be reported although the machines were made
            made = self.cloud.machines[before:]
            if made:
                ids = tuple(each.id for each in made)
                self.jobs[name] = CommandJob(name=name, body=body, machines=ids)
        return made

    def _do(self, operation: str, name: str, request: RestRequest) -> tuple[int, Any]:
        match operation:
            case "workspace":
                return 200, {"name": WORKSPACE, "location": "East US", "properties": {}}
            case "computes" | "compute" | "make compute" | "delete compute":
                return self._do_compute(operation, name, request)
            case "environment" if name in self.environments:
                return 200, {"properties": {"image": self.environments[name]}}
            case "make environment":
                self.environments[name] = request.body["properties"]["image"]
                return 201, request.body
            case "jobs":
                return 200, cut_page(self, self._list(request.query), request)
            case "job":
                return 200, self._show(self._find(name))
            case "make job":
                return self._create(name, request.body)
            case "cancel":
                self._cancel(self._find(name, shown=False))
                return 202, {}
            case "run":
                return 200, self._run(self._find(name))
        raise CloudFault(404, "ResourceNotFound", f"{operation} {name} was not found.")

    def _do_compute(self, operation: str, name: str, request: RestRequest) -> tuple[int, Any]:
        match operation:
            case "computes":
                shown = [self._cluster(each) for each in CLUSTERS]
                shown += [self._show_made(each) for each in self.made]
                return 200, cut_page(self, [*shown, _kubernetes()], request)
            case "compute" if name in CLUSTERS:
                return 200, self._cluster(name)
            case "compute" if name in self.made:
                return 200, self._show_made(name)
            case "make compute":
                return self._make_cluster(name, request.body)
            case "delete compute" if name in self.made:
                assert request.query["underlyingResourceAction"] == "Delete"
                self._delete_cluster(name)
                return 202, {}
        raise CloudFault(404, "ResourceNotFound", f"{operation} {name} was not found.")

    def _create(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        properties = body["properties"]
        if name in self.jobs:  # names are unique in the workspace
            self._archive(self.jobs[name], properties)
            return 200, self._show(self.jobs[name])
        version = properties["environmentId"].rpartition("/")[2]
        cluster = properties["computeId"].rpartition("/")[2]
        ready = {name for name in self.made if self._state_of(name) == "Succeeded"}
        if version not in self.environments or cluster not in CLUSTERS.keys() | ready:
            raise CloudFault(400, "UserError", "the environment or the cluster does not exist")
        nodes = properties["resources"]["instanceCount"]
        most = CLUSTERS[cluster][2] if cluster in CLUSTERS else 100
        named = set(re.findall(r"\$\{\{inputs\.(\w+)\}\}", properties["command"]))
        good = {
            "instanceCount": 1 <= nodes <= most,
            "distribution": nodes == 1 or "distribution" in properties,
            "command": properties["command"].count("${{") == len(named)
            and named <= properties.get("inputs", {}).keys(),
            "tags": all(len(each) <= 256 for each in properties["tags"].values()),
            "environmentVariables": not any(
                "${{" in each for each in properties["environmentVariables"].values()
            ),
        }
        for field, fine in good.items():
            if not fine:
                raise CloudFault(400, "UserError", f"the value of {field} is invalid")
        self.start_job(name, body, nodes)
        return 201, self._show(self.jobs[name], new=True)

    def _archive(self, job: CommandJob, properties: Mapping[str, Any]) -> None:
        """Archive a job, if its request for an update says so. Nothing else may change."""
        fields = dict(properties)
        if not fields.pop("isArchived", False):
            return
        if fields != job.body["properties"]:
            raise CloudFault(400, "UserError", "a field of the job cannot be changed")
        if self._status(job) not in ("Completed", "Failed", "Canceled"):
            raise CloudFault(400, "UserError", "only a job that has ended can be archived")
        if self.archive_fault is not None:
            raise self.archive_fault
        self.archived.append(job.name)

    def _find(self, name: str, *, shown: bool = True) -> CommandJob:
        """A job. It is read only after the listing lag, and cancelled at any time."""
        job = self.jobs.get(name)
        if job is None or (shown and not self._status(job)):
            raise CloudFault(404, "ResourceNotFound", f"The job {name} was not found.")
        return job

    def _status(self, job: CommandJob) -> str:
        """The status of a job; "" if the API does not show it yet, or no longer."""
        shown = finish(self.cloud.get(job.machines[0]))
        if shown is None:
            return ""
        if shown.state is MachineState.ENDED and job.name in self._cancelled:
            return "Canceled"
        return self.statuses.get(job.name) or self.states[shown.state]

    def _rented(self, job: CommandJob) -> Rented:
        return next(each for each in self.cloud.machines if each.id == job.machines[0])

    def _show(self, job: CommandJob, *, new: bool = False) -> dict[str, Any]:
        rented = self._rented(job)
        status = "NotStarted" if new else self._status(job) or "NotStarted"
        return {
            "id": f"{ROOT}/jobs/{job.name}",
            "name": job.name,
            "type": "Microsoft.MachineLearningServices/workspaces/jobs",
            "properties": {**job.body["properties"], "status": status},
            "systemData": {
                "createdAt": _text(rented.at),
                "lastModifiedAt": _text(rented.ended or rented.at),
            },
        }

    def _run(self, job: CommandJob) -> dict[str, Any]:
        """The run history; its times have no zone."""
        status, rented = self._status(job), self._rented(job)
        told: dict[str, Any] = {"runId": job.name, "status": status}
        began = rented.at + self.cloud.boot_time
        if self.cloud.time >= began and (rented.ended is None or rented.ended >= began):
            told["startTimeUtc"] = _text(rented.at).removesuffix("Z")
        if rented.ended is not None or status == "Failed":
            told["endTimeUtc"] = _text(rented.ended or self.cloud.time)
        if job.name in self.errors:
            told["error"] = {"error": {"code": "UserError", "message": self.errors[job.name]}}
        return told

    def _list(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        self.tags.append(query.get("tag", ""))
        listed = {each.id for each in finish(self.cloud.list())}
        return [
            *(
                self._show(job)
                for job in self.jobs.values()
                if job.machines[0] in listed
                and query["tag"] in job.body["properties"]["tags"]
                and (job.name not in self.archived or query["listViewType"] != "ActiveOnly")
            ),
            *self.others,
        ]

    def _cancel(self, job: CommandJob) -> None:
        billed = {each.id for each in self.cloud.billed()}
        if not billed & set(job.machines):
            raise CloudFault(404, "not-found")
        for each in job.machines:
            if each in billed:
                finish(self.cloud.delete(each))
        self._cancelled.add(job.name)

    def _make_cluster(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        inner = body["properties"]["properties"]
        scale = inner["scaleSettings"]
        known = {each.lower(): kinds for each, kinds in SIZES.items()}
        if name in CLUSTERS or name in self.made:
            raise CloudFault(409, "Conflict", "the cluster exists, and would be overwritten")
        if "AmlCompute" not in known.get(inner["vmSize"].lower(), ()):
            raise CloudFault(400, "BadRequest", f"clusters cannot have the size {inner['vmSize']}")
        if not 0 <= scale["minNodeCount"] <= scale["maxNodeCount"] <= 300:
            raise CloudFault(400, "BadRequest", "the counts of nodes are wrong")
        assert body["location"] == "eastus"
        assert all(len(each) <= 256 for each in body["tags"].values())
        self.made[name] = body, self.cloud.time
        return 201, self._show_made(name)

    def _state_of(self, name: str) -> str:
        if self.cloud.time < self.made[name][1] + CREATION:
            return "Creating"
        return "Failed" if self.creation_error else "Succeeded"

    def _delete_cluster(self, name: str) -> None:
        """A strict stand-in refuses to delete a cluster with a job that has not ended."""
        for job in self.jobs.values():
            used = job.body["properties"]["computeId"].rpartition("/")[2] == name
            if used and self._status(job) not in ("Completed", "Failed", "Canceled"):
                raise CloudFault(409, "Conflict", f"the job {job.name} uses the cluster")
        del self.made[name]

    def _show_made(self, name: str) -> dict[str, Any]:
        body, at = self.made[name]
        state = self._state_of(name)
        errors = [{"error": self.creation_error}] if state == "Failed" else []
        return {
            **body,
            "id": f"{ROOT}/computes/{name}",
            "name": name,
            "type": "Microsoft.MachineLearningServices/workspaces/computes",
            "properties": {
                **body["properties"],
                "createdOn": _text(at),
                "provisioningState": state,
                "provisioningErrors": errors,
            },
        }

    def _cluster(self, name: str) -> dict[str, Any]:
        size, priority, most, other = CLUSTERS[name]
        inner: dict[str, Any] = {
            "vmSize": size,
            "vmPriority": priority,
            "osType": "Linux",
            "scaleSettings": {
                "minNodeCount": 0,
                "maxNodeCount": most,
                "nodeIdleTimeBeforeScaleDown": "PT20M",
            },
            "allocationState": "Steady",
            **other,
        }
        if not self.quota:
            error = {"code": "ClusterCoreQuotaReached", "message": "The quota of cores is 0."}
            inner["errors"] = [{"error": error}]
        return {
            "id": f"{ROOT}/computes/{name}",
            "name": name,
            "type": "Microsoft.MachineLearningServices/workspaces/computes",
            "location": "eastus",
            "properties": {
                "computeType": "AmlCompute",
                "provisioningState": "Succeeded",
                "properties": inner,
            },
        }

    def _prices(self, condition: str) -> dict[str, Any]:
        if self.prices_fail:
            raise CloudFault(503, "ServiceUnavailable", "later")
        assert "armRegionName eq 'eastus'" in condition
        assert "contains(skuName, 'Low Priority')" in condition
        size = "Standard_NC4as_T4_v3"
        items = [
            make_price(size, "eastus", LOW_USD, kind=" Low Priority"),
            make_price(size, "eastus", 0.284, kind=" Low Priority", windows=True),
            make_price("Standard_DS5_v2", "eastus", 0.0, kind=" Low Priority"),
        ]
        return {"Items": items, "NextPageLink": None}


def _kubernetes() -> dict[str, Any]:
    """A compute target of another kind, which is left out."""
    return {
        "id": f"{ROOT}/computes/k8s",
        "name": "k8s",
        "location": "eastus",
        "properties": {"computeType": "Kubernetes", "provisioningState": "Succeeded"},
    }


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
