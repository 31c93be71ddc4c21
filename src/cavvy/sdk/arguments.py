"""Checks the arguments of the Python interface before a request is sent."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from numbers import Integral, Real

from cavvy.domain.units import UnitError, parse_duration
from cavvy.sdk.errors import InvalidArgument

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
