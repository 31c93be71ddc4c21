"""Reads the parameters of a request whose route needs only a body and a query string, in one step
of msgspec. FastAPI passes nine layers for this, and a tenth of that time is what the routes that
agents call need themselves.

What msgspec does not read is left to FastAPI, which also says what is wrong with it. For example,
`wait_s=30` is read here, and `wait_s=soon` by FastAPI, which refuses it.
"""

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from fastapi.params import Query

# The name of msgspec's limit for each limit of FastAPI's.
_LIMITS: Mapping[type, str] = {
    Ge: "ge",
    Gt: "gt",
    Le: "le",
    Lt: "lt",
    MaxLen: "max_length",
    MinLen: "min_length",
}
_PLAIN = (str, int, float, bool, str | None, int | None, float | None, bool | None)


class QueryReader:
    """Reads the parameters of a route, whose signature has `request` and parameters of the query
    only. Raises TypeError for other signatures."""

    def __init__(self, shape: Signature) -> None:
        self._fields = [
            (name, _translate(each), each.default)
            for name, each in shape.parameters.items()
            if name != "request"
        ]
        self._form: type[msgspec.Struct] | None = None  # made when it is first needed

    def read(self, query: bytes) -> dict[str, Any] | None:
        """Return the parameters, or None if FastAPI must read them."""
        if not self._fields:
            return {}
        if (pairs := _split(query)) is None or len(given := dict(pairs)) < len(pairs):
            return None
        if any(value.lower() == "null" for value in given.values()):
            return None  # it is a text for FastAPI
        if self._form is None:
            self._form = self._make_form()
        try:
            found = msgspec.convert(given, self._form, strict=False)
        except msgspec.ValidationError:
            return None
        return msgspec.structs.asdict(found)

    def _make_form(self) -> type[msgspec.Struct]:
        required = [field[:2] for field in self._fields if field[2] is Parameter.empty]
        optional = [field for field in self._fields if field[2] is not Parameter.empty]
        return msgspec.defstruct("Parameters", [*required, *optional])


def _split(query: bytes) -> list[tuple[str, str]] | None:
    """Return the names and values of a query, or None if it is not in ASCII."""
    if not query.isascii():
        return None
    text = query.decode("ascii")
    if "%" in text or "+" in text:
        return parse_qsl(text, keep_blank_values=True)
    pairs = [part.partition("=") for part in text.split("&") if part]
    return [(name, value) for name, _, value in pairs]


def _translate(parameter: Parameter) -> Any:
    """Return the type of a parameter as msgspec wants it. Raises TypeError."""
    kind, marks = parameter.annotation, []
    if get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
    if kind not in _PLAIN:
        raise TypeError(f"{parameter.name} is no plain value")
    limits: dict[str, Any] = {}
    for mark in marks:
        if type(mark) is not Query or mark.alias not in (None, parameter.name):
            raise TypeError(f"{parameter.name} is not a parameter of the query")
        for limit in mark.metadata:
            if type(limit) not in _LIMITS:
                raise TypeError(f"{parameter.name} has a limit that only FastAPI checks")
            name = _LIMITS[type(limit)]
            limits[name] = getattr(limit, name)
    if not limits:
        return kind
    # the limits of an optional value are those of the value
    value: Any = next(each for each in (*get_args(kind), kind) if each is not type(None))
    bounded = Annotated[value, msgspec.Meta(**limits)]
    return bounded if value is kind else bounded | None
