"""Shows what a function takes and returns, from its JSON schemas."""

import json
from collections.abc import Mapping


def say_arguments(schema: object) -> str:
    """Return the arguments, such as "texts: array, size: integer = 8"."""
    if not isinstance(schema, Mapping):
        return ""
    needed = schema.get("required", ())
    said = []
    for name, each in schema.get("properties", {}).items():
        default = each.get("default", None) if isinstance(each, Mapping) else None
        rest = "" if name in needed else f" = {json.dumps(default)}"
        said.append(f"{name}: {say_kind(each)}{rest}")
    return ", ".join(said)


def say_kind(schema: object) -> str:
    """Return the kind of a value, such as "string or null"."""
    if not isinstance(schema, Mapping):
        return "any"
    if "anyOf" in schema:
        return " or ".join(map(say_kind, schema["anyOf"]))
    return str(schema.get("type", "any"))
