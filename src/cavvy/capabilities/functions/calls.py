"""Calls of an app's functions from this program: `remote`, `map`, `spawn` and what they return.

This file also runs on nodes, since functions may call functions: it imports only the standard
library and files that do.
"""

import asyncio
import atexit
import itertools
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cavvy.capabilities.functions import payload, spawned
from cavvy.capabilities.functions.app import MAIN, App, BothWays, Function
from cavvy.capabilities.functions.errors import CallTimeout, WorkerLost
from cavvy.capabilities.functions.frames import ADDRESS_VARIABLE, Head, pack
from cavvy.capabilities.functions.link import (
    BrokerLink,
    Deliver,
    Request,
    make_error,
    print_line,
    read_result,
)
from cavvy.sdk.errors import InvalidArgument

if TYPE_CHECKING:
    from cavvy.capabilities.functions.jobs import FunctionJob, JobSource

_FIRST = 4  # calls of a `map` that are sent one by one
_WINDOW = 512  # calls of a `map` without a result
_MOST_WAITING = 64 << 20  # bytes of results of a `map` that wait to be taken
_turns = itertools.count(1)
_Answer = tuple[Head, bytes]
MakeRequest = Callable[[Deliver], Request]


class FunctionCall:
    """A call that `spawn` has started. Calls of deployed apps are kept by the server, and can be
    found again by their `id`.
    """

    def __init__(
        self,
        link: BrokerLink,
        request: Request,
        answer: "Future[_Answer]",
        find_cost: "Callable[[float], int | None] | None" = None,
    ) -> None:
        self._link, self._request, self._answer = link, request, answer
        self._find_cost = find_cost
        self._result: list[Any] = []
        self._lock = threading.Lock()

    @property
    def get(self) -> BothWays[..., Any]:
        """Wait for the result, for at most `timeout` seconds, and return it. Raises the exception
        of the function. Raises CallTimeout; the call goes on.
        """
        return _both_ways(self._get)

    @staticmethod
    def from_id(name: str, *, trust: bool = True) -> "FunctionCall":
        """Return the call with this `id`, in any program. With `trust=False`, only results that are
        JSON are read. Raises InvalidArgument.
        """
        from cavvy.frame.discover import load

        found: FunctionCall = load("cavvy.capabilities.functions.stored_calls:find_call")(
            name, trust
        )
        return found

    @property
    def id(self) -> str:
        """The ID of a call of a deployed app, for `from_id`. Raises InvalidArgument for others,
        which end with this program."""
        name = self._request.head["fn"]
        raise InvalidArgument(
            f"this call of {name} ends with this program, so it has no ID",
            "deploy the app and use `Function.lookup`: then the server keeps the calls of `spawn`",
        )

    @property
    def cost(self) -> BothWays[[], int | None]:
        """Wait for the result, and return what the call has cost, in micro-dollars: its share of
        the job's price, which calls that run at the same time divide equally. None while the job
        has no bill yet. Raises CavvyError."""
        return _both_ways(self._cost)

    @property
    def cancel(self) -> BothWays[[], None]:
        """Cancel the call; its process ends if the call is running."""
        return _both_ways(self._cancel)

    @property
    def done(self) -> BothWays[[], bool]:
        """Return whether the call has a result or has failed."""
        return _both_ways(self._done)

    def _cost(self) -> int | None:
        share_s = self._answer.result()[0].get("share_s")
        if share_s is None or self._find_cost is None:
            raise InvalidArgument(
                "the cost of this call is not known here",
                "ask in the program that made it; a function does not know that of its own calls",
            )
        return self._find_cost(float(share_s))

    gather: ClassVar[BothWays[..., list[Any]]]  # below: it needs this class

    def _cancel(self) -> None:
        self._link.forget(self._request)

    def _done(self) -> bool:
        return self._answer.done()

    @staticmethod
    def _wait_for_all(calls: "Sequence[Any]") -> None:
        """Wait for calls of this class together, if this is faster than one by one."""

    def _get(self, timeout: float | None = None) -> Any:
        try:
            head, body = self._answer.result(timeout)
        except FutureTimeout:
            name = self._request.head["fn"]
            raise CallTimeout(f"{name} has no result after {timeout:g} s") from None
        with self._lock:
            if not self._result:
                self._result.append(read_result(self._link, head, body))
        return self._result[0]


def _both_ways(call: Callable[..., Any]) -> BothWays[..., Any]:
    return BothWays(call, partial(asyncio.to_thread, call))


def _gather(*calls: FunctionCall) -> list[Any]:
    """Wait for all of the calls, and return their results."""
    for kind in {type(each) for each in calls}:
        kind._wait_for_all([each for each in calls if type(each) is kind])
    return [each.get() for each in calls]


FunctionCall.gather = _both_ways(_gather)


class AppRun:
    """The jobs of an app that this program uses, one for each kind of node that its functions
    need.
    """

    def __init__(
        self,
        app: App,
        *,
        quiet: bool = False,
        codec: payload.CallCodec | None = None,
        find_source: "Callable[[Function], tuple[str, JobSource]] | None" = None,
    ) -> None:
        self.app, self.closed = app, False
        self._find_source = find_source or self._find_own
        self._codec = codec or payload.PickleCodec()
        self._quiet = quiet
        self._links: dict[str, BrokerLink] = {}
        self._jobs: list[FunctionJob] = []
        self._costs: dict[int, Callable[[float], int | None]] = {}  # by the link
        self._lock = threading.Lock()
        if app.place.module == "__main__":  # nodes load it under this name
            sys.modules.setdefault(MAIN, sys.modules["__main__"])
        atexit.register(self.close)

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and return its result."""
        link, request, answer = self._start(function, args, kwargs)
        try:
            head, body = answer.result()
        except BaseException:  # the user has interrupted it
            link.forget(request)
            raise
        return read_result(link, head, body)

    async def call_async(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function, and return its result."""
        link, request, answer = await asyncio.to_thread(self._start, function, args, kwargs)
        try:
            head, body = await asyncio.wrap_future(answer)
        except BaseException:
            link.forget(request)
            raise
        if head.get("file"):
            return await asyncio.to_thread(read_result, link, head, body)
        return read_result(link, head, body)

    def spawn(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FunctionCall:
        """Start a call."""
        link, request, answer = self._start(function, args, kwargs, waits=False)
        return FunctionCall(link, request, answer, self._costs.get(id(link)))

    def spawn_all(
        self,
        function: Function,
        items: "Iterable[tuple[Sequence[Any], Mapping[str, Any]]]",
        keys: Iterable[str] | None,
    ) -> Iterator[FunctionCall]:
        """Start calls."""
        if keys is not None:
            refuse_key(function)
        for args, kwargs in items:
            yield self.spawn(function, tuple(args), dict(kwargs))

    def stream(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Any]:
        """Call a generator, and yield its values."""
        link = self._find_link(function)
        arrived: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        body = link.codec.dump_arguments(function.name, args, kwargs, function.given)
        more = function.make_head(args, kwargs)
        request = link.make_request(function.name, body, lambda *pair: arrived.put(pair), more=more)
        link.send([request])
        pieces: list[bytes] = []
        over = False
        try:
            while True:
                head, data = arrived.get()
                over = head["op"] != "part"
                if head["op"] == "failed":
                    raise make_error(link, head, data)
                if over:
                    return
                pieces.append(data)
                if not head.get("more"):
                    value = link.codec.load(b"".join(pieces))
                    pieces.clear()
                    link.take_more(request)
                    yield value
        finally:
            if not over:
                link.forget(request)

    def map(
        self,
        function: Function,
        items: Iterable[Sequence[Any]],
        kwargs: dict[str, Any],
        *,
        ordered: bool,
        catch: bool,
    ) -> Iterator[Any]:
        """Call a function with each of the tuples, and yield the results."""
        link = self._find_link(function)
        calls = MappedCalls(link, self._make_requests(function, link, items, kwargs))
        try:
            for head, body in calls.take_all(ordered=ordered):
                # no variable holds the result while the caller uses it
                yield read_caught(link, head, body) if catch else read_result(link, head, body)
        finally:
            calls.close()

    def change_code(self, app: App, files: "Mapping[str, bytes | None]") -> None:
        """Let the jobs go on as those of an app that was loaded again. They get the changed files,
        None for those to remove, and their processes start again. Raises CavvyError.
        """
        from cavvy.capabilities.functions.jobs import group_functions, list_described

        self.app = app
        groups = group_functions(app)
        for job in self._jobs:
            job.take(app)
        waiting = []
        for key, link in list(self._links.items()):
            if key in groups:
                changed = {**files, **list_described(app, key)}
                answer: Future[_Answer] = Future()
                if link.change_code(changed, lambda *pair, told=answer: told.set_result(pair)):
                    waiting.append((link, answer))
        for link, answer in waiting:
            read_result(link, *answer.result())

    def close(self) -> None:
        """Stop the app's jobs."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            links, jobs = list(self._links.values()), list(self._jobs)
        atexit.unregister(self.close)
        for link in links:
            link.close()
        for job in jobs:
            job.stop()

    def _start(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        waits: bool = True,
    ) -> tuple[BrokerLink, Request, "Future[_Answer]"]:
        if function.key is not None:
            refuse_key(function)
        link = self._find_link(function)
        body = link.codec.dump_arguments(function.name, args, kwargs, function.given)
        answer: Future[_Answer] = Future()

        def deliver(head: Head, data: bytes) -> None:
            if head["op"] == "part":  # the program looked the function up before it was changed
                text = f"{function.name} yields values, and was called for one result"
                head = {"op": "failed", "id": head["id"], "kind": "CallFailed", "text": text}
                data = b""
            if not answer.done():
                if not waits:
                    kind = str(head.get("kind")) if head["op"] == "failed" else ""
                    spawned.end(function.name, kind, str(head.get("text", "")))
                answer.set_result((head, data))

        more = function.make_head(args, kwargs)
        if not waits:
            more["cost"] = True
            spawned.begin()
        request = link.make_request(function.name, body, deliver, waits=waits, more=more)
        link.send([request])
        return link, request, answer

    def _make_requests(
        self,
        function: Function,
        link: BrokerLink,
        items: Iterable[Sequence[Any]],
        kwargs: dict[str, Any],
    ) -> Iterator[MakeRequest]:
        turn = next(_turns)  # each `map` takes turns with the other calls of this program
        for at, args in enumerate(items, 1):
            what = f"{function.name} (item {at} of map)"
            body = link.codec.dump_arguments(what, tuple(args), kwargs, function.given)
            more = {"turn": turn, **function.make_head(tuple(args), kwargs)}
            yield partial(link.make_request, function.name, body, more=more)

    def _find_link(self, function: Function) -> BrokerLink:
        if path := os.environ.get(ADDRESS_VARIABLE):  # this program is a function itself
            with self._lock:
                if "" not in self._links:
                    self._links[""] = BrokerLink(lambda: dial_broker(path), None, self._codec)
                return self._links[""]
        with self._lock:
            if self.closed:
                raise WorkerLost("the app was closed in this program")
            key, source = self._find_source(function)
            if key not in self._links:
                from cavvy.capabilities.functions.jobs import FunctionJob

                job = FunctionJob(source, quiet=self._quiet)
                self._jobs.append(job)
                tell = None if self._quiet or source.stays else print_line
                link = self._links[key] = BrokerLink(job.dial, tell, self._codec)
                self._costs[id(link)] = job.find_cost
            return self._links[key]

    def _find_own(self, function: Function) -> "tuple[str, JobSource]":
        from cavvy.capabilities.functions.jobs import OwnJob, make_key

        key = make_key(self.app, function)
        first = function.name if function.owner is None else function.owner.name
        return key, OwnJob(self.app, key, first)


def read_caught(link: BrokerLink, head: Head, body: bytes) -> Any:
    """Return the result of a call, or the exception of the function."""
    try:
        return read_result(link, head, body)
    except Exception as error:  # noqa: BLE001 - functions raise anything
        return error


def refuse_key(function: Function) -> None:
    """Raise InvalidArgument: the server keeps no calls of an app that is not deployed."""
    raise InvalidArgument(
        f"a call of {function.name} with a key needs a deployed app, whose calls the server keeps",
        f'`cavvy deploy`, and then cavvy.Function.lookup("{function.app.name}", '
        f'"{function.name}").once(key)',
    )


class MappedCalls:
    """The calls of a `map`: some are sent before their results are taken, but not all of them."""

    def __init__(self, link: BrokerLink, rest: Iterator[MakeRequest]) -> None:
        self._link, self._rest = link, rest
        self._arrived: queue.SimpleQueue[tuple[int, Head, bytes]] = queue.SimpleQueue()
        self._open: dict[int, Request] = {}
        self._kept: dict[int, _Answer] = {}  # results before their turn
        self._kept_bytes = self._begun = 0
        self._more = True

    def take_all(self, *, ordered: bool) -> Iterator[_Answer]:
        """Yield the results, in the order of the calls or as they come."""
        turn = 0
        while True:
            self._refill()
            if turn in self._kept:
                head, body = self._kept.pop(turn)
                self._kept_bytes -= len(body)
            elif not self._open:
                return
            else:
                at, head, body = self._arrived.get()
                del self._open[at]
                if ordered and at != turn:
                    self._kept[at] = head, body
                    self._kept_bytes += len(body)
                    continue
            turn += 1
            yield head, body

    def close(self) -> None:
        """Cancel what is not taken."""
        for request in self._open.values():
            self._link.forget(request)
        for head, _ in self._kept.values():
            if head.get("file"):
                self._link.drop(head["id"])

    def _refill(self) -> None:
        """Send more calls if half of them have results."""
        if len(self._open) > _WINDOW // 2 or self._kept_bytes > _MOST_WAITING:
            return
        batch: list[Request] = []
        while self._more and len(self._open) < _WINDOW:
            make = next(self._rest, None)
            if make is None:
                self._more = False
                break
            at = self._begun
            self._begun += 1
            request = make(partial(self._deliver, at))
            self._open[at] = request
            batch.append(request)
            if at < _FIRST:  # they run while the others are prepared
                self._link.send(batch)
                batch = []
        if batch:
            self._link.send(batch)

    def _deliver(self, at: int, head: Head, body: bytes) -> None:
        self._arrived.put((at, head, body))


def dial_broker(path: str) -> socket.socket:
    """Return a connection to the broker of this node, whose address a file tells."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    made = socket.create_connection(("127.0.0.1", found["port"]))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.sendall(pack({"op": "hello", "id": 0, "key": found["key"]}))
    return made
