"""Describing routes whose bodies and answers are msgspec structs, so that the OpenAPI document is
complete.

FastAPI documents paths and parameters; the schemas come from the structs themselves, once, when
somebody asks.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from cavvy.api.errors import CODES
from cavvy.client import wire
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_documented: set[type] = {wire.ErrorBody, Task, RunOrigin, Offer}
# Fields that travel as undecoded JSON, and what is in them.
_RAW = {"task": "Task", "origin": "RunOrigin", "offer": "Offer"}


def document(
    summary: str,
    *,
    ask: type[msgspec.Struct] | None = None,
    answer: type | None = None,
    status: int = 200,
    errors: Sequence[str] = (),
    sends: bool = False,
    gives: bool = False,
    headers: Sequence[str] = (),
) -> dict[str, Any]:
    """Arguments of a route's decorator. `sends` and `gives` say that the body or the answer is
    raw bytes.
    """
    content = _BYTES if gives else _content(answer)
    good: dict[str, Any] = {"description": "Done.", **({"content": content} if content else {})}
    if headers:
        good["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    responses: dict[int | str, dict[str, Any]] = {status: good}
    for code in ("unauthorised", "invalid-request", "internal", *errors):
        known = CODES[code]
        entry = responses.setdefault(
            known.status, {"description": "", "content": _content(wire.ErrorBody)}
        )
        entry["description"] = f"{entry['description']} `{code}`: {known.meaning}".strip()
    extra: dict[str, Any] = {}
    if ask is not None or sends:
        # A body all of whose fields have defaults may be left out.
        required = sends or (
            ask is not None and any(field.required for field in msgspec.structs.fields(ask))
        )
        extra = {
            "requestBody": {"required": required, "content": _BYTES if sends else _content(ask)}
        }
    return {
        "summary": summary,
        "response_class": Response,
        "response_model": None,
        "status_code": status,
        "responses": responses,
        "openapi_extra": extra or None,
    }


def _content(kind: type | None) -> dict[str, Any]:
    if kind is None:
        return {}
    listed = getattr(kind, "__args__", None)
    if listed:
        _documented.add(listed[0])
        return {
            _JSON: {
                "schema": {"type": "array", "items": {"$ref": _REF.format(name=listed[0].__name__)}}
            }
        }
    _documented.add(kind)
    return {_JSON: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole OpenAPI document."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    kinds = sorted(_documented, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in schemas.values():
        for field, kind in _RAW.items():
            if schema.get("properties", {}).get(field) == {}:
                schema["properties"][field] = {"$ref": _REF.format(name=kind)}
    schemas["SubmitRequest"]["properties"]["task"] = {
        "type": "object",
        "description": "The task in the form of the file; its schema is published as "
        "task.schema.json.",
    }
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {
        "user": {
            "type": "http",
            "scheme": "bearer",
            "description": "The token in the state folder.",
        },
        "gang": {
            "type": "http",
            "scheme": "bearer",
            "description": "A gang's own token, for /agent/v1 only.",
        },
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI's own form of a validation error never leaves this server.
            operation["security"] = [{"gang": []}] if path.startswith("/agent/") else [{"user": []}]
            if path == "/v1/health" or path.startswith("/boot/"):
                operation["security"] = []
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    return document
