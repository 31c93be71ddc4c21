"""`cavvy.Dict` and `cavvy.Queue`: named values and queues of a project, which functions, their
callers and other programs share.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import json
import queue
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from secrets import token_hex
from time import monotonic
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from cavvy.capabilities.functions import payload, spawned
from cavvy.capabilities.functions.app import BothWays, iterate_async
from cavvy.capabilities.functions.errors import CallFailed, NotSendable
from cavvy.capabilities.functions.lengths import Length, read_length
from cavvy.capabilities.functions.state.asking import WAIT_S, StateAsker, find_asker
from cavvy.sdk.errors import CavvyError, InvalidArgument

MOST_VALUE = 1 << 20  # bytes, as the limits of `wire.py`
_MOST_KEY, _MOST_PART = 1024, 64
_TOGETHER, _BYTES = 1000, 1 << 20  # entries and bytes of values of a request
STATE_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,62}[a-zA-Z0-9])?")
_PICKLE = b"\x80"  # with which pickles begin, and no JSON
_DEEPEST = 20
_WATCHED_S = 3.0  # between two looks at the calls that this program has started
_NOTHING: Any = object()
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Object = TypeVar("_Object", bound="StateObject")


class TwoWays(Generic[_Object, _P, _R]):
    """Makes a method one with a version for `await`: `d.get("x")` and `await d.get.aio("x")`."""

    def __init__(self, raw: Callable[Concatenate[_Object, _P], _R]) -> None:
        self._raw = raw
        self.__doc__, self.__name__ = raw.__doc__, raw.__name__

    def __get__(self, made: _Object, kind: type[_Object]) -> BothWays[_P, _R]:
        call: Callable[_P, _R] = partial(self._raw, made)
        return BothWays(call, partial(_call_async, call))


class IterateTwoWays(Generic[_Object, _P, _R]):
    """As `TwoWays`, of a method that yields values."""

    def __init__(self, raw: Callable[Concatenate[_Object, _P], Iterator[_R]]) -> None:
        self._raw = raw
        self.__doc__, self.__name__ = raw.__doc__, raw.__name__

    def __get__(self, made: _Object, kind: type[_Object]) -> BothWays[_P, Iterator[_R]]:
        call: Callable[_P, Iterator[_R]] = partial(self._raw, made)

        def iterate(*args: _P.args, **kwargs: _P.kwargs) -> AsyncIterator[_R]:
            return iterate_async(lambda: call(*args, **kwargs))

        return BothWays(call, iterate)


class StateObject:
    """A dict or queue of a project. It exists from its first value on, until it is deleted. With
    `trust=False`, values are JSON: a pickle, which can run code of its writer, is not loaded.
    """

    kind = ""

    def __init__(self, name: str, *, project: str | None = None, trust: bool = True) -> None:
        if not isinstance(name, str) or not STATE_NAME.fullmatch(name):
            raise InvalidArgument(
                f"{type(self).__name__}: {name!r} is no name",
                "use letters, digits and . _ - inside, at most 64 characters",
            )
        self.name, self._project, self._trust = name, project, trust
        self._asker: StateAsker | None = None
        self._seen = ""  # the newest request whose answer has arrived

    @classmethod
    @contextmanager
    def ephemeral(cls, *, project: str | None = None, trust: bool = True) -> Iterator[Self]:
        """Make one for a `with` block, which is deleted at its end; one that a killed program has
        left, a day after its last change."""
        made = cls(f"ephemeral-{token_hex(8)}", project=project, trust=trust)
        try:
            yield made
        finally:
            made._delete()

    def _delete(self) -> None:
        try:
            self._find_asker().delete(self.kind, self.name)
        except CavvyError as error:
            if error.code != "state-not-found":
                raise

    def _ask(self, op: str, *, changes: bool = False, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request. One that changes something has an ID, so that it changes
        this once if it is sent again. Raises CavvyError."""
        asked: dict[str, Any] = {"op": op, **fields}
        if changes:
            asked["id"] = token_hex(12)
            asked["seen"], self._seen = self._seen, ""
        answer = self._find_asker().ask(self.kind, self.name, asked)
        if changes:
            self._seen = asked["id"]
        return answer

    def _find_asker(self) -> StateAsker:
        if self._asker is None:
            self._asker = find_asker(self._project)
        return self._asker

    def _dump(self, value: object, what: str) -> str:
        """Return a value as the request has it. Raises NotSendable."""
        if self._trust:
            data = payload.dump(value, f"{what} ({type(value).__name__})")
        else:
            try:
                data = json.dumps(value, allow_nan=False).encode()
            except (TypeError, ValueError, RecursionError) as error:
                hint = "pass strings, numbers, lists and dicts, or leave out trust=False"
                raise NotSendable(f"{what} is no JSON: {error}", hint) from error
        if len(data) > MOST_VALUE:
            raise NotSendable(
                f"{what} has {len(data):,} bytes, and a {self.kind} keeps at most {MOST_VALUE:,} "
                "of a value",
                "write it to a volume or a bucket, and put where it is",
            )
        return b64encode(data).decode()

    def _load(self, text: str) -> Any:
        """Return the value that an answer has. Raises CallFailed."""
        data = b64decode(text)
        if data.startswith(_PICKLE):
            if not self._trust:
                raise CallFailed(
                    f"a value of the {self.kind} {self.name} is a pickle, which can run code",
                    "read it without trust=False if you trust all who may run jobs in the project",
                )
            return payload.load(data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CallFailed(
                f"a value of the {self.kind} {self.name} is neither JSON nor a pickle: {error}"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self.name, self._project, self._trust)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Dict(StateObject):
    """A dict of a project: `cavvy.Dict("scores")["a"] = 1`. Keys are strings, bytes, numbers,
    booleans, None, and tuples of these; values are any objects of at most 1 MiB.

    A value is a copy: changing it here changes nothing there. Each method is one request, and what
    it changes is changed at once; two requests can have another one between them.
    """

    kind = "dict"

    @TwoWays
    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        found = self._ask("get", keys=[write_key(key)])["entries"]
        return self._load(found[0]["value"]) if found else default

    @TwoWays
    def contains(self, key: Any) -> bool:
        """Return whether there is a key."""
        return bool(self._ask("get", keys=[write_key(key)], values=False)["entries"])

    @TwoWays
    def put(self, key: Any, value: Any, *, skip_if_exists: bool = False) -> bool:
        """Set the value of a key, and return whether this was done: with `skip_if_exists`, a key
        keeps the value that it has."""
        asked = {"keys": [write_key(key)], "data": [self._dump(value, f"the value of {key!r}")]}
        added = self._ask("put", changes=True, if_new=skip_if_exists, **asked)["count"]
        return bool(added) or not skip_if_exists

    @TwoWays
    def update(self, other: Mapping[Any, Any] | None = None, /, **named: Any) -> None:
        """Set the values of many keys, up to 1,000 with each request."""
        keys: list[str] = []
        data: list[str] = []
        size = 0
        for key, value in {**(other or {}), **named}.items():
            written = self._dump(value, f"the value of {key!r}")
            if keys and (len(keys) >= _TOGETHER or size + len(written) > _BYTES):
                self._ask("put", changes=True, keys=keys, data=data)
                keys, data, size = [], [], 0
            keys.append(write_key(key))
            data.append(written)
            size += len(written)
        if keys:
            self._ask("put", changes=True, keys=keys, data=data)

    @TwoWays
    def pop(self, key: Any, default: Any = _NOTHING) -> Any:
        """Remove a key, and return its value. Raises KeyError, unless there is a default."""
        found = self._ask("pop", changes=True, keys=[write_key(key)])["entries"]
        if found:
            return self._load(found[0]["value"])
        if default is _NOTHING:
            raise KeyError(key)
        return default

    @TwoWays
    def len(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("len")["count"])

    @TwoWays
    def clear(self) -> None:
        """Remove all keys."""
        self._ask("clear", changes=True)

    @IterateTwoWays
    def keys(self) -> Iterator[Any]:
        """Yield the keys, in the order in which they were added."""
        for each in self._list(values=False):
            yield read_key(each["key"])

    @IterateTwoWays
    def values(self) -> Iterator[Any]:
        """Yield the values."""
        for each in self._list(values=True):
            yield self._load(each["value"])

    @IterateTwoWays
    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield the keys with their values."""
        for each in self._list(values=True):
            yield read_key(each["key"]), self._load(each["value"])

    def _list(self, *, values: bool) -> Iterator[dict[str, Any]]:
        after, more = 0, True
        while more:
            answer = self._ask("list", values=values, after=after)
            for each in answer["entries"]:
                after = each["number"]
                yield each
            more = answer["more"]

    def __getitem__(self, key: Any) -> Any:
        found = self.get(key, _NOTHING)
        if found is _NOTHING:
            raise KeyError(key)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Any) -> None:
        if not self._ask("pop", changes=True, keys=[write_key(key)], values=False)["count"]:
            raise KeyError(key)

    def __contains__(self, key: Any) -> bool:
        return self.contains(key)

    def __len__(self) -> int:
        return self.len()

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return self.keys()


class Queue(StateObject):
    """A queue of a project: `cavvy.Queue("work").put(1)`. Items are any objects of at most 1 MiB,
    and leave in the order in which they came. A queue has partitions, which are queues of their
    own: 5,000 items each, which are removed 24 hours after the last `put`.

    Each item leaves once. One that a program has got is lost with it if it is killed.
    """

    kind = "queue"

    @TwoWays
    def put(
        self,
        value: Any,
        block: bool = True,
        timeout: Length | None = None,
        *,
        partition: str | None = None,
        partition_ttl: Length = 24 * 3600,
    ) -> None:
        """Add an item. If the partition is full, wait; raise queue.Full after the timeout, or at
        once without `block`. `partition_ttl` is the time after which the items are removed."""
        self._put([value], block, timeout, partition, partition_ttl)

    @TwoWays
    def put_many(
        self,
        values: Iterable[Any],
        block: bool = True,
        timeout: Length | None = None,
        *,
        partition: str | None = None,
        partition_ttl: Length = 24 * 3600,
    ) -> None:
        """Add items: up to 1,000, and 1 MiB, with each request."""
        self._put(values, block, timeout, partition, partition_ttl)

    @TwoWays
    def get(
        self,
        block: bool = True,
        timeout: Length | None = None,
        *,
        partition: str | None = None,
    ) -> Any:
        """Remove and return the oldest item. If there is none, wait; raise queue.Empty after the
        timeout. Without `block`, return None at once."""
        found = self._get(1, block, timeout, partition)
        return found[0] if found else None

    @TwoWays
    def get_many(
        self,
        n_values: int,
        block: bool = True,
        timeout: Length | None = None,
        *,
        partition: str | None = None,
    ) -> list[Any]:
        """Remove and return up to so many items, as soon as there is one; otherwise as `get`."""
        if n_values < 1:
            raise InvalidArgument(f"get_many: n_values={n_values}", "use a number from 1 up")
        found = self._get(n_values, block, timeout, partition)
        while found and len(found) < n_values:
            more = self._get(n_values - len(found), False, None, partition)
            if not more:
                break
            found += more
        return found

    @TwoWays
    def len(self, *, partition: str | None = None, total: bool = False) -> int:
        """Return how many items a partition has, or all of them in `total`."""
        return int(self._ask("len", part=_name_part(partition), all=total)["count"])

    @TwoWays
    def clear(self, *, partition: str | None = None, all: bool = False) -> None:
        """Remove the items of a partition, or of `all`."""
        self._ask("clear", changes=True, part=_name_part(partition), all=all)

    @IterateTwoWays
    def iterate(
        self, *, partition: str | None = None, item_poll_timeout: Length = 0.0
    ) -> Iterator[Any]:
        """Yield the items without removing them, and wait for each further one up to this time."""
        part, after = _name_part(partition), 0
        limit_s = read_length(item_poll_timeout, "item_poll_timeout")
        until = monotonic() + limit_s
        while True:
            wait_s = min(max(until - monotonic(), 0.0), WAIT_S)
            found = self._ask("list", part=part, after=after, most=_TOGETHER, wait_s=wait_s)
            for each in found["items"]:
                after = each["number"]
                yield self._load(each["value"])
            if found["items"]:
                until = monotonic() + limit_s
            elif monotonic() >= until:
                return

    def _put(
        self,
        values: Iterable[Any],
        block: bool,
        timeout: Length | None,
        partition: str | None,
        ttl: Length,
    ) -> None:
        ttl_s = max(read_length(ttl, "partition_ttl"), 1.0)
        until = _find_end(block, timeout)
        part = _name_part(partition)
        batch: list[str] = []
        size = 0
        for value in values:
            written = self._dump(value, "the item")
            if batch and (len(batch) >= _TOGETHER or size + len(written) > _BYTES):
                self._put_batch(batch, part, ttl_s, until)
                batch, size = [], 0
            batch.append(written)
            size += len(written)
        if batch:
            self._put_batch(batch, part, ttl_s, until)

    def _put_batch(self, batch: list[str], part: str, ttl_s: float, until: float) -> None:
        while True:
            left_s = max(until - monotonic(), 0.0)
            asked = {"part": part, "data": batch, "ttl_s": ttl_s, "wait_s": min(left_s, WAIT_S)}
            if not self._ask("put", changes=True, **asked)["full"]:
                return
            if monotonic() >= until:
                raise queue.Full(f"the queue {self.name} has no room for {len(batch)} more items")

    def _get(
        self, most: int, block: bool, timeout: Length | None, partition: str | None
    ) -> list[Any]:
        until, part = _find_end(block, timeout), _name_part(partition)
        while True:
            left_s = max(until - monotonic(), 0.0)
            wait_s = min(left_s, _WATCHED_S if spawned.is_watched() else WAIT_S)
            asked = {"part": part, "most": min(most, _TOGETHER), "wait_s": wait_s}
            found = self._ask("get", changes=True, **asked)["items"]
            if found or not block:
                return [self._load(each["value"]) for each in found]
            spawned.check()  # who would put an item may be unable to
            if monotonic() >= until:
                raise queue.Empty

    def __len__(self) -> int:
        return self.len()

    def __bool__(self) -> bool:
        return True


def write_key(key: object) -> str:
    """Return a key of a dict as JSON: the same for keys that are equal in Python. Raises
    InvalidArgument."""
    text = json.dumps(_plain_key(key, 0), separators=(",", ":"))
    if len(text) > _MOST_KEY:
        raise InvalidArgument(
            f"a key of a dict has {len(text):,} characters, and at most {_MOST_KEY:,} are kept",
            "use a hash of it, such as hashlib.sha256(...).hexdigest()",
        )
    return text


def _plain_key(key: object, depth: int) -> Any:
    if isinstance(key, bool):
        return int(key)  # True == 1
    if key is None or isinstance(key, str | int):
        return key
    if isinstance(key, float) and key == key and abs(key) != float("inf"):
        return int(key) if key.is_integer() else key
    if isinstance(key, bytes):
        return {"b": b64encode(key).decode()}
    if isinstance(key, tuple) and depth < _DEEPEST:
        return [_plain_key(each, depth + 1) for each in key]
    raise InvalidArgument(
        f"{key!r} ({type(key).__name__}) cannot be a key of a dict",
        "use a string, bytes, a finite number, None, or a tuple of these",
    )


def read_key(text: str) -> Any:
    """Return the key that JSON says."""
    return _read_key(json.loads(text))


def _read_key(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(map(_read_key, found))
    return b64decode(found["b"]) if isinstance(found, dict) else found


def _name_part(partition: str | None) -> str:
    if partition is None:
        return ""
    if not isinstance(partition, str) or not partition or len(partition) > _MOST_PART:
        raise InvalidArgument(
            f"partition={partition!r}", f"use a string of 1 to {_MOST_PART} characters"
        )
    return partition


def _find_end(block: bool, timeout: Length | None) -> float:
    if not block:
        return 0.0
    return float("inf") if timeout is None else monotonic() + read_length(timeout, "timeout")


def _make(kind: type[StateObject], name: str, project: str | None, trust: bool) -> StateObject:
    return kind(name, project=project, trust=trust)


async def _call_async(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    import asyncio

    return await asyncio.to_thread(call, *args, **kwargs)
