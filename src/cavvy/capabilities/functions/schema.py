"""JSON schemas of functions, made from annotations, and the check of arguments against them."""

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

MOST_STEPS = 500_000  # of a check: about a second

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
_MOST_CHOICES, _MOST_KINDS = 100, 10  # of a value
_MOST_NAMES = 1000  # of an object, and values of an enum
_CHEAP = 20  # values without own parts that are checked in the time of one step
_LONGEST = 300  # characters of a list in a message
_NOT_SHOWN = {"title", "description"}  # what docstrings say of classes


def describe_function(
    raw: Callable[..., Any], *, bound: bool, batched: bool = False
) -> tuple[Any, Any]:
    """Return the schemas of the arguments of a function, an object by name, and of its result. What
    has no annotation, or one that JSON has no form for, may be anything. The first parameter of a
    `bound` function is its object. A `batched` one has lists where each call has one value. If some
    have no position, `x-positional` says how many have one.
    """
    try:
        hints = typing.get_type_hints(raw)
    except Exception:  # noqa: BLE001 - annotations are code
        hints = {}
    parameters = list(inspect.signature(raw).parameters.values())[bound:]
    properties, needed, rest = {}, [], False
    positional = sum(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters
    )
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
    if positional < len(properties):
        arguments["x-positional"] = positional
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
    # two levels less than the server takes, as it stands inside of others
    return {} if explain_unfit(shape, 2) else shape


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


class TooManySteps(Exception):
    """Raised if a check takes more steps than it may."""


class Steps:
    """The steps that a check may still take. What it costs depends on the value and on the schema,
    and both are other people's."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._left = most

    def take(self, number: int = 1) -> None:
        """Raises TooManySteps."""
        self._left -= number
        if self._left < 0:
            raise TooManySteps


def explain_unfit(schema: Any, depth: int = 0) -> str:
    """Return why arguments cannot be checked against a schema, or ""."""
    if depth > _DEEPEST:
        return f"it has more than {_DEEPEST} levels"
    if not isinstance(schema, Mapping):
        return "each schema must be an object"
    for name, most in (
        ("anyOf", _MOST_CHOICES),
        ("enum", _MOST_NAMES),
        ("required", _MOST_NAMES),
    ):
        listed = schema.get(name, [])
        if not isinstance(listed, list) or len(listed) > most:
            return f"`{name}` must be a list of at most {most}"
    if any(isinstance(each, list | dict) for each in schema.get("enum", [])):
        return "`enum` must have strings, numbers, booleans or null"
    if not all(isinstance(each, str) for each in schema.get("required", [])):
        return "`required` must have names"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if (
        not isinstance(kinds, list)
        or len(kinds) > _MOST_KINDS
        or not all(isinstance(each, str) for each in kinds)
    ):
        return f"`type` must be a name or at most {_MOST_KINDS} names"
    known = schema.get("properties", {})
    if not isinstance(known, Mapping) or len(known) > _MOST_NAMES:
        return f"`properties` must be an object of at most {_MOST_NAMES}"
    inside = [*schema.get("anyOf", []), *known.values()]
    for name in ("items", "additionalProperties"):
        if not isinstance(each := schema.get(name, False), bool):
            inside.append(each)
    return next(filter(None, (explain_unfit(each, depth + 1) for each in inside)), "")


def find_faults(
    value: Any, schema: Mapping[str, Any], where: str = "", steps: Steps | None = None
) -> Iterator[str]:
    """Yield what is wrong with a value of JSON: where, and what was expected. Raises
    TooManySteps."""
    steps = steps or Steps()
    steps.take()
    if len(where) > 1000 or not isinstance(schema, Mapping):
        return
    at = where or "the body"
    if choices := schema.get("anyOf"):
        for each in choices:
            if next(find_faults(value, each, where, steps), None) is None:
                return
        yield f"{at} is none of {_list(' or ', map(_say, choices))}"
        return
    if "enum" in schema:
        steps.take(len(schema["enum"]) // _CHEAP)
        if isinstance(value, list | dict) or value not in schema["enum"]:
            yield f"{at} must be one of {_list(', ', map(repr, schema['enum']))}"
            return
    if (kinds := schema.get("type")) is not None and not _has_kind(value, kinds):
        yield f"{at} must be {_say(schema)}, not {_name(value)}"
        return
    if isinstance(value, dict):
        yield from _find_in_object(value, schema, where, steps)
    elif isinstance(value, list):
        inside = schema.get("items")
        if isinstance(inside, Mapping):
            yield from _find_in_list(value, inside, where, steps)


def _find_in_list(
    value: Sequence[Any], inside: Mapping[str, Any], where: str, steps: Steps
) -> Iterator[str]:
    wrong: Iterable[int] = range(len(value))
    if types := _find_types(inside, steps):  # most long lists are of numbers or of strings
        steps.take(len(value) // _CHEAP)
        wrong = (number for number, each in enumerate(value) if type(each) not in types)
    for number in wrong:
        yield from find_faults(value[number], inside, f"{where}[{number}]", steps)


def _find_types(schema: Mapping[str, Any], steps: Steps) -> set[type]:
    """Return the types of which all values fit a schema; none if it says more than kinds."""
    choices = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    steps.take(len(choices))
    found: set[type] = set()
    for each in choices:
        if not isinstance(each, Mapping) or set(each) != {"type"}:
            return set()
        kinds = each["type"]
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            found.update(_KINDS.get(kind, ()))
    return found


def _find_in_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], where: str, steps: Steps
) -> Iterator[str]:
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    needed = schema.get("required", ())
    steps.take(len(needed) // _CHEAP)
    for name in needed:
        if name not in value:
            yield f"{where or 'the body'} has no `{name}`"
    for name, each in value.items():
        inside = f"{where}.{name[:100]}".lstrip(".")
        if name in known:
            yield from find_faults(each, known[name], inside, steps)
            continue
        steps.take()
        if more is False:
            told = _list(", ", known) or "none"
            yield f"`{name[:100]}` is no argument; there are {told}"
        elif isinstance(more, Mapping):
            yield from find_faults(each, more, inside, steps)


def _list(between: str, names: Iterable[str]) -> str:
    """Return the first of these names, as many as a message has room for."""
    told: list[str] = []
    size = 0
    for each in names:
        size += len(each) + len(between)
        if size > _LONGEST:
            return between.join([*told, "..."])
        told.append(each)
    return between.join(told)


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
