"""JSON schemas of functions, made from annotations, and the check of arguments against them."""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_DEEPEST = 50
_NOT_SHOWN = {"title", "description"}  # what docstrings say of classes


def describe_function(
    raw: Callable[..., Any], *, bound: bool, batched: bool = False
) -> tuple[Any, Any]:
    """Return the schemas of the arguments of a function, an object by name, and of its result. What
    has no annotation, or one that JSON has no form for, may be anything. The first parameter of a
    `bound` function is its object. A `batched` one has lists where each call has one value.
    """
    try:
        hints = typing.get_type_hints(raw)
    except Exception:  # noqa: BLE001 - annotations are code
        hints = {}
    parameters = list(inspect.signature(raw).parameters.values())[bound:]
    properties, needed, rest = {}, [], False
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            rest = rest or each.kind is each.VAR_KEYWORD
            continue
        shape = _describe(hints[each.name]) if each.name in hints else {}
        shape = shape.get("items", {}) if batched else shape
        if each.default is each.empty:
            needed.append(each.name)
        elif isinstance(each.default, str | int | float | bool | None):
            shape = {**shape, "default": each.default}
        properties[each.name] = shape
    arguments = {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": rest,
    }
    returned = hints.get("return", Any)
    result = {"type": "null"} if returned is type(None) else _describe(returned)
    return arguments, result.get("items", {}) if batched else result


def _describe(kind: Any) -> dict[str, Any]:
    if kind is Any:
        return {}
    try:
        (found,), parts = msgspec.json.schema_components([kind], ref_template="#/{name}")
    except Exception:  # noqa: BLE001 - annotations are any objects
        return {}
    shape: dict[str, Any] = _inline(found, parts, 0)
    return shape


def _inline(schema: Any, parts: Mapping[str, Any], depth: int) -> Any:
    """Return a schema without references."""
    if depth > _DEEPEST // 5:
        return {}
    if isinstance(schema, list):
        return [_inline(each, parts, depth) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(parts[schema["$ref"][2:]], parts, depth + 1)
    return {
        name: _inline(each, parts, depth) if name != "default" else each
        for name, each in schema.items()
        if name not in _NOT_SHOWN or not isinstance(each, str)
    }


def find_faults(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield what is wrong with a value of JSON: where, and what was expected."""
    if len(where) > 1000 or not isinstance(schema, Mapping):
        return
    at = where or "the body"
    if choices := schema.get("anyOf"):
        if not any(next(find_faults(value, each, where), None) is None for each in choices):
            yield f"{at} is none of {' or '.join(_say(each) for each in choices)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} must be one of {', '.join(map(repr, schema['enum']))}"
        return
    if (kinds := schema.get("type")) is not None and not _has_kind(value, kinds):
        yield f"{at} must be {_say(schema)}, not {_name(value)}"
        return
    if isinstance(value, dict):
        yield from _find_in_object(value, schema, where)
    elif isinstance(value, list):
        inside = schema.get("items")
        if isinstance(inside, Mapping):
            for number, each in enumerate(value):
                yield from find_faults(each, inside, f"{where}[{number}]")


def _find_in_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], where: str
) -> Iterator[str]:
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where or 'the body'} has no `{name}`"
    for name, each in value.items():
        inside = f"{where}.{name[:100]}".lstrip(".")
        if name in known:
            yield from find_faults(each, known[name], inside)
        elif more is False:
            told = ", ".join(known) or "none"
            yield f"`{name[:100]}` is no argument; there are {told}"
        elif isinstance(more, Mapping):
            yield from find_faults(each, more, inside)


def _has_kind(value: Any, kinds: Any) -> bool:
    listed = [kinds] if isinstance(kinds, str) else kinds
    for each in listed:
        if isinstance(value, bool):
            if each == "boolean":
                return True
        elif isinstance(value, _KINDS.get(each, (object,))) or (
            each == "integer" and isinstance(value, float) and value.is_integer()
        ):
            return True
    return False


def _say(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "anything")
    return kind if isinstance(kind, str) else " or ".join(kind)


def _name(value: Any) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
