"""Arguments, results and exceptions as bytes. Only callers and workers load them: the broker and
the server pass them on unread.
"""

import io
import json
import pickle
import sys
from collections import ChainMap
from functools import cache
from typing import Any, Protocol

from cavvy.capabilities.functions.errors import CallFailed, NotSendable

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_EXTRA = "make setup EXTRAS=functions installs cloudpickle, which can send more kinds of objects"


def dump(value: object, what: str) -> bytes:
    """Return the value as bytes. `what` names it in the error. Raises NotSendable."""
    try:
        return pickle.dumps(value, 5)
    except Exception:  # noqa: BLE001 - what pickle refuses, cloudpickle may accept
        return dump_code(value, what)


def dump_code(value: object, what: str) -> bytes:
    """Return the value as bytes, with the code of functions that cannot be imported. Raises
    NotSendable.
    """
    try:
        pickler = _find_pickler()
    except ImportError:
        try:
            return pickle.dumps(value, 5)
        except Exception as error:
            raise NotSendable(f"{what} cannot be sent: {error}", _EXTRA) from error
    try:
        buffer = io.BytesIO()
        pickler(buffer, protocol=5).dump(value)
        return buffer.getvalue()
    except Exception as error:
        hint = "pass plain data, or make such an object inside the function"
        raise NotSendable(f"{what} cannot be sent: {error}", hint) from error


@cache
def _find_pickler() -> Any:
    """Return cloudpickle's class, but for open files: it would send what is in them. Raises
    ImportError."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    usual = cloudpickle.Pickler.dispatch_table

    def refuse(file: io.TextIOWrapper) -> Any:
        if file in (sys.stdout, sys.stderr):
            return usual[io.TextIOWrapper](file)
        raise pickle.PicklingError(f"{file.name!r} is an open file")

    table = ChainMap({io.TextIOWrapper: refuse}, usual)
    return type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})


def dump_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments | None
) -> bytes:
    """Return the arguments of a call as bytes, and those of the class of a method. Raises
    NotSendable, which names the argument.
    """
    try:
        return pickle.dumps((args, kwargs, given), 5)
    except Exception:  # noqa: BLE001 - find the argument
        named = [(f"argument {at + 1}", each) for at, each in enumerate(args)]
        named += [(f"the argument {key}", each) for key, each in kwargs.items()]
        for what, each in named:
            dump(each, f"{what} of {name} ({type(each).__name__})")
        return dump_code((args, kwargs, given), f"the arguments of {name}")


def load(data: bytes | bytearray) -> Any:
    """Return the value of bytes that `dump` made. Raises what the loading of the objects raises."""
    return pickle.loads(data)


def write_same(value: object) -> bytes:
    """Return bytes that are the same for equal values of plain types, and others for others.
    Pickles also tell whether two parts of a value are one object. Raises NotSendable.
    """
    kind = type(value)
    name = kind.__name__.encode()
    if kind in (type(None), bool, int, float, str, bytes):
        return name + repr(value).encode(errors="backslashreplace")
    parts: list[bytes] = []
    try:
        if isinstance(value, list | tuple) and kind in (list, tuple):
            parts = [write_same(each) for each in value]
        elif isinstance(value, set | frozenset) and kind in (set, frozenset):
            parts = sorted(write_same(each) for each in value)
        elif isinstance(value, dict) and kind is dict:
            parts = sorted(write_same(pair) for pair in value.items())
        else:
            parts = [dump(value, f"an argument ({kind.__name__})")]
    except RecursionError:  # it contains itself
        parts = [dump(value, f"an argument ({kind.__name__})")]
    return b"".join([name, *(b"%d:%s" % (len(each), each) for each in parts)])


class CallCodec(Protocol):
    """How a caller writes arguments and reads results."""

    head: dict[str, str]  # what the head of a call says of it
    loads_errors: bool  # whether exceptions arrive as objects

    def dump_arguments(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments | None
    ) -> bytes: ...

    def load(self, data: bytes | bytearray) -> Any: ...


class PickleCodec:
    """Any objects: for callers that trust the code of the app."""

    loads_errors = True

    def __init__(self) -> None:
        self.head: dict[str, str] = {}

    def dump_arguments(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments | None
    ) -> bytes:
        return dump_arguments(name, args, kwargs, given)

    def load(self, data: bytes | bytearray) -> Any:
        return load(data)


class JsonCodec:
    """Values of JSON, which run no code when they are read."""

    loads_errors = False

    def __init__(self) -> None:
        self.head = {"enc": "json", "reply": "json"}

    def dump_arguments(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments | None
    ) -> bytes:
        try:
            return json.dumps({"args": args, "kwargs": kwargs}, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise NotSendable(
                f"the arguments of {name} are no JSON: {error}",
                "pass strings, numbers, lists and dicts, or trust the app",
            ) from error

    def load(self, data: bytes | bytearray) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"the answer is no JSON: {error}") from error
