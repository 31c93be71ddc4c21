"""Checks a request against a service model of botocore, strictly: unlike botocore itself, also the
greatest lengths, the patterns and the enumerations, as the service does.
"""

import re
from functools import cache
from typing import Any

from botocore.model import Shape
from botocore.session import Session

# Character classes of Java that Python's patterns lack.
_CLASSES = {r"\p{Alnum}": "a-zA-Z0-9", r"\p{L}\p{Z}\p{N}": r"\w "}


@cache
def service_model(service: str) -> Any:
    return Session().get_service_model(service)


def check_request(service: str, operation: str, request: Any) -> None:
    """Raises AssertionError with the path of what is wrong."""
    _check(service_model(service).operation_model(operation).input_shape, request, operation)


def check_reply(service: str, operation: str, reply: Any) -> None:
    """Like `check_request`, for a reply."""
    shape = service_model(service).operation_model(operation).output_shape
    if shape is not None:
        _check(shape, reply, operation)


def _check(shape: Shape, value: Any, path: str) -> None:
    match shape.type_name:
        case "structure":
            assert isinstance(value, dict), path
            assert set(value) <= set(shape.members), f"{path}: {set(value) - set(shape.members)}"
            missing = set(shape.required_members) - set(value)
            assert not missing, f"{path}: {missing}"
            for key, part in value.items():
                _check(shape.members[key], part, f"{path}.{key}")
        case "list":
            assert isinstance(value, list), path
            _check_size(shape, len(value), path)
            for number, part in enumerate(value):
                _check(shape.member, part, f"{path}[{number}]")
        case "map":
            assert isinstance(value, dict), path
            _check_size(shape, len(value), path)
            for key, part in value.items():
                _check(shape.key, key, f"{path}.{key}")
                _check(shape.value, part, f"{path}.{key}")
        case "string":
            assert isinstance(value, str), path
            _check_size(shape, len(value), path)
            pattern = shape.metadata.get("pattern")
            for java, own in _CLASSES.items():
                pattern = pattern and pattern.replace(java, own)
            assert not pattern or re.fullmatch(pattern, value), f"{path}: {value!r} is no {pattern}"
            assert not shape.enum or value in shape.enum, f"{path}: {value}"
        case "boolean":
            assert isinstance(value, bool), path
        case "timestamp" | "double" | "float":
            assert isinstance(value, (int, float)), path
        case "integer" | "long":
            assert isinstance(value, int), path
            assert not isinstance(value, bool), path
            _check_size(shape, value, path)
        case other:
            raise AssertionError(f"{path}: {other} is not checked")


def _check_size(shape: Shape, size: int, path: str) -> None:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    assert low is None or size >= low, f"{path}: {size} < {low}"
    assert high is None or size <= high, f"{path}: {size} > {high}"
