"""Checks requests and replies of Azure Batch against Microsoft's package azure-batch: method, path,
version, parameters and body.
"""

import re
import types
import typing
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

_PLAIN: Mapping[Any, Any] = {
    str: str, datetime: str, timedelta: str, bytes: str, float: int | float, int: int, bool: bool,
    list: list, dict: dict,
}  # fmt: skip
_JSON = "application/json; odata=minimalmetadata"
# the arguments for optional parameters, and for parts of paths
_OPTIONS = {"filter": "*", "max_results": 1}
_NAMES = {"job_id": "THE-JOB", "pool_id": "THE-POOL"}


class Operation(NamedTuple):
    """An operation of the description. `model` describes the body of requests."""

    build: str
    names: tuple[str, ...] = ()
    model: str = ""


OPERATIONS = {
    "create job": Operation("create_job", model="BatchJobCreateOptions"),
    "list jobs": Operation("list_jobs"),
    "get job": Operation("get_job", ("job_id",)),
    "terminate job": Operation(
        "terminate_job_internal", ("job_id",), model="BatchJobTerminateOptions"
    ),
    "delete job": Operation("delete_job_internal", ("job_id",)),
    "add tasks": Operation("create_task_collection", ("job_id",), model="BatchTaskGroup"),
    "list tasks": Operation("list_tasks", ("job_id",)),
    "get pool": Operation("get_pool", ("pool_id",)),
    "list nodes": Operation("list_nodes", ("pool_id",)),
}


class Asked(NamedTuple):
    """The operation of a request, and the name in its path."""

    operation: str
    name: str


def find_operation(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: Any
) -> Asked:
    """The operation of a request. Raises ValueError if the description does not allow it."""
    for key, (verb, pattern, parameters) in _describe().items():
        found = re.fullmatch(pattern, path)
        if verb != method or found is None:
            continue
        known = query.keys() <= parameters.keys() | {"$skiptoken"}
        if not known or query.get("api-version") != parameters["api-version"]:
            raise ValueError(f"{key}: the parameters are {dict(query)}, not {dict(parameters)}")
        if model := OPERATIONS[key].model:
            if headers.get("content-type") != _JSON:
                raise ValueError(f"{key}: the content type is {headers.get('content-type')}")
            check_value(body, model, writes=True)
        return Asked(key, found[1] if found.groups() else "")
    raise ValueError(f"no operation {method} {path}")


def check_value(value: Any, model: str, *, writes: bool = False) -> None:
    """Check a reply, or the body of a request. Raises ValueError for a field that is unknown,
    missing, of another type or, in requests, only for reading.
    """
    _check(value, getattr(import_module("azure.batch.models._models"), model), model, writes)


@cache
def _describe() -> Mapping[str, tuple[str, str, Mapping[str, str]]]:
    """Operation -> method, pattern of the path, parameters."""
    module = import_module("azure.batch._operations._operations")
    found = {}
    for key, each in OPERATIONS.items():
        build: Callable[..., Any] = getattr(module, f"build_batch_{each.build}_request")
        given: dict[str, Any] = {name: _NAMES[name] for name in each.names}
        if key.startswith("list"):
            given |= _OPTIONS
        if each.model:
            given["content_type"] = _JSON
        request = build(**given)
        parts = urlsplit(request.url)
        pattern = parts.path
        for name in each.names:
            pattern = pattern.replace(_NAMES[name], r"([\w-]+)")
        parameters = {name: values[0] for name, values in parse_qs(parts.query).items()}
        found[key] = (request.method, pattern, parameters)
    return found


def _check(value: Any, kind: Any, where: str, writes: bool) -> None:
    origin, arguments, is_model = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        return _check_any(value, arguments, where, writes)
    if is_model:
        return _check_model(value, kind, where, writes)
    plain = _PLAIN.get(origin or kind)
    if plain is not None and (
        not isinstance(value, plain) or isinstance(value, bool) != (kind is bool)
    ):
        raise ValueError(f"{where}: {value!r} is not {kind}")
    if origin is list:
        for number, each in enumerate(value):
            _check(each, arguments[0], f"{where}[{number}]", writes)


@cache  # a list of 200 nodes asks for each field of each node
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """The origin and the arguments of a type, and whether it is a model."""
    is_model = any(base.__name__ == "Model" for base in getattr(kind, "__mro__", ()))
    return typing.get_origin(kind), typing.get_args(kind), is_model


def _check_any(value: Any, kinds: tuple[Any, ...], where: str, writes: bool) -> None:
    """`value` has one of these kinds. A string of an enumeration is one of its values."""
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, Enum)]
    if enums:
        if value not in [member.value for each in enums for member in each]:
            raise ValueError(f"{where}: {value!r} is not a value of {enums[0].__name__}")
        return
    faults = []
    for each in kinds:
        if each is type(None):
            continue
        try:
            return _check(value, each, where, writes)
        except ValueError as fault:
            faults.append(str(fault))
    raise ValueError("; ".join(faults))


def _check_model(value: Any, model: Any, where: str, writes: bool) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is not an object")
    fields = _fields(model)
    for name, each in value.items():
        if name not in fields:
            raise ValueError(f"{where}: {model.__name__} has no field {name}")
        kind, writable = fields[name]
        if writes and not writable:
            raise ValueError(f"{where}: {name} is only for reading")
        _check(each, kind, f"{where}.{name}", writes)
    for name, (kind, _) in fields.items() if writes else ():
        if name not in value and type(None) not in typing.get_args(kind):
            raise ValueError(f"{where}: {name} is missing")


@cache
def _fields(model: Any) -> Mapping[str, tuple[Any, bool]]:
    """The fields of a model by their names in JSON: the type, and whether requests may have it."""
    package = import_module("azure.batch.models")
    names = {**vars(typing), "_models": package, "datetime": import_module("datetime")}
    hints = typing.get_type_hints(model, names)
    found = {}
    for base in model.__mro__:
        for attribute, field in vars(base).items():
            if hasattr(field, "_rest_name_input"):
                name = field._rest_name_input or attribute
                found[name] = (hints[attribute], "create" in (field._visibility or ["create"]))
    return found
