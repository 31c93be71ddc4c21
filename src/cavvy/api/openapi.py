"""Adds the bodies and answers of routes, which are msgspec structs, to the OpenAPI document.

FastAPI documents paths and parameters. The schemas are generated from the structs when the document
is first requested.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from cavvy.api.auth import AGENT, NODES, is_open, list_own_roots
from cavvy.api.errors import CODES
from cavvy.api.rules import ProjectSource, RouteRule, RuleCheck
from cavvy.client import wire
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_documented: set[type] = {wire.ErrorBody, TaskSpec, RunOrigin, Offer}
# Fields that contain undecoded JSON, with the type of the decoded value.
_RAW = {"task": "TaskSpec", "origin": "RunOrigin", "offer": "Offer"}
_BEARER = {"type": "http", "scheme": "bearer"}
_HIDDEN = ("project-not-found", "role-needed", "scope-needed")
# the errors with which a route's rule refuses requests
_REFUSALS = {
    **dict.fromkeys(ProjectSource, ()),
    ProjectSource.PATH: _HIDDEN,
    ProjectSource.QUERY: _HIDDEN,
    ProjectSource.BODY: _HIDDEN,
    ProjectSource.INSTALLATION: ("role-needed", "scope-needed"),
}
_SCHEMES = {
    "user": {
        **_BEARER,
        "description": "A token of an account, or the token in the state folder of the server.",
    },
    "gang": {
        **_BEARER,
        "description": "The token of one gang, which is valid only under /agent/v1.",
    },
    "machine": {
        **_BEARER,
        "description": "The token of one joined machine, which is valid only under /nodes/v1. A "
        "machine joins with the token of its invitation.",
    },
}
# path prefix -> kind of token; on all other paths, the user's token
_ROOTS = {AGENT: "gang", NODES: "machine"}


def document(
    summary: str,
    *,
    rule: RouteRule,
    ask: type[msgspec.Struct] | None = None,
    answer: type | None = None,
    status: int = 200,
    errors: Sequence[str] = (),
    sends: bool = False,
    gives: bool = False,
    headers: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the decorator arguments that describe a route. `rule` states who may use the route,
    and is checked before any other part of the request is read. `ask` and `answer` are the types of
    the bodies. If `sends` is set, the request's body is raw bytes; if `gives` is set, the answer's
    body is raw bytes.
    """
    body = {"required": sends or _is_required(ask), "content": _BYTES if sends else _content(ask)}
    return {
        "summary": summary,
        "dependencies": [Depends(RuleCheck(rule))],
        "response_class": Response,
        "response_model": None,
        "status_code": status,
        "responses": {
            status: _success(_BYTES if gives else _content(answer), headers),
            **_failures((*_REFUSALS[rule.source], *errors)),
        },
        "openapi_extra": {
            "x-cavvy-rule": {
                "project": str(rule.source),
                **({"permission": str(rule.permission)} if rule.permission else {}),
            },
            **({"requestBody": body} if body["content"] else {}),
        },
    }


def _is_required(ask: type[msgspec.Struct] | None) -> bool:
    """Return whether a request must have a body: whether at least one of the body's fields has no
    default.
    """
    return ask is not None and any(field.required for field in msgspec.structs.fields(ask))


def _success(content: dict[str, Any], headers: Sequence[str]) -> dict[str, Any]:
    shown = {name: {"schema": {"type": "string"}} for name in headers}
    parts = {"content": content, "headers": shown}
    return {"description": "Done.", **{name: part for name, part in parts.items() if part}}


def _failures(errors: Sequence[str]) -> dict[int | str, dict[str, Any]]:
    """Return the documented answers for these error codes, keyed by HTTP status."""
    found: dict[int | str, dict[str, Any]] = {}
    for code in dict.fromkeys(("unauthorised", "invalid-request", "internal", *errors)):
        known = CODES[code]
        entry = found.setdefault(
            known.status, {"description": "", "content": _content(wire.ErrorBody)}
        )
        entry["description"] = f"{entry['description']} `{code}`: {known.meaning}".strip()
    return found


def _content(kind: type | None) -> dict[str, Any]:
    if kind is None:
        return {}
    listed = getattr(kind, "__args__", None)
    each = listed[0] if listed else kind
    _documented.add(each)
    schema: dict[str, Any] = {"$ref": _REF.format(name=each.__name__)}
    return {_JSON: {"schema": {"type": "array", "items": schema} if listed else schema}}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the whole OpenAPI document."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    components = document.setdefault("components", {})
    schemas = {**components.get("schemas", {}), **_schemas()}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own schemas for errors
        schemas.pop(unused, None)
    components |= {"schemas": schemas, "securitySchemes": _SCHEMES}
    roots = {**_ROOTS, **dict.fromkeys(list_own_roots(), "machine")}
    for path, operations in document["paths"].items():
        scheme = next((name for root, name in roots.items() if path.startswith(root)), "user")
        for operation in operations.values():
            operation["security"] = [] if is_open(path) else [{scheme: []}]
    return document


def _schemas() -> dict[str, Any]:
    kinds = sorted(_documented, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in schemas.values():
        for field, kind in _RAW.items():
            if schema.get("properties", {}).get(field) == {}:
                schema["properties"][field] = {"$ref": _REF.format(name=kind)}
    schemas["SubmitRequest"]["properties"]["task"] = {
        "type": "object",
        "description": "The task as an object with the keys of the task file; its schema is "
        "printed by `cavvy validate --schema`.",
    }
    return schemas
