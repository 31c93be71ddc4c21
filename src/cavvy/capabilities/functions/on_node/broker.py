"""Takes calls, keeps their queue, and gives them to processes that run them.

Callers connect to a socket in a folder of their own if they are on this machine, where both sides
prove first that they know the key of the meeting place, since other jobs of this user can reach the
folder too. Otherwise they connect to a port of this node through the tunnel of Cavvy; the file
`address.json` has the port and the key for it. The broker loads neither arguments nor results. It
imports only the standard library and files that do.
"""

import asyncio
import hmac
import json
import os
import pickle
import secrets
import signal
import socket
import stat
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from cavvy.capabilities.functions.frames import PIECE, CallFrames, Head, WrongFrame, pack, prove
from cavvy.capabilities.functions.on_node.counts import CallCounts
from cavvy.capabilities.functions.on_node.reporter import find_reporter
from cavvy.capabilities.functions.on_node.shares import SharedTime
from cavvy.capabilities.functions.on_node.start import (
    StartedProcess,
    find_address_file,
    start_process,
)
from cavvy.capabilities.functions.on_node.waiting import (
    MOST_KEYS,
    Limit,
    LimitSlot,
    WaitingCalls,
    WaitingTurns,
)

if TYPE_CHECKING:
    from cavvy.capabilities.functions.on_node.windows import StoredWindows

_LOST_TRIES = 3  # how often a call is started again after its process has ended
_AHEAD_S = 0.02  # short calls of this length together are sent to a process before it is free
_MOST_AHEAD = 32
_MOST_RANK = 100  # of a priority
_MOST_KEY = 256  # characters of a key of a limit
_MOST_STATES = 500  # calls of a frame
_LONG_S = 5.0  # after which a program is told what its calls wait for
_IDLE_LOOK_S = 1.0
_REPORT_S = 5.0  # between two reports of what runs and has ended
_KILL_S = 5.0
_NOTHING = pickle.dumps(None)  # the answer to a caller that waits for one
_GREET_S = 10.0  # in which a connection must show that it is a caller's


class BrokerCall:
    """A call that has no result yet. A call with a `key` is one of the control plane: it goes on
    without its caller, and its result is kept until it is confirmed.
    """

    __slots__ = (
        "answer",
        "began",
        "body",
        "caller",
        "caller_id",
        "function",
        "head",
        "key",
        "losses",
        "number",
        "over",
        "parts",
        "rank",
        "share_s",
        "shared",
        "since",
        "slots",
        "timer",
        "told",
        "tries",
        "turn",
        "turns",
        "why",
        "worker",
    )  # fmt: skip

    def __init__(self, caller: "Peer", function: "Served", head: Head, body: bytes) -> None:
        self.caller, self.caller_id, self.function = caller, head["id"], function
        self.head, self.body = head, body
        self.key = str(head.get("key") or "")
        self.answer: tuple[Head, bytes] | None = None
        # of the call between broker and workers: no other call ever has it, since what a worker
        # hears or says of a call may arrive after the call's end
        self.number = function.broker.make_number()
        self.tries = self.losses = self.parts = 0
        self.worker: Worker | None = None
        self.began = 0.0
        self.since = time.monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self.over = False
        rank = int(head.get("priority") or self.options["priority"])
        self.rank = max(-_MOST_RANK, min(rank, _MOST_RANK))
        # who takes turns with others: each `map` of a caller, and all its single calls
        self.turn = f"{id(caller)}/{head.get('turn', '')}"
        self.turns: WaitingTurns | None = None
        self.slots: Sequence[LimitSlot] = ()
        self.told = False  # that a limit holds it back
        self.why = ""  # what the control plane was told of it last
        self.share_s = 0.0  # of the job's time
        self.shared: float | None = None  # while it runs: see `SharedTime`

    @property
    def options(self) -> dict[str, Any]:
        """The options of the function or method that is called."""
        return self.function.broker.spec["functions"][self.head["fn"]]  # type: ignore[no-any-return]


class Peer(asyncio.Protocol, ABC):
    """A connection. Frames that are sent in one turn of the loop leave as one write."""

    def __init__(self, broker: "Broker") -> None:
        self.broker = broker
        self.transport: asyncio.Transport | None = None
        self.room = asyncio.Event()
        self.room.set()
        self._reader, self._waiting = CallFrames(), bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            for head, body in self._reader.feed(data):
                self.hear(head, body)
        except (WrongFrame, KeyError, TypeError, ValueError) as error:
            say(f"a connection was closed: {error!r}")
            self.close()

    @abstractmethod
    def hear(self, head: Head, body: bytes) -> None:
        """Act on a frame that has arrived."""

    def send(self, head: Head, body: bytes = b"") -> None:
        if not self._waiting:
            self.broker.loop.call_soon(self._flush)
        self._waiting += pack(head, body)

    def close(self) -> None:
        if self.transport is not None:
            self._flush()
            self.transport.close()

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def _flush(self) -> None:
        if self._waiting and self.transport is not None and not self.transport.is_closing():
            self.transport.write(bytes(self._waiting))
        self._waiting.clear()


class Caller(Peer):
    """A program that calls functions."""

    def __init__(self, broker: "Broker", *, here: bool) -> None:
        super().__init__(broker)
        self.calls: dict[int, BrokerCall] = {}
        self._here = here  # at the meeting place
        self._nonces = ""
        self._trusted = False
        self._files: dict[int, str] = {}  # arguments that arrive in pieces
        self._results: dict[int, str] = {}  # results that wait in files
        self._keyed: dict[int, BrokerCall] = {}  # calls with a key that are not confirmed
        self._told = ""  # what its calls wait for

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = self.broker.loop.call_later(_GREET_S, self.close)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self.broker.callers.discard(self)
        self.room.set()
        for call in list(self.calls.values()):
            if not call.key:
                self.broker.drop(call)
        for number in self._keyed:  # their results are kept
            self._results.pop(number, None)
        for path in (*self._files.values(), *self._results.values()):
            remove(path)

    def hear(self, head: Head, body: bytes) -> None:
        if head["op"] == "hello":
            self._greet(head)
        elif not self._trusted:
            raise ValueError("no key")
        else:
            self.broker.used_at = time.monotonic()
            self._obey(head["op"], int(head["id"]), head, body)

    def _greet(self, head: Head) -> None:
        """Let a caller in that knows the key. At the meeting place, neither side says the key."""
        given, wanted = str(head.get("key")), self.broker.key
        if self._here:
            key = self.broker.meet_key
            if not self._nonces:
                own = secrets.token_hex(16)
                self._nonces = f"{head['nonce']}:{own}"
                proof = prove(key, "broker", self._nonces)
                self.send({"op": "challenge", "id": 0, "nonce": own, "proof": proof})
                return
            given, wanted = str(head.get("proof")), prove(key, "caller", self._nonces)
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            raise ValueError("the key is wrong")
        self._timer.cancel()
        self._trusted = True
        self.broker.callers.add(self)
        self.send({"op": "welcome", "python": sys.version.split()[0]})

    def _obey(self, op: str, number: int, head: Head, body: bytes) -> None:
        if op == "call":
            self._take(number, head, body)
        elif op == "put":
            if number not in self._files:
                self._files[number] = self.broker.make_path()
            with open(self._files[number], "ab") as file:
                file.write(body)
        elif op == "reload":
            if number in self._files:
                body = read_whole(self._files.pop(number))
            self.broker.reload(head["files"], body)
            self.send({"op": "done", "id": number}, _NOTHING)
        elif op == "cancel":
            self._cancel(number)
        elif op == "more":
            if (call := self.calls.get(number)) is not None and call.worker is not None:
                call.worker.send({"op": "more", "id": call.number})
        elif op == "fetch":
            path = self._results.pop(number)
            self.broker.start_task(self._send_file(number, path, keep=number in self._keyed))
        elif op == "confirm":
            self.broker.forget(self._keyed.pop(number))
        elif op == "drop":
            remove(self._results.pop(number, ""))
        else:
            raise ValueError(f"unknown: {op}")

    def _cancel(self, number: int) -> None:
        if (call := self.calls.get(number)) is None:
            return
        self.broker.drop(call)
        told = {"op": "failed", "kind": "CallCancelled", "text": "the call was cancelled"}
        self.send({**told, "id": number})

    def tell_wait(self, now: float) -> None:
        """Tell a program what the first of its calls waits for, if it waits long."""
        call = next(iter(self.calls.values()), None)
        if call is None or call.key or "logs" not in call.head or now - call.since < _LONG_S:
            return
        why = call.function.explain(call)
        if call.worker is None and why != self._told:
            self._told = why
            self.send({"op": "log", "id": call.caller_id, "text": f"(waits: {why})"})

    def answer(self, call: BrokerCall, head: Head, body: bytes) -> None:
        """Send the end of a call."""
        self.calls.pop(call.caller_id, None)
        if call.answer is None:
            self.broker.count(call, head)
        if call.key:
            call.answer = head, body
            if self.transport is None or self.transport.is_closing():
                return
        if "file" in head:
            self._results[call.caller_id] = head["file"]
            head = {**head, "file": True}
        self.send({**head, "id": call.caller_id}, body)

    def _take(self, number: int, head: Head, body: bytes) -> None:
        served = self.broker.functions.get(head["fn"])
        if served is None:
            known = ", ".join(self.broker.functions)
            text = f"the app has no function {head['fn']}; it has {known}"
            self.send({"op": "failed", "id": number, "kind": "AppBroken", "text": text})
            return
        if served.holds(head.get("within", ())):
            text = (
                f"{head['fn']} is called by itself ({' > '.join(head['within'])}), and would wait "
                f"for its own process: call `.local()` there, or `.spawn()` and do not wait"
            )
            self.send({"op": "failed", "id": number, "kind": "CallDeadlock", "text": text})
            return
        head.pop("file", None)  # only the broker says where arguments lie
        if number in self._files:
            head["file"] = self._files.pop(number)
        call = BrokerCall(self, served, head, body)
        twin = self.broker.keyed.get(call.key) if call.key else None
        if twin is None:
            self.calls[number] = call
            if call.key:
                self.broker.keyed[call.key] = self._keyed[number] = call
            else:
                self.broker.counts.begin(head["fn"])
            served.take(call)
            return
        # the control plane has lost its connection, and sends the call again
        remove(head.get("file", ""))
        twin.caller, twin.caller_id, twin.why, twin.told = self, number, "", False
        self.calls[number] = self._keyed[number] = twin
        if twin.answer is not None:
            self.answer(twin, *twin.answer)
        else:
            twin.function.tell_again(twin)

    async def _send_file(self, number: int, path: str, *, keep: bool) -> None:
        try:
            size, begin = os.path.getsize(path), 0
            while self.transport is not None and not self.transport.is_closing():
                piece = read_piece(path, begin)
                begin += len(piece)
                self.send({"op": "piece", "id": number, "more": begin < size}, piece)
                if begin >= size:
                    return
                self._flush()
                await self.room.wait()
        finally:
            if not keep:
                remove(path)


class Worker(Peer):
    """A process that runs calls of one function, or of the methods of one class."""

    def __init__(
        self, broker: "Broker", served: "Served", slot: int, started: StartedProcess
    ) -> None:
        super().__init__(broker)
        self.served, self.slot = served, slot
        self.calls: dict[int, BrokerCall] = {}  # in the order in which they are run
        self.ready = self.leaves = False  # it leaves after its calls, since the code has changed
        self.process, self._connection = started.process, started.connection

    async def connect(self) -> None:
        self._connection.setblocking(False)
        await self.broker.loop.create_connection(lambda: self, sock=self._connection)

    def connection_lost(self, error: Exception | None) -> None:
        self.room.set()
        self.served.lose(self)

    def hear(self, head: Head, body: bytes) -> None:
        op = head["op"]
        if op == "ready":
            self.ready = True
            self.served.unready = 0
            self.served.pump()
            return
        if op == "broken":
            self.served.fail_all({**head, "op": "failed", "kind": "AppBroken"})
            return
        call = self.calls.get(head["id"])
        if call is None:  # it was cancelled meanwhile
            remove(head.get("file", ""))
            return
        if op in ("log", "part"):
            call.parts += op == "part"
            call.caller.send({**head, "id": call.caller_id}, body)
            return
        self.served.end(call, head, body)

    def kill(self) -> None:
        with suppress(OSError):
            self.process.kill()


class Served:
    """A function, or a class with its methods: its queue and its processes."""

    def __init__(self, broker: "Broker", name: str, spec: dict[str, Any]) -> None:
        self.broker, self.name, self.spec = broker, name, spec
        self.describe(spec)
        self.workers: list[Worker] = []
        self.unready = 0  # processes in a row that ended before they were ready
        self.waiting = WaitingCalls(broker.loop.call_at, self._tell_limit)
        self._mean_s = 1.0
        self._pumped = False

    def describe(self, spec: dict[str, Any]) -> None:
        """Take the options of the function, or of the first method of the class."""
        self.spec = spec
        self.concurrency = int(spec["concurrency"])
        self.gpus = int(spec["gpus"])
        self.most = spec["max_replicas"] or self.broker.count_room(self.gpus, spec["cpu"])

    def retire(self) -> None:
        """Let the processes leave after their calls, and start one with the new code if there was
        one."""
        staying = [each for each in self.workers if not each.leaves]
        for worker in staying:
            worker.leaves = True
            worker.send({"op": "leave", "id": 0})
        self.unready = 0
        if staying and self in self.broker.functions.values():
            self.start()

    def recount(self) -> None:
        """Let waiting calls wait for the limits that the function has now."""
        for call in self.waiting.take_all():
            self.waiting.leave(call)
            if call.head["fn"] in self.broker.spec["functions"]:
                self.take(call)
            else:
                self._fail(call, "AppBroken", f"the app has no function {call.head['fn']} any more")

    def holds(self, within: Sequence[str]) -> bool:
        """Return whether the calls within which a call is made already take all places of a process
        of this function."""
        holders = [each for each in within if self.broker.functions.get(each) is self]
        return len(holders) >= self.concurrency

    def devices(self, slot: int) -> dict[str, str]:
        """Return the variables that give a process its part of the node's GPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        listed = [each for each in visible.split(",") if each]
        if not self.gpus or len(listed) <= self.gpus:
            return {}
        begin = slot * self.gpus % len(listed)
        return {"CUDA_VISIBLE_DEVICES": ",".join(listed[begin : begin + self.gpus])}

    def take(self, call: BrokerCall) -> None:
        """Take a new call."""
        if (slots := self.broker.find_slots(call)) is None:
            text = f"the limits of {call.head['fn']} know {MOST_KEYS:,} keys already: call it later"
            self._fail(call, "CallFailed", text)
            return
        call.slots = slots
        self.add(call)

    def add(self, call: BrokerCall, *, first: bool = False) -> None:
        self.waiting.add(call, first=first)
        if not self._pumped:  # once for all calls that arrive together
            self._pumped = True
            self.broker.loop.call_soon(self.pump)

    def tell_again(self, call: BrokerCall) -> None:
        """Tell another connection of the control plane if the call waits for a limit."""
        for slot in call.slots:
            if call.turns is slot.parked:
                self._tell_limit(call, slot)

    def _tell_limit(self, call: BrokerCall, slot: LimitSlot) -> None:
        """Tell the control plane which call waits for its limit: it sends others meanwhile."""
        if call.key and not call.told:
            call.told = True
            text = slot.limit.say(slot.key)
            call.caller.send({"op": "waits", "id": call.caller_id, "text": text})

    def pump(self) -> None:
        """Give waiting calls to processes that are free, and start processes for the others."""
        self._pumped = False
        for depth in range(self._count_given()):
            for worker in self.workers:
                free = worker.ready and not worker.leaves and len(worker.calls) <= depth
                if free and not self._give(worker):
                    return
        waiting = self.waiting.count
        staying = [each for each in self.workers if not each.leaves]
        starting = sum(not each.ready for each in staying)
        wanted = min(self.most - len(staying), -(-waiting // self.concurrency) - starting)
        for _ in range(wanted):
            self.start()

    def start(self) -> None:
        used = {each.slot for each in self.workers}
        slot = next(at for at in range(len(used) + 1) if at not in used)
        started = self.broker.take_begun(self.name)
        if started is None:
            started = start_process(self.broker.spec_file, self.name, self.devices(slot))
        worker = Worker(self.broker, self, slot, started)
        self.workers.append(worker)
        self.broker.start_task(worker.connect())

    def end(self, call: BrokerCall, head: Head, body: bytes) -> None:
        """Take the result of a call, or start it again."""
        worker = call.worker
        assert worker is not None
        del worker.calls[call.number]
        call.worker = None
        self._stop(call)
        if call.timer is not None:
            call.timer.cancel()
        if not call.over:
            ran_s = time.monotonic() - call.began
            self._mean_s += 0.1 * (ran_s - self._mean_s)
            if call.key or "cost" in call.head:
                head["ran_s"] = round(ran_s, 4)
                head["share_s"] = round(call.share_s, 6)
        if call.over:  # its result is not needed: it was cancelled, or took too long
            remove(head.get("file", ""))
        elif self._tries_again(call, head):
            self.add(call, first=True)
            return
        else:
            call.over = True
            call.caller.answer(call, head, body)  # type: ignore[attr-defined]  # it is a Caller
        self.waiting.leave(call)
        remove(call.head.get("file", ""))
        if worker.calls and self.concurrency == 1:
            self.watch(next(iter(worker.calls.values())))
        most = self._count_given()
        while not worker.leaves and len(worker.calls) < most and self._give(worker):
            pass

    def _tries_again(self, call: BrokerCall, head: Head) -> bool:
        """Return whether a call is run again after this answer."""
        if head["op"] != "failed" or head.get("kind") != "error" or call.parts:
            return False
        call.tries += 1
        return call.tries <= int(call.options["retries"])

    def _count_given(self) -> int:
        """Return how many calls a process is given: more than it runs at a time if they are short,
        so it need not wait for the next one.
        """
        if self.concurrency > 1:
            return self.concurrency
        return 1 + min(_MOST_AHEAD, int(_AHEAD_S / max(self._mean_s, 1e-6)))

    def watch(self, call: BrokerCall) -> None:
        """Begin the time of a call whose process runs it now."""
        call.began = time.monotonic()
        if call.shared is None:
            call.shared = self.broker.shared.begin(call.began)
        if (limit_s := call.options["timeout_s"]) and call.timer is None:
            call.timer = self.broker.loop.call_later(limit_s, self._expire, call)

    def _stop(self, call: BrokerCall) -> None:
        """Count a call no more as one that runs."""
        self.waiting.stop(call)
        if call.shared is not None:
            call.share_s += self.broker.shared.end(time.monotonic(), call.shared)
            call.shared = None

    def explain(self, call: BrokerCall) -> str:
        """Return what a call without a result waits for."""
        if call.worker is not None:
            return "it runs" if call.shared is not None else "its process is about to run it"
        for slot in call.slots:
            if call.turns is slot.parked:
                return f"it waits for {slot.limit.say(slot.key)}"
        ready = sum(each.ready for each in self.workers)
        if not ready:
            return f"its process starts: it loads {self.broker.spec['app']}"
        if ready < len(self.workers):
            return f"{ready} processes are busy, and others start"
        return f"all its {ready} processes are busy" if ready > 1 else "its process is busy"

    def lose(self, worker: Worker) -> None:
        """Start the calls of a process that has ended elsewhere."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        code = worker.process.poll()
        if code is None:
            worker.kill()
            code = worker.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.unready += not worker.ready and not worker.leaves
        if self.unready > _LOST_TRIES:
            self.unready = 0
            text = f"the process of {self.name} ended ({how}) while it loaded the app"
            self.fail_all({"op": "failed", "kind": "WorkerLost", "text": text})
        for at, call in enumerate(worker.calls.values()):
            call.worker = None
            self._stop(call)
            if call.timer is not None:
                call.timer.cancel()
                call.timer = None
            if call.over:
                self.waiting.leave(call)
                continue
            call.losses += at < self.concurrency  # the others had not begun
            if call.losses > _LOST_TRIES + int(call.options["retries"]) or call.parts:
                self._fail(call, "WorkerLost", f"the process of {call.head['fn']} ended ({how}), "
                           f"{call.losses} times in a row")  # fmt: skip
            else:
                self.add(call, first=True)
        self.pump()
        # one that could not load the app would fail again
        if worker.ready and len(self.workers) < min(self.most, self.spec["min_replicas"]):
            self.start()

    def fail_all(self, head: Head) -> None:
        """Answer all waiting calls: the code cannot be loaded."""
        for call in self.waiting.take_all():
            call.over = True
            remove(call.head.get("file", ""))
            self.waiting.leave(call)
            call.caller.answer(call, head, b"")

    def stop(self) -> None:
        for worker in self.workers:
            if worker.transport is not None:
                worker.send({"op": "leave", "id": 0})

    def _give(self, worker: Worker) -> bool:
        """Send the next call to a process; return False if none waits."""
        call = self.waiting.take()
        if call is None:
            return False
        begins = len(worker.calls) < self.concurrency
        call.worker = worker
        worker.calls[call.number] = call
        worker.send({**call.head, "op": "call", "id": call.number}, call.body)
        if begins:
            self.watch(call)
        return True

    def _expire(self, call: BrokerCall) -> None:
        call.timer = None
        if call.over or call.worker is None:
            return
        limit = call.options["timeout_s"]
        call.tries += 1
        worker = call.worker
        if call.tries <= int(call.options["retries"]) and not call.parts:
            call.losses -= 1  # its process ends now, which is no fault of the process
        else:
            self._fail(call, "CallTimeout", f"{call.head['fn']} took longer than {limit:g} s")
        worker.kill()

    def _fail(self, call: BrokerCall, kind: str, text: str) -> None:
        call.over = True
        remove(call.head.get("file", ""))
        if call.worker is None:
            self.waiting.leave(call)
        head = {"op": "failed", "id": 0, "kind": kind, "text": text}
        if call.key:
            head["share_s"] = round(call.share_s, 6)
        call.caller.answer(call, head, b"")  # type: ignore[attr-defined]  # it is a Caller


class Broker:
    """All functions of the job."""

    def __init__(self, spec_file: str, meet: str, begun: StartedProcess | None) -> None:
        self.spec_file, self._begun = spec_file, begun
        self._meet, self.meet_key = meet, read_key(spec_file)
        with open(spec_file, encoding="utf-8") as file:
            self.spec: dict[str, Any] = json.load(file)
        self.key = secrets.token_hex(16)
        self.loop = asyncio.get_running_loop()
        self.callers: set[Caller] = set()
        self.keyed: dict[str, BrokerCall] = {}
        self.used_at = time.monotonic()
        self.counts, self._reporter = CallCounts(), find_reporter("apps")
        self.shared = SharedTime(self.used_at)
        self.spool = os.path.join(os.getcwd(), ".cavvy", "spool")
        os.makedirs(self.spool, mode=0o700, exist_ok=True)
        self._files = self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.functions: dict[str, Served] = {}
        self.served: list[Served] = []
        self.limits: dict[str, Limit] = {}
        self._windows: StoredWindows | None = None
        self._describe()
        self._over = asyncio.Event()

    def _describe(self) -> None:
        """Make the functions what `spec` says; those that there were keep their processes."""
        self._describe_limits()
        known = {each.name: each for each in self.served}
        described = set[str]()
        self.functions = {}
        for name, each in self.spec["functions"].items():
            owner = each["class"] or name
            if owner not in known:
                known[owner] = Served(self, owner, each)
            elif owner not in described:
                known[owner].describe(each)
            described.add(owner)
            found = self.functions[name] = known[owner]
            found.concurrency = max(found.concurrency, each["batch"] or 1)
        self.served = list(known.values())

    def _describe_limits(self) -> None:
        """Make the limits what `spec` says. Calls that run go on counting."""
        for each in self.spec["functions"].values():
            for head in each.get("limits", ()):
                if (known := self.limits.get(head["id"])) is None:
                    self.limits[head["id"]] = Limit(head)
                else:
                    known.describe(head)

    async def _open_windows(self) -> None:
        """Count the starts of calls that earlier brokers of the app have stored."""
        if not any(each.per_s for each in self.limits.values()):
            return
        from cavvy.capabilities.functions.on_node.windows import StoredWindows

        self._windows = StoredWindows.open(self.spec["app"], self.limits)
        if self._windows is not None:
            if why := await self._windows.load():
                say(f"the limits of calls do not know earlier calls: {why}")
            self.start_task(self._windows.run())

    def find_slots(self, call: BrokerCall) -> Sequence[LimitSlot] | None:
        """Return the room that a call needs in the limits of its function; None if they know too
        many keys."""
        if not (heads := call.options.get("limits")):
            return ()
        keys = call.head.get("limits") or ()
        found: list[LimitSlot] = []
        for number, head in enumerate(heads):
            key = str(keys[number])[:_MOST_KEY] if head["key"] and number < len(keys) else ""
            if (slot := self.limits[head["id"]].find(key)) is None:
                return None
            found.append(slot)
        found = [*dict.fromkeys(found)]
        for slot in found:
            slot.users += 1
        return found

    def reload(self, listed: Sequence[tuple[str, int]], content: bytes) -> None:
        """Write changed files into the working folder, where -1 is the size of one to remove, and
        let processes with the new code take the next calls. Raises ValueError."""
        if not self.spec["alone_s"]:
            raise ValueError("the code of a deployed app is changed by deploying it")
        root, at = os.path.realpath(os.getcwd()), 0
        for path, size in listed:
            whole = os.path.realpath(os.path.join(root, path))
            if not whole.startswith(root + os.sep):
                raise ValueError(f"{path} is not in the working folder")
            if size < 0:
                remove(whole)
                continue
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            with open(f"{whole}.new", "wb") as file:
                file.write(content[at : at + size])
            os.replace(f"{whole}.new", whole)
            at += size
            remove_compiled(whole)
        with open(self.spec_file, encoding="utf-8") as file:
            self.spec = json.load(file)
        self._describe()
        for each in self.served:
            each.recount()
            each.retire()

    async def run(self) -> None:
        """Serve calls until the job is stopped, or no program has called for long."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._over.set)
        await self._open_windows()
        if self._meet and self.meet_key:
            await self._listen_here()
        server = await self.loop.create_server(lambda: Caller(self, here=False), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        write_private(find_address_file(self.spec_file), {"port": port, "key": self.key})
        for each in self.served:
            begun = self._begun is not None and self._begun.name == each.name
            least = max(each.spec["min_replicas"], begun)
            for _ in range(min(each.most, least)):
                each.start()
        watching = [self.loop.create_task(each) for each in (self._watch_idle(), self._report())]
        await self._over.wait()
        for task in watching:
            task.cancel()
        await self._leave()
        if self._windows is not None:
            await self._windows.close()

    def count_room(self, gpus: int, cpus: float | None) -> int:
        """Return how many processes of this size the node can run."""
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            return max(1, len([each for each in visible.split(",") if each]) // gpus)
        return max(1, int(len(os.sched_getaffinity(0)) // max(cpus or 1, 1)))

    def take_begun(self, name: str) -> StartedProcess | None:
        """Return the process that has begun already, if it is for this function or class."""
        begun = self._begun
        if begun is None or begun.name != name:
            return None
        self._begun = None
        return begun

    def make_number(self) -> int:
        """Return the number of a new call."""
        self._number += 1
        return self._number

    def make_path(self) -> str:
        """Return the path of a new file in the spool."""
        self._files += 1
        return os.path.join(self.spool, f"b{self._files}")

    def start_task(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, call: BrokerCall) -> None:
        """Forget a call with a key, whose result was confirmed."""
        self.keyed.pop(call.key, None)
        if call.answer is not None:
            remove(call.answer[0].get("file", ""))

    def drop(self, call: BrokerCall) -> None:
        """Forget a call whose caller is gone or has cancelled it. Its process ends if it runs it
        now, and runs nothing else."""
        call.over = True
        if not call.key:
            self.counts.drop(call.head["fn"])
        self.keyed.pop(call.key, None)
        remove(call.head.get("file", ""))
        call.caller.calls.pop(call.caller_id, None)  # type: ignore[attr-defined]  # it is a Caller
        if call.timer is not None:
            call.timer.cancel()
        worker = call.worker
        if worker is None:
            call.function.waiting.leave(call)
            return
        first = next(iter(worker.calls), None)
        if call.function.concurrency == 1 and first == call.number:
            worker.kill()
        else:
            worker.send({"op": "cancel", "id": call.number})

    async def _listen_here(self) -> None:
        """Listen on the socket in the callers' folder, if this is their machine."""
        with suppress(OSError):
            folder = os.lstat(os.path.dirname(self._meet))
            if not stat.S_ISDIR(folder.st_mode):
                return
            if folder.st_uid == os.geteuid() and folder.st_mode & 0o077 == 0:
                with suppress(FileNotFoundError):
                    os.unlink(self._meet)
                await self.loop.create_unix_server(lambda: Caller(self, here=True), self._meet)

    def count(self, call: BrokerCall, head: Head) -> None:
        """Count a call that has ended."""
        now = time.monotonic()
        ran_s = now - call.began if call.began else 0.0
        told = {**head, "key": call.key}
        self.counts.end(call.head["fn"], told, ran_s, now - call.since, time.time())

    async def _report(self) -> None:
        """Tell the control plane what runs and has ended, for the page of the app."""
        while self._reporter is not None:
            await asyncio.sleep(_REPORT_S)
            self._tell()

    def _tell(self) -> None:
        running, kept = Counter[str](), Counter[str]()
        workers = [each for served in self.served for each in served.workers]
        for worker in workers:
            for call in islice(worker.calls.values(), worker.served.concurrency):
                running[call.head["fn"]] += 1
                kept[call.head["fn"]] += bool(call.key)
        report = self.counts.take(len(workers), running, kept, time.time())
        if report is not None:
            self.shared.go(time.monotonic())
            report["shared_s"] = round(self.shared.shared_s, 3)
        if report is not None and self._reporter is not None:
            self._reporter.put(report)

    def _tell_states(self, now: float) -> None:
        """Tell the control plane what its calls wait for, if this has changed, and programs what
        their functions wait for."""
        changed: dict[Caller, list[tuple[int, str]]] = {}
        for call in self.keyed.values():
            if call.answer is None and now - call.since > _IDLE_LOOK_S:
                why = call.function.explain(call)
                if why != call.why:
                    call.why = why
                    assert isinstance(call.caller, Caller)
                    changed.setdefault(call.caller, []).append((call.caller_id, why))
        for caller, listed in changed.items():
            for begin in range(0, len(listed), _MOST_STATES):
                told = listed[begin : begin + _MOST_STATES]
                caller.send({"op": "states", "id": 0, "of": told})
        for caller in self.callers:
            caller.tell_wait(now)

    async def _watch_idle(self) -> None:
        idle_s, alone_s = self.spec["idle_s"], self.spec["alone_s"]
        alone_at = time.monotonic()
        while not self._over.is_set():
            await asyncio.sleep(_IDLE_LOOK_S)
            now = time.monotonic()
            self._tell_states(now)
            running = any(each.answer is None for each in self.keyed.values())
            if running or any(each.calls for each in self.callers):
                self.used_at = now
            if self.callers:
                alone_at = now
            if idle_s and now - self.used_at > idle_s:
                say(f"no call for {idle_s:g} s: the node is given back")
                self._over.set()
            if alone_s and now - alone_at > alone_s:
                say(f"no caller for {alone_s:g} s: the node is given back")
                self._over.set()

    async def _leave(self) -> None:
        if self._meet:
            remove(self._meet)
        for each in list(self.callers):
            each.send({"op": "bye", "id": 0})
            each.close()
        workers: deque[Worker] = deque()
        for served in self.served:
            workers.extend(served.workers)
            served.stop()
            served.workers = []
        until = time.monotonic() + _KILL_S
        while workers and time.monotonic() < until:
            if workers[0].process.poll() is not None:
                workers.popleft()
            else:
                await asyncio.sleep(0.005)
        for worker in workers:
            worker.kill()
            worker.process.wait()
        if self._reporter is not None:
            self._tell()
            await asyncio.to_thread(self._reporter.close)


def say(text: str) -> None:
    """Write a line to the job's log."""
    sys.stderr.write(f"cavvy: {text}\n")
    sys.stderr.flush()


def read_whole(path: str) -> bytes:
    """Return the content of a file of the spool, and delete it."""
    with open(path, "rb") as file:
        content = file.read()
    remove(path)
    return content


def read_piece(path: str, begin: int) -> bytes:
    """Return the next bytes of a file."""
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(PIECE)


def read_key(spec_file: str) -> str:
    """Return the key of the meeting place, which lies beside the description of the app, or ""."""
    path = os.path.join(os.path.dirname(spec_file), "key")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def write_private(path: str, content: object) -> None:
    """Write a file of JSON that only this user can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)


def remove_compiled(path: str) -> None:
    """Delete what Python keeps of a source file. It compares seconds and sizes, and a file may be
    saved twice in a second."""
    folder, name = os.path.split(path)
    stem, ending = os.path.splitext(name)
    kept = os.path.join(folder, "__pycache__")
    if ending == ".py" and os.path.isdir(kept):
        for each in os.listdir(kept):
            if each.startswith(f"{stem}."):
                remove(os.path.join(kept, each))


def remove(path: str) -> None:
    """Delete a file of the spool, if there is one."""
    if path:
        with suppress(OSError):
            os.unlink(path)


def run_broker(spec_file: str, meet: str, begun: StartedProcess | None) -> None:
    """Serve calls of the functions that a file describes. `meet` is the path of the callers'
    socket, and `begun` the process that runs already.
    """

    async def run() -> None:
        await Broker(spec_file, meet, begun).run()

    asyncio.run(run())
