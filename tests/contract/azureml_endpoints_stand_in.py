"""A strict stand-in for the online endpoints of one workspace of Azure Machine Learning, over a
cloud in memory. It checks each request and each of its own replies against
`azureml_endpoints_description`.

A deployment is a machine. As at Azure, it needs a complete endpoint and an environment, and nothing
of an endpoint can be changed or deleted while Azure works on it. Deletions take some time.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.contract.azure_public import cut_page, is_public, make_token
from tests.contract.azureml_description import GROUP, SUBSCRIPTION, WORKSPACE, check, find_operation
from tests.contract.azureml_endpoints_description import (
    ENDPOINT_OPERATIONS,
    find_wrong,
)
from tests.contract.azureml_stand_in import ROOT, AzureMlStandIn

from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    WithHeaders,
    finish,
    name_states,
)
from cavvy.providers.vm.cloud import CloudFault

ML_TOKEN = "eyJ0.ml.token"  # opens the endpoints, but not Azure Resource Manager
_REGIONAL = (
    f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices/locations/eastus"
)
_SCORE = re.compile(r"/\d+/score/([^/]+)/invocations")
SIZES = {  # by name: the kinds of compute targets that it may have
    "Standard_DS3_v2": ["AmlCompute", "ComputeInstance"],
    "STANDARD_NC4AS_T4_V3": ["AmlCompute", "ComputeInstance"],
    "Standard_DS5_v2": ["ComputeInstance"],
    "Standard_D4s_v3": ["AmlCompute"],  # not for endpoints
    "Standard_F2s_v2": ["AmlCompute"],  # the contract suite has no price of it
}
_DEPLOYABLE = {"standard_ds3_v2", "standard_nc4as_t4_v3", "standard_f2s_v2"}
NO_QUOTA = (
    'InferencingClient HttpRequest error, error detail: {"errors":{"VmSize":["Not enough quota '
    "available for Standard_DS3_v2 in SubscriptionId 0. Current usage/limit: 0/6. Additional "
    'needed: 8"]}}'
)
NO_ROOM = (
    "OutOfQuota",
    "Due to a lack of Azure Machine Learning capacity in the region, the service failed to "
    "provision the specified VM size.",
)
Container = Callable[[bytes, Mapping[str, str]], tuple[int, bytes]]


@dataclass(kw_only=True)
class OnlineEndpoint:
    """An endpoint, and the body of its deployment's request."""

    body: dict[str, Any]
    at: datetime
    deployment: dict[str, Any] | None = None
    deployed_at: datetime | None = None
    deleted_at: datetime | None = None


class AzureMlEndpointsStandIn(RestStandIn):
    """The APIs in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                places  accelerators  CPUs  memory  disk  price  spot
    Standard_DS3_v2       eastus  -             4     14GiB   -     0.293  -
    Standard_NC4as_T4_v3  eastus  1xT4/16GiB    4     28GiB   -     0.526  -
    """

    settings: Mapping[str, str] = {
        "subscription": SUBSCRIPTION,
        "resource_group": GROUP,
        "workspace": WORKSPACE,
    }
    key = AzureMlStandIn.key
    denied = AzureMlStandIn.denied
    faults: Mapping[str, CloudFault] = {
        **AzureMlStandIn.faults,
        "not-found": CloudFault(404, "NotFound", "The specified resource was not found."),
        "quota-exceeded": CloudFault(400, "BadRequest", NO_QUOTA),
    }
    states = name_states(starting="Creating", running="Succeeded")
    creates = timedelta(0)  # how long the creation of an endpoint takes
    deletes = timedelta(seconds=50)

    def set_up(self) -> None:
        self.endpoints: dict[str, OnlineEndpoint] = {}
        self.environments: dict[str, dict[str, Any]] = {}  # by version
        self.failures: dict[str, str] = {}  # of deployments, by endpoint: the reason
        self.codes: dict[str, str] = {}  # of these failures, if it is not the usual one
        self.endpoint_failures: dict[str, str] = {}  # of endpoints
        self.taken = False  # the names of endpoints are those of another workspace
        # Azure refuses to delete an endpoint whose deployment is being made; it documents this for
        # endpoints on Kubernetes alone
        self.strict = False
        self.calls: list[str] = []
        self.container: Container = lambda body, headers: (200, b"{}")

    def authorize(self, request: RestRequest) -> None:
        if not is_public(request):
            super().authorize(request)

    def describe(self, fault: CloudFault) -> object:
        if fault.code != "BadRequest":
            return {"error": {"code": fault.code, "message": fault.message}}
        detail = {"code": "InferencingClientCallFailed", "message": fault.message}
        what = {"code": fault.code, "message": "The request is invalid.", "details": [detail]}
        return {"error": what}

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        called = _SCORE.fullmatch(target)
        if called is None or method != "POST":
            return super().reply(method, target, headers, content)
        self.calls.append("score")
        name = called[1]
        if headers.get("authorization") != f"Bearer {ML_TOKEN}":
            return 401, b"Unauthorized"
        routed = headers.get("azureml-model-deployment") == "replica"
        if not routed or self._deployment_state(name) != "Succeeded":
            return 404, b""  # no deployment with a positive share of the traffic
        try:
            status, body = self.answer_call(name, content, headers)
        except CloudFault:
            return None
        except OSError:
            return 424, WithHeaders(b"", {"ms-azureml-model-error-reason": "model_error"})
        if status == 200:
            return 200, body
        return 424, WithHeaders(body, {"ms-azureml-model-error-statuscode": str(status)})

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.container(body, headers)

    def answer(self, request: RestRequest) -> tuple[int, object]:
        if request.path == "/identity":
            own = request.query["resource"] == "https://ml.azure.com"
            return 200, make_token(request, ML_TOKEN if own else self.key)
        if request.path == f"{_REGIONAL}/vmSizes":
            return 200, {"value": [_size(*each) for each in SIZES.items()]}
        if request.path.startswith(f"{_REGIONAL}/mfeOperationsStatus/"):
            return self._operation(request.path.rpartition("/")[2])
        if request.path.rpartition("/")[0] == ROOT.rpartition("/")[0] and request.path != ROOT:
            raise CloudFault(404, "ResourceNotFound", "The workspace was not found.")
        self._finish_deletions()
        try:
            operation, name = find_operation(
                request.method, request.path, request.query, request.body, ENDPOINT_OPERATIONS
            )
        except ValueError as error:
            raise CloudFault(400, "BadRequest", str(error)) from error
        self.calls.append(operation)
        status, told = self._do(operation, name, request)
        if (described := ENDPOINT_OPERATIONS[operation].reply) is not None:
            for each in told.get("value", [told]):
                if each not in self.others:
                    check(each, described, operation, reply=True)
        return status, told

    def start_deployment(self, name: str) -> None:
        tags = self.endpoints[name].body["tags"]
        self.start(tags["cavvy-name"], "#!/bin/sh\n", {**tags, "endpoint": name})

    def end_container(self, name: str) -> None:
        """End the process of a deployment."""

    def is_up(self, name: str) -> bool:
        """Whether the container answers its readiness route."""
        return True

    def machines_of(self, name: str) -> list[Rented]:
        return [each for each in self.cloud.machines if each.tags.get("endpoint") == name]

    def _do(self, operation: str, name: str, request: RestRequest) -> tuple[int, Any]:
        match operation:
            case "workspace":
                return 200, {"name": WORKSPACE, "location": "East US", "properties": {}}
            case "computes":
                return 200, {"value": []}
            case "environment" if name in self.environments:
                return 200, {"properties": self.environments[name]}
            case "make environment":
                self.environments[name] = request.body["properties"]
                return 201, request.body
            case "endpoints":
                return 200, cut_page(self, self._list(), request)
            case "endpoint" if name in self.endpoints:
                return 200, self._show(name)
            case "make endpoint":
                return self._create(name, request.body)
            case "delete endpoint":
                return self._delete(name)
            case "deployment" if name in self.endpoints and self.endpoints[name].deployment:
                return 200, self._show_deployment(name)
            case "make deployment":
                return self._deploy(name, request.body)
        raise CloudFault(404, "NotFound", f"{operation} {name} was not found.")

    def _create(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.taken:
            told = "There is already an endpoint with this name, Endpoint name needs to be unique"
            raise CloudFault(400, "BadRequest", told)
        if name in self.endpoints:
            raise CloudFault(409, "Conflict", "an operation is in progress")
        own = body["identity"].get("userAssignedIdentities")
        if (body["identity"]["type"] == "UserAssigned") != bool(own):
            raise CloudFault(400, "BadRequest", "the identity is wrong")
        self.endpoints[name] = OnlineEndpoint(body=body, at=self.cloud.time)
        return 201, self._show(name)

    def _deploy(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        kept = self.endpoints.get(name)
        if kept is None:
            raise CloudFault(404, "NotFound", "the endpoint was not found")
        if (state := self._endpoint_state(name)) != "Succeeded":
            told = f"Cannot create a deployment in endpoint {name} because it is in {state} "
            raise CloudFault(400, "BadRequest", f"{told}provisioning state.")
        if kept.deployment is not None:
            raise CloudFault(409, "Conflict", "an operation is in progress")
        properties = body["properties"]
        environment = self.environments.get(properties["environmentId"].rpartition("/")[2], {})
        if len(environment.get("inferenceConfig", {})) != 3:
            raise CloudFault(400, "BadRequest", "the environment has no routes")
        if properties["instanceType"].lower() not in _DEPLOYABLE:
            raise CloudFault(400, "BadRequest", "the size is not supported")
        if wrong := find_wrong(body):
            raise CloudFault(400, "BadRequest", f"{wrong} is not allowed")
        before = len(self.cloud.machines)
        try:
            kept.deployment, kept.deployed_at = body, self.cloud.time
            self.start_deployment(name)
        finally:  # a fault may be reported although the machine was made
            if len(self.cloud.machines) == before:
                kept.deployment = None
        return 201, self._show_deployment(name)

    def _delete(self, name: str) -> tuple[int, Any]:
        kept = self.endpoints.get(name)
        if kept is None:
            return 204, None
        if self.cloud.fails_deletions:
            raise CloudFault(500, "InternalServerError", "something is wrong with the service")
        busy = self.strict and self._deployment_state(name) == "Creating"
        if busy or self._endpoint_state(name) in ("Creating", "Deleting"):
            raise CloudFault(409, "Conflict", "an operation is in progress on the endpoint")
        for each in self.machines_of(name):
            if each.ended is None:
                finish(self.cloud.delete(each.id))
        self.end_container(name)
        kept.deleted_at = self.cloud.time
        return 202, None

    def _finish_deletions(self) -> None:
        for name, kept in list(self.endpoints.items()):
            if all(each.ended for each in self.machines_of(name)) and kept.deleted_at is None:
                kept.deployment = None  # a person deleted it
            if kept.deleted_at is not None and self.cloud.time - kept.deleted_at >= self.deletes:
                del self.endpoints[name]

    def _endpoint_state(self, name: str) -> str:
        kept = self.endpoints[name]
        if kept.deleted_at is not None:
            return "Deleting"
        if self.cloud.time - kept.at < self.creates:
            return "Creating"
        return "Failed" if name in self.endpoint_failures else "Succeeded"

    def _deployment_state(self, name: str) -> str:
        kept = self.endpoints.get(name)
        if kept is None or kept.deployment is None:
            return ""
        machines = self.machines_of(name)
        if kept.deleted_at is not None:
            return "Deleting"
        booted = all(self.cloud.time - each.at >= self.cloud.boot_time for each in machines)
        up = booted and self.is_up(name)
        if name in self.failures:
            return "Failed"
        return "Succeeded" if up else "Creating"

    def _show(self, name: str) -> dict[str, Any]:
        kept = self.endpoints[name]
        told = self._resource(name, "oe", kept.body, kept.at, self._endpoint_state(name))
        told["properties"]["scoringUri"] = f"{self.url}/score/{name}/invocations"
        return told

    def _show_deployment(self, name: str) -> dict[str, Any]:
        kept = self.endpoints[name]
        assert kept.deployment is not None
        assert kept.deployed_at is not None
        state = self._deployment_state(name)
        return self._resource(name, "od", kept.deployment, kept.deployed_at, state)

    def _resource(
        self, name: str, kind: str, body: dict[str, Any], at: datetime, state: str
    ) -> dict[str, Any]:
        below = f"/onlineEndpoints/{name}{'/deployments/replica' if kind == 'od' else ''}"
        url = f"{self.url}{_REGIONAL}/mfeOperationsStatus/{kind}:{name}"
        changed = self.cloud.time if state == "Failed" else at
        properties = {"AzureAsyncOperationUri": f"{url}?api-version=2024-04-01"}
        return {
            **body,
            "id": f"{ROOT}{below}",
            "name": "replica" if kind == "od" else name,
            "systemData": {"createdAt": _text(at), "lastModifiedAt": _text(changed)},
            "properties": {
                **body["properties"],
                "provisioningState": state,
                "properties": properties,
            },
        }

    def _operation(self, name: str) -> tuple[int, Any]:
        self.calls.append("operation")
        kind, _, endpoint = name.partition(":")
        failures = self.failures if kind == "od" else self.endpoint_failures
        if endpoint not in failures:
            return 200, {"status": "Succeeded"}
        code = self.codes.get(endpoint, "ResourceNotReady")
        error = {"code": code, "message": failures[endpoint]}
        return 200, {"status": "Failed", "error": error}

    def _list(self) -> list[dict[str, Any]]:
        if self.cloud.fails_lists:
            raise CloudFault(503, "ServiceUnavailable", "later")
        listed = {each.id for each in finish(self.cloud.list())}
        shown = [
            self._show(name)
            for name in ([] if self.cloud.hides else self.endpoints)
            if all(each.id in listed or each.ended for each in self.machines_of(name))
        ]
        return [*shown, *self.others]


def _size(name: str, kinds: list[str]) -> dict[str, Any]:
    return {"name": name, "vCPUs": 4, "gpus": 0, "supportedComputeTypes": kinds}


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
