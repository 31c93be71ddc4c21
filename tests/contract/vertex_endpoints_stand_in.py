"""A strict stand-in for Vertex AI's models, endpoints and deployments over a cloud in memory: an
HTTP server that checks each request and each of its own replies against Google's discovery document.

A deployment is a machine. As in Vertex AI, it needs its model and its endpoint, which cannot be
deleted before it is undeployed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.contract.gcp_stand_in import PROJECT, GoogleStandIn
from tests.contract.google_description import describe_api
from tests.contract.vertex_stand_in import MACHINE_TYPES, NUMBER, REGIONS, VertexStandIn

from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    WithHeaders,
    finish,
    name_states,
)
from cavvy.providers.vm.cloud import CloudFault, MachineState

_SCHEMA = "GoogleCloudAiplatformV1"
_CALL = re.compile(rf"/\d+/v1/projects/{PROJECT}/locations/([^/]+)/endpoints/([^/:]+):rawPredict")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
Container = Callable[[bytes, Mapping[str, str]], tuple[int, bytes]]
Key = tuple[str, str]  # region and name


@dataclass(kw_only=True)
class Kept:
    """A model or an endpoint."""

    body: dict[str, Any]
    at: datetime


class VertexEndpointsStandIn(GoogleStandIn):
    """The API, and Google's token service, in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type              places        accelerators  CPUs  memory   disk  price       spot
    a3-highgpu-8g       europe-west4  8xH100/80GiB  208   1872GiB  -     129.421551  -
    e2-standard-4       europe-west4  -             4     16GiB    -     0.169676    -
    g2-standard-4       europe-west4  1xL4/24GiB    4     16GiB    -     0.854353    -
    n1-standard-8-t4x1  europe-west4  1xT4/16GiB    8     30GiB    -     0.903711    -
    a3-highgpu-8g       us-central1   8xH100/80GiB  208   1872GiB  -     101.7635    -
    e2-standard-4       us-central1   -             4     16GiB    -     0.154126    -
    g2-standard-4       us-central1   1xL4/24GiB    4     16GiB    -     0.812857    -
    n1-standard-8-t4x1  us-central1   1xT4/16GiB    8     30GiB    -     0.839498    -
    """

    faults: Mapping[str, CloudFault] = {
        **VertexStandIn.faults,
        "insufficient-capacity": CloudFault(
            429, "RESOURCE_EXHAUSTED", "Resources are insufficient in region: us-central1."
        ),
        "quota-exceeded": CloudFault(
            429,
            "RESOURCE_EXHAUSTED",
            "The following quota metrics exceed quota limits: "
            "aiplatform.googleapis.com/custom_model_serving_cpus",
        ),
    }
    states = name_states(starting="deploying", running="deployed")
    creates = timedelta(0)  # how long the creation of a model or an endpoint takes

    def set_up(self) -> None:
        self.url = f"{self.origin}/v1"
        self.api = describe_api("aiplatform.v1")
        self.models: dict[Key, Kept] = {}
        self.endpoints: dict[Key, Kept] = {}
        self.deployments: dict[str, dict[str, Any]] = {}  # the last request, by name
        self.failures: dict[str, str] = {}  # reasons of failed deployments, by name
        self.cancelled: set[Key] = set()
        self.lingers: set[str] = set()  # endpoints whose model is undeployed slowly
        self.calls: list[str] = []
        self.container: Container = lambda body, headers: (200, b"{}")

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        called = _CALL.fullmatch(target)
        if called is None:
            return super().reply(method, target, headers, content)
        self.calls.append("aiplatform.endpoints.rawPredict")
        if headers.get("authorization") != f"Bearer {self.key}":
            return 401, self.describe(self.denied)
        key = called[1], called[2]
        if not self._is_deployed(key):
            return 404, self.describe(CloudFault(404, "NOT_FOUND", "Endpoint is not found"))
        try:
            status, body = self.answer_call(called[2], content, headers)
        except CloudFault:
            return None
        return status, WithHeaders(body, {"X-Vertex-AI-Deployed-Model-Id": "1"})

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.container(body, headers)

    def answer(self, request: RestRequest) -> tuple[int, object]:
        query, body = dict(request.query), request.body
        name, given = self.api.read_request(request.method, request.path, query, body)
        method = name.removeprefix("aiplatform.projects.locations.")
        self.calls.append(f"aiplatform.{method}")
        region = given["locationsId"]
        if given["projectsId"] not in (PROJECT, NUMBER):
            raise CloudFault(403, "PERMISSION_DENIED", "Permission denied on the project")
        if region not in REGIONS:
            raise CloudFault(404, "NOT_FOUND", f"Location {region} is not found")
        kind = method.partition(".")[0]
        key = region, given.get(f"{kind}Id", "")
        match method:
            case "models.upload":
                return self._create(self.models, (region, body["modelId"]), body["model"])
            case "endpoints.create":
                return self._create(self.endpoints, (region, query["endpointId"]), body)
            case "models.get" | "endpoints.get":
                return self._checked(kind.title()[:-1], self._show(kind, self._find(kind, key)))
            case "models.list" | "endpoints.list":
                return self._list(kind, region, query)
            case "endpoints.deployModel":
                return self._deploy(self._find(kind, key), body)
            case "endpoints.undeployModel":
                return self._undeploy(self._find(kind, key))
            case "endpoints.operations.list":
                told = {"operations": self._operations(self._find(kind, key))}
                return 200, told
            case "endpoints.operations.cancel":
                self.cancelled.add(key)
                return 200, {}
            case "models.delete" | "endpoints.delete":
                return self._delete(kind, self._find(kind, key))
        raise CloudFault(501, "UNIMPLEMENTED", method)

    def start_deployment(self, key: Key) -> None:
        labels = self.endpoints[key].body["labels"]
        self.start(key[1], "#!/bin/sh\n", {**labels, "region": key[0]})

    def is_up(self, name: str) -> bool:
        """Whether the container answers its health route."""
        return True

    def machines_of(self, key: Key) -> list[Rented]:
        region, name = key
        every = self.cloud.machines
        return [each for each in every if each.name == name and each.tags["region"] == region]

    def _kept(self, kind: str) -> dict[Key, Kept]:
        return self.models if kind == "models" else self.endpoints

    def _find(self, kind: str, key: Key) -> Key:
        kept = self._kept(kind).get(key)
        if kept is None or self.cloud.time - kept.at < self.creates:
            raise CloudFault(404, "NOT_FOUND", f"{key[1]} is not found")
        return key

    def _create(self, kept: dict[Key, Kept], key: Key, body: Any) -> tuple[int, object]:
        if key in kept:
            raise CloudFault(409, "ALREADY_EXISTS", f"{key[1]} already exists")
        if wrong := _refusal(key[1], body):
            raise CloudFault(400, "INVALID_ARGUMENT", wrong)
        kept[key] = Kept(body=body, at=self.cloud.time)
        return self._operation(key, "create", self.cloud.time, done=not self.creates)

    def _deploy(self, key: Key, body: dict[str, Any]) -> tuple[int, object]:
        deployed = body["deployedModel"]
        machine = deployed["dedicatedResources"]["machineSpec"]
        model = (key[0], str(deployed["model"]).rpartition("/")[2])
        if not MACHINE_TYPES.fullmatch(machine["machineType"]):
            raise CloudFault(400, "INVALID_ARGUMENT", "Machine type is not supported")
        if body["trafficSplit"] != {"0": 100} or not re.fullmatch(r"\d{1,10}", deployed["id"]):
            raise CloudFault(400, "INVALID_ARGUMENT", "the traffic or the id is wrong")
        self._find("models", model)
        self.deployments[key[1]] = deployed
        self.start_deployment(key)
        return self._operation(key, "deploy", self.cloud.time, done=False)

    def _undeploy(self, key: Key) -> tuple[int, object]:
        if not self._is_deployed(key):
            raise CloudFault(404, "NOT_FOUND", "the model is not deployed")
        for each in self.machines_of(key):
            if each.ended is None:
                finish(self.cloud.delete(each.id))
        self.end_container(key[1])
        return self._operation(key, "undeploy", self.cloud.time, done=False)

    def end_container(self, name: str) -> None:
        """End the process of a deployment."""

    def _delete(self, kind: str, key: Key) -> tuple[int, object]:
        used = [each for each in self.machines_of(key) if each.ended is None]
        if self.cloud.fails_deletions:
            raise CloudFault(500, "INTERNAL", "Internal error encountered")
        if used and self._failure(key) and kind == "endpoints":
            for each in used:
                finish(self.cloud.delete(each.id))
        elif used or key[1] in self.lingers:
            raise CloudFault(400, "FAILED_PRECONDITION", f"{kind} with deployments stay")
        del self._kept(kind)[key]
        return self._operation(key, "delete", self.cloud.time, done=True)

    def _failure(self, key: Key) -> str | None:
        cancelled = "The operation was cancelled." if key in self.cancelled else None
        return self.failures.get(key[1], cancelled)

    def _is_deployed(self, key: Key) -> bool:
        if self._failure(key):
            return False
        if key[1] in self.lingers:
            return True
        return any(
            (shown := finish(self.cloud.get(each.id))) is not None
            and shown.state is MachineState.RUNNING
            and self.is_up(key[1])
            for each in self.machines_of(key)
            if each.ended is None
        )

    def _show(self, kind: str, key: Key) -> dict[str, Any]:
        kept = self._kept(kind)[key]
        told = {
            **kept.body,
            "name": f"projects/{NUMBER}/locations/{key[0]}/{kind}/{key[1]}",
            "createTime": _text(kept.at),
        }
        if kind == "endpoints" and self._is_deployed(key):
            at = _text(self.machines_of(key)[-1].at)
            told["deployedModels"] = [{**self.deployments[key[1]], "createTime": at}]
        return told

    def _operations(self, key: Key) -> list[dict[str, Any]]:
        found = []
        for each in self.machines_of(key):
            failure = self._failure(key)
            up = each.ended is not None or self._is_deployed(key)
            found += [self._operation(key, "deploy", each.at, done=up, failure=failure)[1]]
            if each.ended is not None and failure is None:
                done = key[1] not in self.lingers
                found += [self._operation(key, "undeploy", each.ended, done=done)[1]]
        return found

    def _operation(
        self, key: Key, verb: str, at: datetime, *, done: bool, failure: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        kind = {"deploy": "DeployModel", "undeploy": "UndeployModel"}.get(verb, "Other")
        place = f"projects/{NUMBER}/locations/{key[0]}/endpoints/{key[1]}"
        told: dict[str, Any] = {
            "name": f"{place}/operations/{verb}",
            "metadata": {
                "@type": f"type.googleapis.com/google.cloud.aiplatform.v1.{kind}OperationMetadata",
                "genericMetadata": {"createTime": _text(at), "updateTime": _text(at)},
            },
            "done": done or failure is not None,
        }
        if failure is not None:
            told["error"] = {"code": 9, "message": failure}
        self.api.check_value("GoogleLongrunningOperation", {**told, "metadata": {}})
        generic = told["metadata"]["genericMetadata"]
        self.api.check_value(f"{_SCHEMA}GenericOperationMetadata", generic)
        return 200, told

    def _list(self, kind: str, region: str, query: Mapping[str, str]) -> tuple[int, object]:
        mark = re.fullmatch(r'labels\.cavvy-installation="([^"]*)"', query.get("filter", ""))
        keys = [] if self.cloud.hides else list(self._kept(kind))
        if self.cloud.fails_lists:
            raise CloudFault(503, "unavailable")
        shown = [
            told
            for key in keys
            if key[0] == region and self._is_listed(kind, key)
            for told in [self._show(kind, key)]
            if mark is None or told["labels"].get("cavvy-installation") == mark[1]
        ]
        number, size = int(query.get("pageToken", 1)), int(query.get("pageSize", 50))
        cut, more = self.cut(shown, number, size)
        told = {kind: list(cut), **({"nextPageToken": str(number + 1)} if more else {})}
        self._checked(f"List{kind.title()}Response", told)
        return 200, {**told, kind: [*told[kind], *self.others]}

    def _is_listed(self, kind: str, key: Key) -> bool:
        lag = max([self.creates, *(self.cloud.traits.list_lag for _ in self.machines_of(key)[:1])])
        return self.cloud.time - self._kept(kind)[key].at >= lag

    def _checked(self, schema: str, told: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.api.check_value(_SCHEMA + schema, told)
        return 200, told


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _refusal(name: str, body: dict[str, Any]) -> str:
    """What Google's documentation does not allow, beyond the description."""
    labels, container = body["labels"], body.get("containerSpec")
    if not _NAME.fullmatch(name):
        return "the id is wrong"
    if any(not re.fullmatch(r"[a-z0-9_-]{0,63}", each) for each in [*labels, *labels.values()]):
        return "a label has characters that are not allowed"
    if container and (len(container["env"]) > 200 or len(container["ports"]) != 1):
        return "the container is wrong"
    return ""
