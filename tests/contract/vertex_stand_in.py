"""A strict stand-in for Vertex AI's custom jobs over a cloud in memory: an HTTP server that checks
each request and each of its own replies against Google's discovery document.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.contract.gcp_stand_in import PROJECT, GoogleStandIn
from tests.contract.google_description import describe_api

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestRequest, finish, name_states
from cavvy.providers.vm.cloud import CloudFault, MachineRequest, MachineState

REGIONS = ("us-central1", "europe-west4")
NUMBER = "123456789"  # of the project; replies name the project by it
_SCHEMA = "GoogleCloudAiplatformV1"
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))
_WITH_GPU = re.compile(r"(a2|a3|a4|g2|g4)-")
# https://cloud.google.com/vertex-ai/docs/training/configure-compute#machine-types
MACHINE_TYPES = re.compile(
    r"a4-highgpu-8g|a3-(ultra|mega)gpu-8g|a3-highgpu-[1248]g|a2-(ultra|high)gpu-[1248]g|"
    r"a2-megagpu-16g|(e2|n1|n2)-standard-\d+|(e2|n1|n2)-high(mem|cpu)-\d+|c2-standard-\d+|"
    r"g[24]-standard-\d+"
)


@dataclass(frozen=True, kw_only=True)
class CustomJob:
    """One job, with the machines of its containers."""

    id: str
    region: str
    body: dict[str, Any]
    machines: tuple[str, ...]


class VertexStandIn(GoogleStandIn):
    """The API, and Google's token service, in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type              places        accelerators  CPUs  memory   disk  price       spot
    a3-highgpu-1g       europe-west4  1xH100/80GiB  26    234GiB   -     -           7.624981
    a3-highgpu-8g       europe-west4  8xH100/80GiB  208   1872GiB  -     129.421551  60.999851
    e2-standard-4       europe-west4  -             4     16GiB    -     0.169676    0.09266
    g2-standard-4       europe-west4  1xL4/24GiB    4     16GiB    -     0.854353    0.501297
    n1-standard-8-t4x1  europe-west4  1xT4/16GiB    8     30GiB    -     0.903711    0.535935
    a3-highgpu-1g       us-central1   1xH100/80GiB  26    234GiB   -     -           7.985381
    a3-highgpu-8g       us-central1   8xH100/80GiB  208   1872GiB  -     101.7635    63.883041
    e2-standard-4       us-central1   -             4     16GiB    -     0.154126    0.100527
    g2-standard-4       us-central1   1xL4/24GiB    4     16GiB    -     0.812857    0.503361
    n1-standard-8-t4x1  us-central1   1xT4/16GiB    8     30GiB    -     0.839498    0.41852
    """

    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(400, "FAILED_PRECONDITION", "The job is in a final state"),
        "too-many-requests": CloudFault(
            429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Resource management'"
        ),
        "internal-error": CloudFault(500, "INTERNAL", "Internal error encountered"),
        "unavailable": CloudFault(503, "UNAVAILABLE", "The service is unavailable"),
        "forbidden": CloudFault(403, "PERMISSION_DENIED", "Permission denied"),
        "insufficient-capacity": CloudFault(
            400, "FAILED_PRECONDITION", "Resources are insufficient in region: us-central1."
        ),
        "quota-exceeded": CloudFault(
            429,
            "RESOURCE_EXHAUSTED",
            "The following quota metrics exceed quota limits: "
            "aiplatform.googleapis.com/custom_model_training_cpus",
        ),
    }
    states = name_states(
        starting="JOB_STATE_PENDING", running="JOB_STATE_RUNNING", ended="JOB_STATE_SUCCEEDED"
    )

    def set_up(self) -> None:
        self.url = f"{self.origin}/v1"
        self.api = describe_api("aiplatform.v1")
        self.jobs: dict[str, CustomJob] = {}
        self.changes: dict[str, dict[str, Any]] = {}  # of replies, by job
        self.calls: list[str] = []
        self.filters: list[str] = []  # of lists
        self._cancelled: set[str] = set()

    def answer(self, request: RestRequest) -> tuple[int, object]:
        query, body = dict(request.query), request.body
        name, given = self.api.read_request(request.method, request.path, query, body)
        method = name.removeprefix("aiplatform.projects.locations.")
        self.calls.append(f"aiplatform.{method}")
        region = given["locationsId"]
        if given["projectsId"] != PROJECT:
            raise CloudFault(403, "PERMISSION_DENIED", "Permission denied on the project")
        if region not in REGIONS:
            raise CloudFault(404, "NOT_FOUND", f"Location {region} is not found")
        match method:
            case "customJobs.create":
                return self._checked("CustomJob", self._create(region, body))
            case "customJobs.get":
                return self._checked("CustomJob", self._show(self._find(given)))
            case "customJobs.cancel":
                self._cancel(self._find(given, shown=False))
                return 200, {}
            case "customJobs.list":
                self.filters.append(query.get("filter", ""))
                status, told = self._checked("ListCustomJobsResponse", self._list(region, query))
                return status, {**told, "customJobs": [*told["customJobs"], *self.others]}
        raise CloudFault(501, "UNIMPLEMENTED", method)

    def copy_newest(self) -> None:
        """A second job with the name of the newest one, as after a request that was sent twice."""
        newest = list(self.jobs.values())[-1]
        rented = {each.id: each for each in self.cloud.machines}
        twins = [self.cloud.add(rented[each].name, rented[each].tags) for each in newest.machines]
        self._note(newest.region, newest.body, twins)

    def start_job(self, region: str, body: dict[str, Any], nodes: int) -> list[Rented]:
        """Start the machines of a job. Raises CloudFault."""
        if len(self.cloud.billed()) + nodes > self.quota:
            raise CloudFault(400, "quota-exceeded")
        stem, _, count = str(body["displayName"]).rsplit("-", 2)
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[f"{stem}-{rank}-{count}" for rank in range(nodes)],
            user_data=["#!/bin/sh\n"] * nodes,
            tags=body["labels"],
            token=str(len(self.jobs)),
        )
        before = len(self.cloud.machines)
        try:
            finish(self.cloud.create(request))
        finally:  # a fault may be reported although the machines were made
            made = self.cloud.machines[before:]
            if made:
                self._note(region, body, [each.id for each in made])
        return made

    def _note(self, region: str, body: dict[str, Any], machines: list[str]) -> None:
        number = str(4_000_000_000_000_000_000 + len(self.jobs))
        self.jobs[number] = CustomJob(id=number, region=region, body=body, machines=tuple(machines))

    def _checked(self, schema: str, told: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.api.check_value(_SCHEMA + schema, told)
        return 200, told

    def _create(self, region: str, body: dict[str, Any]) -> dict[str, Any]:
        if wrong := _refusal(body):
            raise CloudFault(400, "INVALID_ARGUMENT", wrong)
        pools = body["jobSpec"]["workerPoolSpecs"]
        self.start_job(region, body, sum(int(each["replicaCount"]) for each in pools))
        return self._show(list(self.jobs.values())[-1], new=True)

    def _find(self, given: Mapping[str, str], *, shown: bool = True) -> CustomJob:
        """The job of a path. A job is read only after the listing lag, and cancelled at any time."""
        job = self.jobs.get(given["customJobsId"])
        known = job is not None and job.region == given["locationsId"]
        if job is None or not known or (shown and not self._state(job)):
            raise CloudFault(404, "NOT_FOUND", f"CustomJob {given['customJobsId']} is not found")
        return job

    def _state(self, job: CustomJob) -> str:
        """The state of a job; "" if the API does not show it yet, or no longer."""
        shown = finish(self.cloud.get(job.machines[0]))
        if shown is None:
            return ""
        if shown.state is MachineState.ENDED and job.id in self._cancelled:
            return "JOB_STATE_CANCELLED"
        return str(self.changes.get(job.id, {}).get("state") or self.states[shown.state])

    def _show(self, job: CustomJob, *, new: bool = False) -> dict[str, Any]:
        rented = next(each for each in self.cloud.machines if each.id == job.machines[0])
        state = "JOB_STATE_PENDING" if new else self._state(job)
        told = {
            **job.body,
            "name": f"projects/{NUMBER}/locations/{job.region}/customJobs/{job.id}",
            "state": state,
            "createTime": _text(rented.at),
            "updateTime": _text(rented.ended or rented.at),
        }
        if state != "JOB_STATE_PENDING":
            told["startTime"] = _text(rented.at)
        if rented.ended is not None:
            told |= {"startTime": _text(rented.at), "endTime": _text(rented.ended)}
        changes = {} if state == "JOB_STATE_CANCELLED" else self.changes.get(job.id, {})
        return {field: value for field, value in (told | changes).items() if value is not None}

    def _list(self, region: str, query: Mapping[str, str]) -> dict[str, Any]:
        listed = {each.id for each in finish(self.cloud.list())}
        shown = [
            told
            for job in self.jobs.values()
            if job.region == region and job.machines[0] in listed
            if _fits(told := self._show(job), query.get("filter", ""))
        ]
        number, size = int(query.get("pageToken", 1)), int(query.get("pageSize", 50))
        cut, more = self.cut(shown, number, size)
        following = {"nextPageToken": str(number + 1)} if more else {}
        return {"customJobs": list(cut), **following}

    def _cancel(self, job: CustomJob) -> None:
        billed = {each.id for each in self.cloud.billed()}
        if not billed & set(job.machines):
            raise CloudFault(404, "not-found")
        for each in job.machines:
            if each in billed:
                finish(self.cloud.delete(each))
        self._cancelled.add(job.id)


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _fits(told: Mapping[str, Any], condition: str) -> bool:
    """Whether a job passes a filter; this stand-in knows four forms of conditions."""
    for each in condition.split(" AND ") if condition else ():
        if labelled := re.fullmatch(r"labels\.([\w-]+):\*", each):
            fits = labelled[1] in told.get("labels", {})
        elif labelled := re.fullmatch(r'labels\.([\w-]+)="([^"]*)"', each):
            fits = told.get("labels", {}).get(labelled[1]) == labelled[2]
        elif other := re.fullmatch(r'state!="(JOB_STATE_\w+)"', each):
            fits = told["state"] != other[1]
        elif since := re.fullmatch(r'create_time>"([^"]+)"', each):
            fits = datetime.fromisoformat(told["createTime"]) > datetime.fromisoformat(since[1])
        else:
            raise CloudFault(400, "INVALID_ARGUMENT", f"Invalid list filter: {each}")
        if not fits:
            return False
    return True


def _refusal(body: dict[str, Any]) -> str:
    """What Vertex AI's documentation does not allow, beyond the description."""
    spec, labels = body["jobSpec"], body["labels"]
    pools, scheduling = spec["workerPoolSpecs"], spec["scheduling"]
    if len(body["displayName"]) > 128:
        return "displayName is too long"
    if any(not re.fullmatch(r"[a-z0-9_-]{0,63}", each) for each in [*labels, *labels.values()]):
        return "a label has characters that are not allowed"
    if pools[0]["replicaCount"] != 1:
        return "the first worker pool has one replica"
    for pool in pools:
        machine, container = pool["machineSpec"], pool["containerSpec"]
        if not MACHINE_TYPES.fullmatch(machine["machineType"]):
            return f"Machine type {machine['machineType']} is not supported"
        if _WITH_GPU.match(machine["machineType"]) and "acceleratorType" not in machine:
            return "this machine type needs accelerators"
        if ("acceleratorType" in machine) != bool(machine.get("acceleratorCount")):
            return "acceleratorType and acceleratorCount belong together"
        if len(container["env"]) > 100 or not container["imageUri"]:
            return "the container is wrong"
        if "reservationAffinity" in machine and scheduling["strategy"] != "STANDARD":
            return "a reservation needs the strategy STANDARD"
        if pool.get("diskSpec", {}).get("bootDiskSizeGb", 100) < 100:
            return "the disk is too small"
    return ""
