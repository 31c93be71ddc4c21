"""Checks a value against a schema of a discovery document, as shipped by google-api-python-client."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from googleapiclient import discovery_cache

_PREFIX = "GoogleCloudAiplatformV1"


@cache
def _load_schemas() -> dict[str, Any]:
    folder = Path(str(discovery_cache.__file__)).parent / "documents"
    schemas: dict[str, Any] = json.loads((folder / "aiplatform.v1.json").read_text())["schemas"]
    return schemas


def check_value(name: str, value: Any) -> None:
    """Raises AssertionError with the path of what is wrong."""
    _check({"$ref": _PREFIX + name}, value, name)


def _check(schema: dict[str, Any], value: Any, path: str) -> None:
    if "$ref" in schema:
        schema = _load_schemas()[schema["$ref"]]
    assert not schema.get("readOnly"), f"{path} is read-only"
    match schema["type"], schema.get("format"):
        case "object", _:
            assert isinstance(value, dict), path
            known = schema.get("properties", {})
            for key, part in value.items():
                assert key in known, f"{path}: {key}"
                _check(known[key], part, f"{path}.{key}")
        case "array", _:
            assert isinstance(value, list), path
            for number, part in enumerate(value):
                _check(schema["items"], part, f"{path}[{number}]")
        case ("integer", _) | ("string", "int64"):  # JSON of protocol buffers allows numbers
            assert isinstance(value, int), path
            assert not isinstance(value, bool), path
        case "string", "google-duration":
            assert re.fullmatch(r"\d+(\.\d{1,9})?s", value), f"{path}: {value}"
        case "string", _:
            assert isinstance(value, str), path
            assert "enum" not in schema or value in schema["enum"], f"{path}: {value}"
        case "boolean", _:
            assert isinstance(value, bool), path
        case other:
            raise AssertionError(f"{path}: {other} is not checked")
