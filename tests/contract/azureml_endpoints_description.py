"""Online endpoints and deployments of Azure Machine Learning, as Azure's published API 2024-04-01
describes them (the file mfe.json), with the limits of the pages how-to-manage-quotas and
reference-yaml-deployment-managed-online of Azure's documentation. Only what the provider uses is
described.
"""

import re
from typing import Any

from tests.contract.azureml_description import (
    DURATION,
    OPERATIONS,
    TEXTS,
    Each,
    Field,
    Operation,
    resource,
)

# 3 to 32 letters, digits and single dashes, beginning with a letter
_NAME = r"(?=[^/]{3,32}(?:/|$))[a-zA-Z](?:-?[a-zA-Z0-9])+"
_STATES = {"Creating", "Deleting", "Succeeded", "Failed", "Updating", "Canceled"}
_PROBE = {
    "initialDelay": Field(DURATION),
    "period": Field(DURATION),
    "timeout": Field(DURATION),
    "successThreshold": Field(int),
    "failureThreshold": Field(int),
}
_SKU = {"name": Field({"Default"}, needed=True), "capacity": Field(int)}
_IDENTITY = {
    "type": Field({"SystemAssigned", "UserAssigned"}, needed=True),
    "userAssignedIdentities": Field(Each({})),
    "principalId": Field(str, reply=True),
    "tenantId": Field(str, reply=True),
}


def _tracked(properties: dict[str, Field], **more: Field) -> dict[str, Field]:
    """A resource with a region and tags."""
    return {
        **resource({"properties": Field(TEXTS), **properties}),
        "location": Field(str, needed=True),
        "tags": Field(TEXTS),
        **more,
    }


ENDPOINT = _tracked(
    {
        "authMode": Field({"AMLToken", "Key", "AADToken"}, needed=True),
        "traffic": Field(Each(int)),
        "publicNetworkAccess": Field({"Enabled", "Disabled"}),
        "provisioningState": Field(_STATES, reply=True),
        "scoringUri": Field(str, reply=True),
        "swaggerUri": Field(str, reply=True),
    },
    identity=Field(_IDENTITY),
)
DEPLOYMENT = _tracked(
    {
        "endpointComputeType": Field({"Managed"}, needed=True),
        "environmentId": Field(str, needed=True),
        "environmentVariables": Field(TEXTS),
        "instanceType": Field(str, needed=True),
        "appInsightsEnabled": Field(bool),
        "scaleSettings": Field({"scaleType": Field({"Default"}, needed=True)}),
        "requestSettings": Field(
            {
                "requestTimeout": Field(DURATION),
                "maxConcurrentRequestsPerInstance": Field(int),
            }
        ),
        "livenessProbe": Field(_PROBE),
        "readinessProbe": Field(_PROBE),
        "provisioningState": Field({*_STATES, "Scaling"}, reply=True),
    },
    sku=Field(_SKU, needed=True),
)
_ENDPOINT = rf"/onlineEndpoints/({_NAME})"
_DEPLOYMENT = rf"{_ENDPOINT}/deployments/{_NAME}"
ENDPOINT_OPERATIONS = {
    **{each: OPERATIONS[each] for each in ("workspace", "computes")},
    **{each: OPERATIONS[each] for each in ("environment", "make environment")},
    "endpoints": Operation(
        "GET", "/onlineEndpoints", reply=ENDPOINT, parameters=frozenset({"$skip"})
    ),
    "endpoint": Operation("GET", _ENDPOINT, reply=ENDPOINT),
    "make endpoint": Operation("PUT", _ENDPOINT, ENDPOINT, ENDPOINT),
    "delete endpoint": Operation("DELETE", _ENDPOINT),
    "deployment": Operation("GET", _DEPLOYMENT, reply=DEPLOYMENT),
    "make deployment": Operation("PUT", _DEPLOYMENT, DEPLOYMENT, DEPLOYMENT),
}
# what the requests of each operation need a right for, below `workspaces`
RIGHTS = {
    "workspace": "read",
    "computes": "computes/read",
    "environment": "environments/versions/read",
    "make environment": "environments/versions/write",
    "endpoints": "onlineEndpoints/read",
    "endpoint": "onlineEndpoints/read",
    "make endpoint": "onlineEndpoints/write",
    "delete endpoint": "onlineEndpoints/delete",
    "deployment": "onlineEndpoints/deployments/read",
    "make deployment": "onlineEndpoints/deployments/write",
    "score": "onlineEndpoints/score/action",
}


def find_wrong(body: dict[str, Any]) -> str:
    """What Azure's documentation does not allow in a deployment, beyond the description; "" if
    nothing.
    """
    properties = body["properties"]
    probes = [properties[name] for name in ("livenessProbe", "readinessProbe")]
    request = properties["requestSettings"]
    good = {
        "the capacity": body["sku"]["capacity"] == 1,
        "the tags": all(len(each) <= 256 for each in body["tags"].values()),
        "requestTimeout": 0 < _seconds(request["requestTimeout"]) <= 180,
        "maxConcurrentRequestsPerInstance": request["maxConcurrentRequestsPerInstance"] >= 1,
        "a time of a probe": all(
            _seconds(each[field]) >= 1
            for each in probes
            for field in ("initialDelay", "period", "timeout")
        ),
        "a threshold of a probe": all(
            each["successThreshold"] == 1 and each["failureThreshold"] >= 1 for each in probes
        ),
    }
    return next((what for what, fine in good.items() if not fine), "")


def _seconds(text: str) -> int:
    found = re.fullmatch(r"PT(\d+)S", text)
    return int(found[1]) if found else 0
