"""`cavvy.Limit`: how many calls of a function run at a time, or start in a time, for each key.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from cavvy.capabilities.functions.lengths import Length, read_length
from cavvy.sdk.errors import InvalidArgument

_MOST_KEY = 200  # characters; a longer key is replaced by its hash
MOST_LIMITS = 8  # of a function
_LONGEST_S = 31 * 86400.0
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_MISSING = object()
CallKey = str | Sequence[str] | Callable[..., Any] | None


@dataclass(frozen=True)
class CallLimit:
    """At most `count` calls run at the same time or, with `per` (such as "1m"), at most `count`
    start in any time of this length: `@app.function(limit=cavvy.Limit(10, per="1m"))`.

    With `key`, this holds for each value of it: the name of a parameter ("tenant"), a part of one
    ("order.customer"), several of these, or a function of the arguments, which a deployed app
    cannot have. With `name`, all functions of the app with a limit of this name count together.
    """

    count: int
    key: CallKey = None
    per: Length | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise InvalidArgument(f"Limit({self.count!r})", "use a whole number from 1 up")
        if self.per is not None and not 0 < read_length(self.per, "Limit: per") <= _LONGEST_S:
            raise InvalidArgument(f"Limit: per={self.per!r}", 'use a time from "1ms" to "31d"')
        if self.name is not None and not (
            isinstance(self.name, str) and _NAME.fullmatch(self.name)
        ):
            raise InvalidArgument(
                f"Limit: {self.name!r} is no name",
                "use letters, digits and . _ - inside, at most 64 characters",
            )
        if not callable(self.key) and not all(
            isinstance(each, str) and _PATH.fullmatch(each) for each in self.list_paths()
        ):
            raise InvalidArgument(
                f"Limit: key={self.key!r} names no parameter",
                'use "tenant", "order.customer", ["tenant", "region"], or a function',
            )

    def list_paths(self) -> list[str]:
        """Return the parameters that the key consists of, or parts of them."""
        if self.key is None or callable(self.key):
            return []
        return [self.key] if isinstance(self.key, str) else list(self.key)

    def to_head(self, function: str, number: int) -> dict[str, Any]:
        """Return what the broker of the calls must know. Limits with the same `id` are one."""
        per_s = None if self.per is None else read_length(self.per, "Limit: per")
        said = "" if callable(self.key) else ", ".join(self.list_paths())
        return {
            "id": self.name or f"{function}/{number}",
            "count": self.count,
            "per_s": per_s,
            "key": said if not callable(self.key) else "key",
        }


def read_limits(name: str, given: object) -> tuple[CallLimit, ...]:
    """Return the limits of a function: one, several, or a number of calls at a time. Raises
    InvalidArgument."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    found: list[CallLimit] = []
    for each in listed:
        if isinstance(each, int) and not isinstance(each, bool):
            found.append(CallLimit(each))
        elif isinstance(each, CallLimit):
            found.append(each)
    if len(found) != len(listed) or len(found) > MOST_LIMITS:
        raise InvalidArgument(
            f"{name}: limit={given!r}",
            f'use limit=cavvy.Limit(10, key="tenant"), or a list of at most {MOST_LIMITS} limits',
        )
    return tuple(found)


def name_windows(app: str) -> str:
    """Return the name of the dict in which the starts of an app's calls are kept."""
    return f"limits.{app}"


def check_limits(name: str, raw: Callable[..., Any], limits: Sequence[CallLimit]) -> None:
    """Raise InvalidArgument if the key of a limit is no parameter of the function."""
    parameters = inspect.signature(raw).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for each in limits:
        for path in each.list_paths():
            if path.partition(".")[0] not in parameters:
                raise InvalidArgument(
                    f"{name}: the key {path!r} of a limit is none of its parameters",
                    f"it has {', '.join(parameters) or 'none'}",
                )


def make_keys(
    name: str,
    raw: Callable[..., Any],
    limits: Sequence[CallLimit],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    bound: bool,
) -> list[str]:
    """Return the key of each limit for a call with these arguments. Raises InvalidArgument."""
    if all(each.key is None for each in limits):
        return [""] * len(limits)
    signature = _read_signature(raw, bound)
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError as error:  # the function would say the same, elsewhere
        raise TypeError(f"{name}: {error}") from None
    given.apply_defaults()
    values = dict(given.arguments)
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            values |= values.pop(each.name)
    found = []
    for limit in limits:
        if callable(limit.key):
            found.append(write_key(name, limit.key(*args, **kwargs)))
        else:
            found.append(find_key(name, limit.list_paths(), values))
    return found


@lru_cache(maxsize=256)
def _read_signature(raw: Callable[..., Any], bound: bool) -> inspect.Signature:
    found = inspect.signature(raw)
    return found.replace(parameters=list(found.parameters.values())[bound:])


def find_key(name: str, paths: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return the key that these parts of the arguments make. What is missing counts as null: the
    call fails by itself if it needs it. Raises InvalidArgument."""
    parts = [_follow(each.split("."), values) for each in paths]
    if not parts:
        return ""
    return write_key(name, parts[0] if len(parts) == 1 else parts)


def _follow(steps: Sequence[str], values: Mapping[str, Any]) -> Any:
    found: Any = values.get(steps[0])
    for step in steps[1:]:
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list | tuple):
            found = found[int(step)] if step.isdigit() and int(step) < len(found) else None
        else:
            found = getattr(found, step, None)
    return found


def write_key(name: str, value: object) -> str:
    """Return a key as text: strings as they are, other plain values as JSON. A long one is
    replaced by its hash. Raises InvalidArgument."""
    if isinstance(value, str):
        text = str(value)
    else:
        try:
            text = json.dumps(value, sort_keys=True, default=_write_part)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"{name}: {type(value).__name__} is no key of a limit: {error}",
                "use a string, a number, or a list of these",
            ) from None
        if text[:1] == '"':  # a UUID, a path, a date
            text = json.loads(text)
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= _MOST_KEY:
        return text
    return f"{text[:80]}…{sha256(text.encode()).hexdigest()[:32]}"


def _write_part(value: object) -> str:
    """Return what names a value of another type, if its text does: an object without a text of its
    own would be another key in each call. Raises TypeError."""
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise TypeError(f"a {kind.__name__} has no text of its own")
    return str(value)
