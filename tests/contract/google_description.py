"""Checks requests against Google's own descriptions of its APIs (discovery documents), which the
package google-api-python-client contains.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cavvy.providers.vm.cloud import CloudFault

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


class GoogleDescription:
    """One API. `read_request` raises CloudFault for a request that the description does not
    allow.
    """

    def __init__(self, name: str) -> None:
        spec = find_spec("googleapiclient")
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "discovery_cache/documents"
        self._document = json.loads((folder / f"{name}.json").read_text("utf-8"))
        self._methods = [
            (each["httpMethod"], re.compile(_PLACE.sub(_group, each["flatPath"])), each)
            for each in _methods(self._document)
        ]

    def read_request(
        self, method: str, path: str, query: Mapping[str, str], body: Any
    ) -> tuple[str, dict[str, str]]:
        """The name of the method, such as "compute.instances.insert", and the parameters in the
        path.
        """
        for verb, pattern, known in self._methods:
            found = pattern.fullmatch(path.lstrip("/")) if verb == method else None
            if found is not None:
                self._check_parameters(known, {**_path_parameters(known, path, found), **query})
                self._check_body(known, body)
                return str(known["id"]), found.groupdict()
        raise CloudFault(404, "notFound", f"no method {method} {path}")

    def check_value(self, schema: str, value: Any) -> None:
        """Check a reply of the stand-in itself."""
        self._check({"$ref": schema}, value, schema, "")

    def _check_parameters(self, known: Any, given: Mapping[str, str]) -> None:
        allowed = {**known.get("parameters", {}), **self._document["parameters"]}
        for name, value in given.items():
            if name not in allowed:
                raise CloudFault(400, "invalid", f"Unknown name {name!r}")
            self._check_text(allowed[name], value, name)
        for name, parameter in known.get("parameters", {}).items():
            if parameter.get("required") and name not in given:
                raise CloudFault(400, "required", f"Required parameter: {name}")

    def _check_body(self, known: Any, body: Any) -> None:
        schema = known.get("request")
        if schema is None and body is not None:
            raise CloudFault(400, "invalid", "this method takes no body")
        if schema is not None:
            self._check(schema, body or {}, "body", known["id"])

    def _check(self, schema: Any, value: Any, where: str, method: str) -> None:
        if "$ref" in schema:
            schema = self._document["schemas"][schema["$ref"]]
        kind = _TYPES.get(schema.get("type", "any"))
        if schema.get("format") == "int64" and isinstance(value, int):
            kind = int  # JSON of protocol buffers allows numbers in place of texts
        wrong = kind is not None and not isinstance(value, kind)
        if wrong or (kind is int and isinstance(value, bool)):
            raise CloudFault(400, "invalid", f"{where}: {value!r} is not of type {schema['type']}")
        if isinstance(value, str):
            self._check_text(schema, value, where)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self._check(schema["items"], item, f"{where}[{number}]", method)
        elif isinstance(value, dict):
            self._check_fields(schema, value, where, method)

    def _check_fields(self, schema: Any, value: dict[str, Any], where: str, method: str) -> None:
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            inner = fields.get(name, others)
            if inner is None:
                raise CloudFault(400, "invalid", f"Unknown name {name!r} at {where}")
            self._check(inner, item, f"{where}.{name}", method)
        for name, inner in fields.items():
            if method in inner.get("annotations", {}).get("required", ()) and name not in value:
                raise CloudFault(400, "required", f"Required field {where}.{name} not specified")

    def _check_text(self, schema: Any, value: str, where: str) -> None:
        if "enum" in schema and value not in schema["enum"]:
            raise CloudFault(400, "invalid", f"Invalid value for field {where}: {value!r}")
        if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
            raise CloudFault(400, "invalid", f"{where}: {value!r} must match {schema['pattern']}")
        if schema.get("format") == "google-duration" and not _DURATION.fullmatch(value):
            raise CloudFault(400, "invalid", f"{where}: {value!r} is not a duration")
        whole = schema.get("format") in ("int32", "int64", "uint32", "uint64")
        if whole and not re.fullmatch(r"-?\d+", value):
            raise CloudFault(400, "invalid", f"{where}: {value!r} is not a whole number")


_PLACE = re.compile(r"\{\+?(\w+)\}")
_DURATION = re.compile(r"\d+(\.\d{1,9})?s")


def _group(place: re.Match[str]) -> str:
    return f"(?P<{place[1]}>[^/]+)"


def _path_parameters(known: Any, path: str, found: re.Match[str]) -> Mapping[str, str]:
    """The parameters in a path: either its parts, or one name that has several parts."""
    if found.groupdict().keys() <= known.get("parameters", {}).keys():
        return found.groupdict()
    whole = re.fullmatch(_PLACE.sub(r"(?P<\1>.+)", known["path"]), path.lstrip("/"))
    assert whole is not None
    return whole.groupdict()


def _methods(part: Any) -> Iterator[Any]:
    yield from part.get("methods", {}).values()
    for each in part.get("resources", {}).values():
        yield from _methods(each)


@cache
def describe_api(name: str) -> GoogleDescription:
    """The description of an API, such as "compute.v1"; reading takes a moment."""
    return GoogleDescription(name)
