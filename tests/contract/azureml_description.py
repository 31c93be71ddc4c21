"""Checks requests to and replies of Azure Machine Learning against Azure's published API 2024-04-01
(the files mfe.json and machineLearningServices.json), and against the run history's model in the
package azure-ai-ml 1.35. Only what the provider uses is described.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

SUBSCRIPTION, GROUP, WORKSPACE = "00000000-0000-0000-0000-000000000001", "research", "lab"
_ROOT = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/"
    f"Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
)
# names of jobs and assets, and of compute targets
_NAME, _COMPUTE = r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}", r"[a-zA-Z][a-zA-Z0-9-]{1,23}"


class Field(NamedTuple):
    """A field. `kind` is a type, a set of values, a pattern, or the fields of an object."""

    kind: Any
    needed: bool = False
    reply: bool = False  # requests may not have it


class Each(NamedTuple):
    """An object with any names, or a list, whose values are all of one kind."""

    kind: Any
    of: type = dict


TEXTS = Each(str)
DURATION = re.compile(r"P(?=.)(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?")
_STATUSES = {
    "NotStarted", "Starting", "Provisioning", "Preparing", "Queued", "Running", "Finalizing",
    "CancelRequested", "Completed", "Failed", "Canceled", "NotResponding", "Paused", "Unknown",
}  # fmt: skip
_SYSTEM_DATA = {"createdAt": Field(str), "lastModifiedAt": Field(str), "createdBy": Field(str)}


def resource(properties: Any) -> dict[str, Field]:
    return {
        "id": Field(str, reply=True),
        "name": Field(str, reply=True),
        "type": Field(str, reply=True),
        "systemData": Field(_SYSTEM_DATA, reply=True),
        "properties": Field(properties, needed=True),
    }


_JOB = resource(
    {
        "jobType": Field({"Command"}, needed=True),
        "displayName": Field(str),
        "experimentName": Field(str),
        "description": Field(str),
        "command": Field(re.compile(r"[\s\S]+"), needed=True),
        "environmentId": Field(
            re.compile(re.escape(_ROOT) + rf"/environments/{_NAME}/versions/.+"), needed=True
        ),
        "environmentVariables": Field(TEXTS),
        "computeId": Field(re.compile(re.escape(_ROOT) + rf"/computes/{_COMPUTE}")),
        "codeId": Field(str),
        "isArchived": Field(bool),
        "tags": Field(TEXTS),
        "properties": Field(TEXTS),
        "status": Field(_STATUSES, reply=True),
        "resources": Field(
            {
                "instanceCount": Field(int),
                "instanceType": Field(str),
                "shmSize": Field(re.compile(r"\d+[bBkKmMgG]")),
                "dockerArgs": Field(str),
            }
        ),
        "distribution": Field(
            {
                "distributionType": Field({"PyTorch", "Mpi", "TensorFlow"}, needed=True),
                "processCountPerInstance": Field(int),
            }
        ),
        "inputs": Field(
            Each(
                {
                    "jobInputType": Field({"uri_folder", "uri_file"}, needed=True),
                    "uri": Field(str, needed=True),
                    "mode": Field({"ReadOnlyMount", "Download", "Direct"}),
                }
            )
        ),
        "limits": Field(
            {"jobLimitsType": Field({"Command"}, needed=True), "timeout": Field(DURATION)}
        ),
        "queueSettings": Field({"jobTier": Field({"Null", "Spot", "Basic", "Standard"})}),
    }
)
_ROUTE = {"port": Field(int, needed=True), "path": Field(re.compile(r"/.*"), needed=True)}
ENVIRONMENT = resource(
    {
        "image": Field(str),
        "inferenceConfig": Field(
            {f"{each}Route": Field(_ROUTE) for each in ("liveness", "readiness", "scoring")}
        ),
        "osType": Field({"Linux", "Windows"}),
        "isAnonymous": Field(bool),
        "provisioningState": Field(str, reply=True),
    }
)
_COUNTS = {
    f"{each}NodeCount": Field(int)
    for each in ("preparing", "running", "idle", "unusable", "leaving", "preempted")
}
_ERRORS = Each({"error": Field({"code": Field(str), "message": Field(str)})}, list)
_CLUSTER = {
    **resource(
        {
            "computeType": Field(str, needed=True),
            "provisioningState": Field(str, reply=True),
            "provisioningErrors": Field(_ERRORS, reply=True),
            "createdOn": Field(str, reply=True),
            "computeLocation": Field(str),
            "disableLocalAuth": Field(bool),
            "properties": Field(
                {
                    "remoteLoginPortPublicAccess": Field({"Enabled", "Disabled", "NotSpecified"}),
                    "vmSize": Field(str),
                    "vmPriority": Field({"Dedicated", "LowPriority"}),
                    "osType": Field({"Linux", "Windows"}),
                    "allocationState": Field({"Steady", "Resizing"}, reply=True),
                    "currentNodeCount": Field(int, reply=True),
                    "nodeStateCounts": Field(_COUNTS, reply=True),
                    "errors": Field(_ERRORS, reply=True),
                    "scaleSettings": Field(
                        {
                            "minNodeCount": Field(int),
                            "maxNodeCount": Field(int, needed=True),
                            "nodeIdleTimeBeforeScaleDown": Field(DURATION),
                        }
                    ),
                }
            ),
        }
    ),
    "location": Field(str, needed=True),
    "tags": Field(TEXTS),
}
_WORKSPACE = {**resource({"discoveryUrl": Field(str)}), "location": Field(str)}
_RUN = {
    "runId": Field(str, needed=True),
    "status": Field(str),
    "startTimeUtc": Field(str),
    "endTimeUtc": Field(str),
    "error": Field({"error": Field({"code": Field(str), "message": Field(str)})}),
}


class Operation(NamedTuple):
    """One operation: its path below the workspace, and its parameters besides the version."""

    method: str
    path: str
    body: Mapping[str, Field] | None = None
    reply: Mapping[str, Field] | None = None
    parameters: frozenset[str] = frozenset()


OPERATIONS = {
    "workspace": Operation("GET", "", reply=_WORKSPACE),
    "computes": Operation("GET", "/computes", reply=_CLUSTER, parameters=frozenset({"$skip"})),
    "compute": Operation("GET", rf"/computes/({_COMPUTE})", reply=_CLUSTER),
    "make compute": Operation("PUT", rf"/computes/({_COMPUTE})", _CLUSTER, _CLUSTER),
    "delete compute": Operation(
        "DELETE",
        rf"/computes/({_COMPUTE})",
        parameters=frozenset({"underlyingResourceAction"}),
    ),
    "environment": Operation(
        "GET", rf"/environments/{_NAME}/versions/([\w.-]+)", reply=ENVIRONMENT
    ),
    "make environment": Operation(
        "PUT", rf"/environments/{_NAME}/versions/([\w.-]+)", ENVIRONMENT, ENVIRONMENT
    ),
    "jobs": Operation(
        "GET",
        "/jobs",
        reply=_JOB,
        parameters=frozenset({"$skip", "jobType", "tag", "listViewType", "properties"}),
    ),
    "job": Operation("GET", rf"/jobs/({_NAME})", reply=_JOB),
    "make job": Operation("PUT", rf"/jobs/({_NAME})", _JOB, _JOB),
    "cancel": Operation("POST", rf"/jobs/({_NAME})/cancel"),
    "run": Operation("GET", rf"/runs/({_NAME})/details", reply=_RUN),
}


def find_operation(
    method: str,
    path: str,
    query: Mapping[str, str],
    body: object,
    operations: Mapping[str, Operation] = OPERATIONS,
) -> tuple[str, str]:
    """The operation of a request, and the name of its resource. Raises ValueError."""
    history = path.startswith("/history/v1.0/")
    below = path.removeprefix("/history/v1.0")
    if not below.startswith(_ROOT):
        raise ValueError(f"no workspace has the path {path}")
    for name, each in operations.items():
        found = re.fullmatch(each.path, below.removeprefix(_ROOT))
        if found is None or method != each.method or history != (name == "run"):
            continue
        version = set() if history else {"api-version"}
        if not version <= query.keys() <= each.parameters | version:
            raise ValueError(f"{name}: the parameters are {dict(query)}")
        if not history and query["api-version"] != "2024-04-01":
            raise ValueError(f"{name}: the version is {query['api-version']}")
        if (body is None) != (each.body is None):
            raise ValueError(f"{name}: the body is {body!r}")
        if each.body is not None:
            check(body, each.body, name)
        return name, found[1] if found.groups() else ""
    raise ValueError(f"no operation {method} {path}")


def check(value: Any, kind: Any, where: str, *, reply: bool = False) -> None:
    """Raises ValueError for a field that is unknown, missing, only for replies, or of another
    kind.
    """
    if isinstance(kind, Each):
        check(value, kind.of, where)
        for each in value.values() if kind.of is dict else value:
            check(each, kind.kind, f"{where}[]", reply=reply)
    elif isinstance(kind, dict):
        _check_object(value, kind, where, reply=reply)
    elif isinstance(kind, set):
        if value not in kind:
            raise ValueError(f"{where}: {value!r} is not one of {sorted(kind)}")
    elif isinstance(kind, re.Pattern):
        if not isinstance(value, str) or not kind.fullmatch(value):
            raise ValueError(f"{where}: {value!r} does not match {kind.pattern}")
    elif not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"{where}: {value!r} is not {kind}")


def _check_object(value: Any, fields: Mapping[str, Field], where: str, *, reply: bool) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is not an object")
    missing = [name for name, each in fields.items() if each.needed and name not in value]
    if missing:
        raise ValueError(f"{where}: {missing} are missing")
    for name, each in value.items():
        if name not in fields:
            raise ValueError(f"{where}: there is no field {name}")
        if fields[name].reply and not reply:
            raise ValueError(f"{where}: {name} is only in replies")
        check(each, fields[name].kind, f"{where}.{name}", reply=reply)
