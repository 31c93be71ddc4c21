"""A strict stand-in for the compute instances of one workspace of Azure Machine Learning, over a
cloud in memory. It checks each request and each of its own replies against Azure's published API:
the version 2024-04-01, and for requests the version 2023-06-01-preview, which also has the field
`idleTimeBeforeShutdown` (the file machineLearningServices.json of both).
"""

import base64
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tests.contract.azure_public import cut_page
from tests.contract.azureml_description import (
    GROUP,
    SUBSCRIPTION,
    WORKSPACE,
    Each,
    Field,
    check,
)
from tests.contract.azureml_stand_in import ROOT, AzureMlStandIn

from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestRequest, RestStandIn, name_states
from cavvy.providers.vm.cloud import CloudFault

SETTINGS = {"subscription": SUBSCRIPTION, "resource_group": GROUP, "workspace": WORKSPACE}
SIZES = {  # by name: the kinds of compute targets that it may have
    "Standard_DS3_v2": ["AmlCompute", "ComputeInstance"],
    "STANDARD_NC4AS_T4_V3": ["AmlCompute", "ComputeInstance"],
    "Standard_DS5_v2": ["AmlCompute"],
    "Standard_Z9": ["ComputeInstance"],  # without a price
}
_STABLE, _PREVIEW = "2024-04-01", "2023-06-01-preview"
_SIZES = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices/locations"
_NAME = r"[a-zA-Z][a-zA-Z0-9-]{1,22}[a-zA-Z0-9]"  # of a compute instance: 3 to 24 characters
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT.*(Z|[+-]\d\d:\d\d)")
_STATES = {
    *("Creating", "CreateFailed", "Deleting", "Running", "Restarting", "JobRunning"),
    *("SettingUp", "SetupFailed", "Starting", "Stopped", "Stopping", "UserSettingUp"),
    *("UserSetupFailed", "Unknown", "Unusable"),
}
_SCRIPT = {
    "scriptSource": Field({"inline", "workspaceStorage"}),
    "scriptData": Field(_BASE64),
    "scriptArguments": Field(str),
    "timeout": Field(re.compile(r"\d+[smh]")),
}
_OPERATION = {
    "operationName": Field({"Create", "Start", "Stop", "Restart", "Reimage", "Delete"}),
    "operationTime": Field(_TIME),
    "operationStatus": Field(str),
    "operationTrigger": Field({"User", "Schedule", "IdleShutdown"}),
}
_INNER = {
    "vmSize": Field(str, needed=True),
    "applicationSharingPolicy": Field({"Personal", "Shared"}),
    "sshSettings": Field({"sshPublicAccess": Field({"Enabled", "Disabled"})}),
    "subnet": Field({"id": Field(str, needed=True)}),
    "idleTimeBeforeShutdown": Field(re.compile(r"PT\d+M")),
    "setupScripts": Field(
        {"scripts": Field({"creationScript": Field(_SCRIPT), "startupScript": Field(_SCRIPT)})}
    ),
    "personalComputeInstanceSettings": Field(
        {
            "assignedUser": Field(
                {"objectId": Field(str, needed=True), "tenantId": Field(str, needed=True)}
            )
        }
    ),
    "state": Field(_STATES, reply=True),
    "lastOperation": Field(_OPERATION, reply=True),
    "applications": Field(
        Each({"displayName": Field(str), "endpointUri": Field(str)}, list), reply=True
    ),
    "errors": Field(
        Each({"error": Field({"code": Field(str), "message": Field(str)})}, list), reply=True
    ),
}
COMPUTE = {
    "id": Field(str, reply=True),
    "name": Field(str, reply=True),
    "type": Field(str, reply=True),
    "location": Field(str, needed=True),
    "tags": Field(Each(str)),
    "properties": Field(
        {
            "computeType": Field({"ComputeInstance"}, needed=True),
            "computeLocation": Field(str),
            "disableLocalAuth": Field(bool),
            "createdOn": Field(_TIME, reply=True),
            "provisioningState": Field(str, reply=True),
            "properties": Field(_INNER),
        },
        needed=True,
    ),
}


class ComputeInstancesStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                places  accelerators  CPUs  memory  disk  price  spot
    Standard_DS3_v2       eastus  -             4     14GiB   -     0.293  -
    Standard_NC4as_T4_v3  eastus  1xT4/16GiB    4     28GiB   -     0.526  -
    """

    settings = SETTINGS
    key = AzureMlStandIn.key
    denied = AzureMlStandIn.denied
    faults: Mapping[str, CloudFault] = {
        **AzureMlStandIn.faults,
        "not-found": CloudFault(404, "ResourceNotFound", "The resource was not found."),
    }
    states = name_states(starting="Creating", running="Running", stopped="Stopped")

    def set_up(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}  # of requests, by the name of the instance
        self.changes: dict[str, dict[str, Any]] = {}  # of inner properties, by machine
        self.scripts: dict[str, str] = {}  # of creation, by machine
        self._names: dict[str, str] = {}  # of instances, by machine

    def describe(self, fault: CloudFault) -> object:
        return {"error": {"code": fault.code, "message": fault.message}}

    def authorize(self, request: RestRequest) -> None:
        if request.path != "/identity":
            super().authorize(request)

    def answer(self, request: RestRequest) -> tuple[int, object]:
        if request.path == "/identity":  # the service of tokens on Azure's own machines
            if request.headers.get("x-identity-header") != "the-identity":
                raise self.denied
            told = {"access_token": self.key, "expires_on": "4102444800", "token_type": "Bearer"}
            return 200, {**told, "resource": request.query["resource"]}
        query = dict(request.query)
        version = query.pop("api-version", "")
        query.pop("$skip", None)
        action = query.pop("underlyingResourceAction", "")
        try:
            assert not query
            return self._answer(request, version, action)
        except (ValueError, AssertionError) as error:
            raise CloudFault(400, "BadRequest", repr(error)) from error

    def _answer(self, request: RestRequest, version: str, action: str) -> tuple[int, object]:
        path, method = request.path, request.method
        assert (action == "Delete") == (method == "DELETE")
        if method != "PUT":
            assert version == _STABLE
        if path == ROOT and method == "GET":
            return 200, {"name": WORKSPACE, "location": "East US", "properties": {}}
        if path == f"{_SIZES}/eastus/vmSizes" and method == "GET":
            return 200, {"value": [_size(*each) for each in SIZES.items()]}
        if path == f"{ROOT}/computes" and method == "GET":
            shown = [*map(self._show, self.machines()), _cluster(), *self.others]
            return 200, cut_page(self, shown, request)
        if re.fullmatch(rf"{re.escape(ROOT.rpartition('/')[0])}/[a-z]+", path):
            raise CloudFault(404, "ResourceNotFound", "The workspace was not found.")
        found = re.fullmatch(rf"{re.escape(ROOT)}/computes/({_NAME})", path)
        assert found is not None
        if method == "PUT":
            assert version == _PREVIEW
            return self._create(found[1], request.body)
        rented = self._find(found[1])
        if method == "GET":
            return 200, self._show(self.machine(rented.id))
        assert method == "DELETE"
        self.end(rented.id)
        return 202, None

    def start_notebook(self, body: dict[str, Any], script: str) -> str:
        """Start the machine of a notebook; returns its id. Raises CloudFault."""
        return self.start(body["tags"]["cavvy-name"], script, body["tags"])

    def _create(self, name: str, body: dict[str, Any]) -> tuple[int, object]:
        check(body, COMPUTE, "compute")
        inner = body["properties"]["properties"]
        idle = int(inner["idleTimeBeforeShutdown"][2:-1])
        assert 15 <= idle <= 3 * 24 * 60
        assert inner["vmSize"].lower() in {each.lower() for each in SIZES}
        assert all(len(each) <= 256 for each in body["tags"].values())
        taken = {self._names.get(each.id) for each in self.cloud.billed()}
        if name in taken:  # names are unique in a region
            raise CloudFault(409, "Conflict", f"The compute {name} already exists.")
        data = inner["setupScripts"]["scripts"]["creationScript"]["scriptData"]
        script = base64.b64decode(data).decode()
        before = len(self.cloud.machines)
        try:
            self.start_notebook(body, script)
        finally:  # a fault may be reported although the machine was made
            for made in self.cloud.machines[before:]:
                self._names[made.id], self.bodies[name] = name, body
                self.scripts[made.id] = script
        return 201, {**body, "name": name}

    def _find(self, name: str) -> Rented:
        for each in self.cloud.billed():
            if self._names.get(each.id) == name:
                return each
        raise CloudFault(404, "ResourceNotFound", f"The compute {name} was not found.")

    def _show(self, machine: Any) -> dict[str, Any]:
        if machine.id not in self._names:  # a second machine with the same name
            self._names[machine.id] = next(
                self._names[each.id] for each in self.cloud.machines if each.name == machine.name
            )
        name = self._names[machine.id]
        body = self.bodies[name]
        inner = {
            key: value
            for key, value in body["properties"]["properties"].items()
            if key not in ("setupScripts", "idleTimeBeforeShutdown")
        }
        told = {
            "id": f"{ROOT}/computes/{name}",
            "name": name,
            "type": "Microsoft.MachineLearningServices/workspaces/computes",
            "location": "eastus",
            "tags": body["tags"],
            "properties": {
                **body["properties"],
                "createdOn": _text(machine.created_at),
                "provisioningState": "Succeeded",
                "properties": {
                    **inner,
                    "state": self.states[machine.state],
                    "applications": [
                        {
                            "displayName": "Jupyter Lab",
                            "endpointUri": f"https://{name}.eastus.instances.azureml.ms/lab",
                        }
                    ],
                    **self.changes.get(machine.id, {}),
                },
            },
        }
        check(told, COMPUTE, "compute", reply=True)
        return told


def _size(name: str, kinds: list[str]) -> dict[str, Any]:
    """As in Azure's example of the list of sizes, shortened."""
    return {"name": name, "vCPUs": 4, "gpus": 0, "supportedComputeTypes": kinds}


def _cluster() -> dict[str, Any]:
    """A compute target of another kind, which is left out."""
    return {
        "id": f"{ROOT}/computes/gpu",
        "name": "gpu",
        "location": "eastus",
        "properties": {"computeType": "AmlCompute", "provisioningState": "Succeeded"},
    }


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
