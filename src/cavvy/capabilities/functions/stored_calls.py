"""Calls of deployed apps that the control plane keeps: `spawn`, and calls with a key."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from cavvy.capabilities.functions import payload, spawned, wire
from cavvy.capabilities.functions.app import Function
from cavvy.capabilities.functions.calls import FunctionCall
from cavvy.capabilities.functions.errors import KINDS, CallFailed, CallTimeout
from cavvy.capabilities.functions.limits import find_key
from cavvy.client.client import own_user_name
from cavvy.client.errors import ApiError
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import InvalidArgument

_TOGETHER, _BYTES = 500, 8 << 20  # calls and bytes of arguments of a request
_FOREVER_S = 1e9
_LONGEST_S = 0.3  # between two requests for results
_TELL_S = 5.0  # after which a program is told what its calls wait for
_MOST_WATCHED = 500  # calls that were started and not read


class KeptCall(FunctionCall):
    """A call that the server keeps: it survives this program, its job and the server."""

    def __init__(self, project: str, app: str, call: str, codec: payload.CallCodec) -> None:
        self._project, self._app, self._call, self._codec = project, app, call, codec
        self._found: wire.CallResult | None = None
        self._values: list[Any] = []
        self._why = ""  # what it waits for, as the server has said last

    @property
    def id(self) -> str:
        return f"{self._project}/{self._app}/{self._call}"

    def _cancel(self) -> None:
        connections = Connections(None, None, None)
        with connections.use() as client:
            wire.cancel_call(client, self._project, self._app, self._call)
        connections.close()

    def _done(self) -> bool:
        fetch_results([self], 0.0)
        return self._found is not None

    @staticmethod
    def _wait_for_all(calls: Sequence["KeptCall"]) -> None:
        fetch_results(calls, _FOREVER_S)

    def _get(self, timeout: float | None = None) -> Any:
        if self._found is None:
            fetch_results([self], _FOREVER_S if timeout is None else timeout)
        if self._found is None:
            why = f": {self._why}" if self._why else ""
            raise CallTimeout(f"the call {self.id} has no result after {timeout:g} s{why}")
        if not self._values:
            self._values.append(read_kept(self._found, self._codec))
        return self._values[0]

    def _cost(self) -> int | None:
        if self._found is None:
            fetch_results([self], _FOREVER_S)
        if self._found is not None and self._found.cost_micros is None:
            self._found = None  # the job may have a bill now
            fetch_results([self], _FOREVER_S)
        return None if self._found is None else self._found.cost_micros

    def __reduce__(self) -> tuple[Any, ...]:
        return find_call, (self.id, self._codec.loads_errors)

    def __repr__(self) -> str:
        return f"<FunctionCall {self.id}>"


def find_call(name: str, trust: bool) -> KeptCall:
    """Return a call by the ID that `FunctionCall.id` has shown. Raises InvalidArgument."""
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) != 3 or not all(parts):
        hint = "use the `id` of what `spawn` has returned: PROJECT/APP/CALL"
        raise InvalidArgument(f"{name!r} is no ID of a call", hint)
    project, app, call = parts
    return KeptCall(project, app, call, payload.PickleCodec() if trust else payload.JsonCodec())


def fetch_results(calls: Sequence[KeptCall], wait_s: float) -> None:
    """Read the results of calls, for at most this time until all of them have one. Raises
    CavvyError."""
    until = monotonic() + wait_s
    by_app: dict[tuple[str, str], dict[str, KeptCall]] = {}
    for each in calls:
        if each._found is None:
            by_app.setdefault((each._project, each._app), {})[each._call] = each
    connections = Connections(None, None, None)
    try:
        for (project, app), waiting in by_app.items():
            _fetch(connections, project, app, waiting, until)
    finally:
        connections.close()


def _fetch(
    connections: Connections, project: str, app: str, waiting: dict[str, KeptCall], until: float
) -> None:
    pause_s, told, tell_at = 0.0, "", monotonic() + _TELL_S
    while waiting:
        # the oldest, as they end about in their order
        ids = [*waiting][:_TOGETHER]
        left_s = max(until - monotonic(), 0.0)
        most_s = wire.CALL_WAIT_S / 2 if told else _TELL_S
        ask = wire.CallsReadAsk(ids=ids, wait_s=min(left_s, most_s))
        with connections.use() as client:
            found = wire.read_calls(client, project, app, ask)
        for each in found.ended:
            waiting.pop(each.id)._found = each
        if found.missing:
            raise InvalidArgument(
                f"the app {app} of project {project} has no call {found.missing[0]}",
                "calls are kept for seven days after their end, and not longer than their app",
            )
        for call, why in found.waiting.items():
            waiting[call]._why = why
            if why != told and monotonic() >= tell_at:
                told = why
                sys.stderr.write(f"{app}: {why}\n")
            break
        if not found.ended and left_s <= 0:
            return
        if len(found.ended) * 4 < len(ids):  # few of many: ask for more of them at a time
            pause_s = min(2 * pause_s + 0.01, _LONGEST_S)
            sleep(min(pause_s, max(until - monotonic(), 0.0)))
        else:
            pause_s = 0.0


def read_kept(found: wire.CallResult, codec: payload.CallCodec) -> Any:
    """Return the result of a call. Raises its exception."""
    if found.state == "done" and found.json:
        return payload.JsonCodec().load(found.result)
    if found.state == "done":
        if not codec.loads_errors:
            raise CallFailed(
                f"the result of {found.function} is a pickle, which can run code of the app",
                "read it with trust=True if you trust the app",
            )
        return codec.load(found.result)
    end = found.end
    if end.kind != "error":
        raise KINDS.get(end.kind, CallFailed)(end.text)
    error: BaseException = CallFailed(f"{end.type}: {end.text}")
    if found.result and codec.loads_errors and not found.json:
        try:
            loaded = codec.load(found.result)
        except Exception:  # noqa: BLE001 - its class may be missing here
            loaded = None
        if isinstance(loaded, BaseException):
            error = loaded
    if end.trace.strip():
        error.add_note(end.trace.strip())
    raise error


_watched: dict[str, KeptCall] = {}  # the newest that this program has started


def _watch(call: KeptCall) -> None:
    _watched[call.id] = call
    if len(_watched) > _MOST_WATCHED:
        del _watched[next(iter(_watched))]
    spawned.ask_with(_find_broken)


def _find_broken() -> None:
    """Note the calls that this program has started whose app cannot be loaded."""
    fetch_results(list(_watched.values()), 0.0)
    for name, call in list(_watched.items()):
        if call._found is not None:
            del _watched[name]
            if call._found.end.kind == "AppBroken":
                spawned.note(f"{call._found.function} cannot run: {call._found.end.text}")


def bind_arguments(
    schema: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by name, with the defaults that the schema of a function has.
    Those without a name stay, and wrong ones as they are: the call fails.
    """
    named = schema.get("properties", {})
    by_place = dict(zip([*named][: schema.get("x-positional", len(named))], args, strict=False))
    if by_place.keys() & kwargs.keys():
        return args, dict(kwargs)
    defaults = {name: each["default"] for name, each in named.items() if "default" in each}
    return args[len(by_place) :], {**defaults, **by_place, **kwargs}


def make_finder(
    name: str, schema: Mapping[str, Any], limits: Sequence[Sequence[str]]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], list[str]]:
    """Return what makes the keys of the limits of a function from arguments."""

    def find(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        _, named = bind_arguments(schema, args, kwargs)
        return [find_key(name, paths, named) for paths in limits]

    return find


class CallKeeper:
    """Sends the calls of a deployed app to the server. `once` names the functions whose calls with
    the same arguments are one call, `schema` that of the arguments.
    """

    def __init__(
        self,
        project: str,
        app: str,
        codec: payload.CallCodec,
        *,
        once: bool,
        consent: bool,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self._project, self._app, self._codec = project, app, codec
        self.once, self._consent, self._schema = once, consent, schema or {}

    def spawn(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptCall:
        return next(iter(self.spawn_all(function, [(args, kwargs)])))

    def spawn_all(
        self,
        function: Function,
        items: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
        keys: Iterable[str] | None = None,
        *,
        turn: str = "",
    ) -> Iterator[KeptCall]:
        """Store calls, many with each request; they take turns with calls of another `turn`.
        Raises CavvyError."""
        given = iter(keys) if keys is not None else None
        connections = Connections(None, None, None)
        batch: list[wire.CallAsk] = []
        size = 0
        try:
            for number, (args, kwargs) in enumerate(items, 1):
                more = function.make_head(tuple(args), dict(kwargs))
                what = function.name if number == 1 else f"{function.name} (call {number})"
                body = self._codec.dump_arguments(what, tuple(args), dict(kwargs), function.given)
                key = str(next(given)) if given is not None else function.key
                if key is None and self.once:
                    key = self._make_key(function, tuple(args), dict(kwargs))
                batch.append(
                    wire.CallAsk(
                        function=function.name,
                        body=body,
                        json=not self._codec.loads_errors,
                        # any call has a key: its request may be sent twice
                        key=f"-{token_hex(12)}" if key is None else key,
                        priority=more.get("priority"),
                        limits=tuple(more.get("limits", ())),
                        turn=turn,
                    )
                )
                size += len(body)
                if len(batch) >= _TOGETHER or size > _BYTES:
                    yield from self._send(connections, batch)
                    batch, size = [], 0
            if batch:
                yield from self._send(connections, batch)
        finally:
            connections.close()

    def _make_key(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return what calls with the same arguments have in common."""
        args, kwargs = bind_arguments(self._schema, args, kwargs)
        written = payload.write_same((self._codec.head, args, kwargs, function.given))
        return sha256(written).hexdigest()

    def _send(self, connections: Connections, batch: list[wire.CallAsk]) -> Iterator[KeptCall]:
        ask = wire.CallsAsk(calls=batch, consent=self._consent, user=own_user_name())
        try:
            with connections.use() as client:
                taken = wire.add_calls(client, self._project, self._app, ask)
        except ApiError as error:
            if error.code == "app-not-found":
                raise InvalidArgument(
                    f"project {self._project} has no deployed app {self._app}",
                    "`cavvy deploy app.py` deploys it; `with app.run()` needs no deployed app",
                ) from error
            raise
        for each in taken:
            made = KeptCall(self._project, self._app, each.id, self._codec)
            _watch(made)
            yield made
