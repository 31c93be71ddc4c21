"""Python values: checks the arguments of the Python interface before a request is sent, and
converts values to the text of a task file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.domain.units import UnitError, parse_duration
from cavvy.sdk.errors import InvalidArgument


def to_plain(value: object, key: str) -> Any:
    """Convert a value to dicts, lists and plain values. `key` is the name of the value in error
    messages, such as resources.gpu. Entries of a dict whose value is None are left out. Raises
    TypeError for values that a task file cannot contain.
    """
    match value:
        case Mapping():
            inner = {str(name): (each, f"{key}.{name}") for name, each in value.items()}
            return {
                name: to_plain(each, path)
                for name, (each, path) in inner.items()
                if each is not None
            }
        case str() | PathLike() | datetime() | timedelta() | Decimal() | Real():
            return to_scalar(value, key)
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [to_plain(each, f"{key}[{index}]") for index, each in enumerate(value)]
    raise _wrong_type(value, key)


def to_scalar(value: object, key: str) -> Scalar:
    """Convert a single value, such as the value of a parameter: a string, a number, a boolean, a
    path, a point in time or a length of time. Raises TypeError for an unsupported type, and
    InvalidArgument for a time without a zone.
    """
    match value:
        case bool():
            return value
        case str():
            return str(value)  # a plain string, even if the value is a member of an enum
        case PathLike():
            return str(fspath(value))
        case datetime():
            if value.tzinfo is None:
                raise InvalidArgument(
                    f"{key}: {value} has no time zone",
                    "use datetime.now(UTC) or value.replace(tzinfo=UTC)",
                )
            return value.isoformat()
        case timedelta():
            return f"{value.total_seconds():f}".rstrip("0").rstrip(".") + "s"
        case Decimal():
            return str(value)
        case Integral():  # an int, or a NumPy number
            return int(value)
        case Real():
            return float(value)
    raise _wrong_type(value, key)


def write_text(table: Mapping[str, object]) -> str:
    """Convert a dict of plain values to the text of a task file."""
    import yaml

    from cavvy.spec.tree import read_scalar

    class Dumper(yaml.SafeDumper):
        """Writes strings so that the parser of task files reads them as strings."""

    def write_string(dumper: Dumper, text: str) -> yaml.ScalarNode:
        if "\x85" in text or read_scalar(text) != text:
            style: str | None = '"'  # U+0085 ends a line in YAML, so it must be escaped
        else:
            style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def write_float(dumper: Dumper, number: float) -> yaml.ScalarNode:
        # written as Python writes it, because an expression such as `${{ params.lr }}` inserts this
        # text
        return dumper.represent_scalar("tag:yaml.org,2002:float", repr(number))

    # PyYAML would not read this form as a number, and would mark it with a tag.
    Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"-?[0-9.]+e[-+]?[0-9]+"), list("-0123456789")
    )
    Dumper.add_representer(str, write_string)
    Dumper.add_representer(float, write_float)
    text = yaml.dump(table, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1 << 30)
    return str(text)


def _wrong_type(value: object, key: str) -> TypeError:
    return TypeError(
        f"{key} is a value of the type {type(value).__name__}; expected a string, a number, a "
        "boolean, a path, a datetime, a timedelta, or a dict or list of these"
    )


# the numbers of NumPy are numbers, too
_NAMES: dict[type, str] = {Integral: "int", Real: "float", type(None): "None"}


def check_type(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise TypeError if the argument `name` has a wrong type. A boolean is not a number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        wanted = " or ".join(_NAMES.get(each, each.__name__) for each in kinds)
        raise TypeError(f"{name} must be of type {wanted}, not {type(value).__name__}")


def check_text(value: object, name: str) -> None:
    """Raise TypeError if the argument is not a string. Raise InvalidArgument if the string contains
    a character that no name contains.
    """
    check_type(value, str, name)
    text = str(value)
    if "\0" in text or (not text.isascii() and text.encode("utf-8", "ignore").decode() != text):
        raise InvalidArgument(f"{name}: {text!r} contains a character that cannot be sent")


def check_texts(**values: object) -> None:
    """Check several arguments that are strings or None. Raises TypeError, InvalidArgument."""
    for name, value in values.items():
        if value is not None:
            check_text(value, name)


def check_params(params: object) -> None:
    """Raise TypeError if `params` is neither None nor a dict whose keys are strings."""
    if params is None:
        return
    check_type(params, Mapping, "params")
    assert isinstance(params, Mapping)
    for name in params:
        check_text(name, "a key of params")


def read_seconds(length: object, name: str = "timeout") -> float:
    """Return the seconds of a length of time. Raises TypeError, InvalidArgument."""
    if isinstance(length, timedelta):
        return length.total_seconds()
    check_type(length, (Real, str, timedelta), name)
    try:
        given = length if isinstance(length, str) else float(str(length))
        return parse_duration(given).total_seconds()
    except UnitError as error:
        raise InvalidArgument(f"{name}: {error}") from error


def read_begin(begin: object) -> datetime:
    """Return the point in time, or now if it is None. Raises TypeError, InvalidArgument."""
    if begin is None:
        return datetime.now(UTC)
    check_type(begin, datetime, "begin")
    assert isinstance(begin, datetime)
    if begin.tzinfo is None:
        raise InvalidArgument(
            f"begin: {begin} has no time zone",
            "use datetime.now(UTC) or value.replace(tzinfo=UTC)",
        )
    return begin


def list_after(after: object) -> list[str]:
    """Return the jobs in the argument `after` as in a task file. Raises TypeError."""
    if isinstance(after, Mapping):
        after = [f"{job}:{condition}" for job, condition in after.items()]
    given = after if isinstance(after, Iterable) and not isinstance(after, str) else [after]
    found = [getattr(each, "id", each) for each in given]
    for each in found:
        check_text(each, "after")
    return [str(each) for each in found]
