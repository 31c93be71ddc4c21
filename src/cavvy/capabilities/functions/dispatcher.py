"""Runs the calls that the control plane keeps: it starts the jobs of their apps, connects to the
brokers in these jobs as any caller, sends the calls, and stores the results.

The server loads neither arguments nor results. A call is stored before it is sent, and its result
before the broker may forget it. A server that comes back sends again what has no result; the broker
knows by a call's ID that it runs or has ended already.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

from msgspec.json import decode, encode

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.exec_carrier import ExecCarrier
from cavvy.api.routes import submission
from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.counts.rows import CountRows
from cavvy.capabilities.functions.frames import (
    MOST_BYTES,
    CallFrames,
    Head,
    WrongFrame,
    clean,
    pack,
)
from cavvy.capabilities.functions.meeting import dial_here, is_own_place
from cavvy.capabilities.functions.rows import (
    DONE,
    FAILED,
    WAITING,
    CallerOfCall,
    CallRows,
    EndedCall,
    FunctionCallRow,
    FunctionRows,
    StoredPart,
    WaitingCall,
)
from cavvy.capabilities.functions.state.rows import StateRows
from cavvy.capabilities.functions.tunnel import reach_broker
from cavvy.client.paths import make_key
from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelCarrier, TunnelLost
from cavvy.client.wire import SubmitRequest
from cavvy.control.parts import ControlParts, StandingReconciler
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase, JobRecord
from cavvy.server.parts import ServerParts
from cavvy.spec.problems import SpecError
from cavvy.store.base import RowNotFound, StoreUnusable

MOST_RESULT = 16 << 20  # bytes of a result
MOST_HELD = 64 << 20  # bytes of long results, and of arguments, that are in memory for an app
MOST_KEPT = 10 << 30  # bytes of arguments and results of a project
_COUNT_S, _COUNT_AGAIN_S = 300.0, 5.0  # between two counts of them, and if there is no room
_PREFIX = "functions/"  # of keys, before the project and the app
_WINDOW = 512  # calls of a function that were sent, have no result, and no limit holds back
_PER_KEY = 2  # calls of a key that its limit holds back in the broker; the others stay here
_SCAN, _SCAN_SHARE = 2 * _WINDOW, 20  # calls that are looked at without a pause, and that pause
_SMALL_BODY = 8 << 10  # bytes of arguments that a broker has in memory of a call with a limit
_LOOK_S = 1.0  # between two looks at the calls, if nothing tells of new ones
_STAY_S = 20.0  # for which a connection stays without calls
_HERE_S, _DIAL_S = 3.0, 0.02  # as callers do: `jobs.FunctionJob`
_PAUSE_S = 0.5  # before another try
_DIAL_PAUSE_S = 30.0  # the longest before another try of a broker that did not answer
_dials = ThreadPoolExecutor(4, thread_name_prefix="dials")  # which take 2 s if nothing answers
_MOST_JOBS = 3  # that end before they take calls
_RECEIVE = 1 << 18
_LONGEST_S = 1e9  # of a call
_MOST_WHY = 300  # characters of what a call waits for
_KEPT = timedelta(days=7)
_log = logging.getLogger(__name__)


class CannotRun(Exception):
    """Raised if the calls of a part cannot run, and why."""


class FunctionCalls(StandingReconciler):
    """The calls of all apps that this server runs."""

    waits_outside = True

    def __init__(self, parts: ControlParts) -> None:
        self._parts, self._server = parts, parts.find(ServerParts)
        self.rows = CallRows(*parts.store.database)
        self.apps = FunctionRows(*parts.store.database)
        self.counts = CountRows(*parts.store.database)
        self._state: AppState | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, tuple[float, int]] = {}  # bytes of a project, and when counted

    def open(self, app_state: object) -> None:
        assert isinstance(app_state, AppState)
        self._state = app_state

    def owns(self, key: str) -> bool:
        return key.startswith(_PREFIX)

    async def unfinished(self) -> Sequence[str]:
        return [f"{_PREFIX}{project}/{app}" for project, app in await self.rows.list_apps()]

    async def reconcile(self, key: str) -> timedelta | None:
        if self._state is None:
            return timedelta(seconds=_LOOK_S)
        task = self._tasks.get(key)
        if task is not None and not task.done():
            self._state.watch.wake(key)
            return None
        _, project, app = key.split("/")
        if await self.rows.list_waiting(project, app, 1):
            self._tasks[key] = asyncio.create_task(AppCalls(self, self._state, key).run())
            return timedelta(seconds=_STAY_S)  # the task may have ended with an error
        self._tasks.pop(key, None)
        return None

    async def run(self) -> None:
        """Keep the tasks until this one is cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            for each in self._tasks.values():
                each.cancel()

    async def sweep(self) -> None:
        now = self._parts.clock.now()
        await self.rows.expire(now - _KEPT)
        await StateRows(*self._parts.store.database).sweep(now)
        await self.counts.sweep(now)

    async def is_needed(self) -> bool:
        return bool(await self.rows.list_apps())

    def look(self, project: str, app: str) -> None:
        """Look at the calls of an app now: there is another one, or one was cancelled."""
        key = f"{_PREFIX}{project}/{app}"
        if self._parts.owns_key(key):
            self._parts.hint(key)
        else:
            self._parts.announce(key)

    async def store_ended(self, ended: Sequence[EndedCall]) -> None:
        """Store how calls have ended, and tell who waits."""
        await self.rows.end(ended, self._parts.clock.now())
        if self._state is not None:
            self._state.watch.wake(*(name_call(each.id) for each in ended))

    async def find_room(self, project: str, wanted: int) -> int:
        """Return how many bytes more the kept calls of a project may have: if it is less than
        `wanted`, as they are stored now. Other servers count for themselves, so that together they
        may store somewhat more.
        """
        now = asyncio.get_running_loop().time()
        at, used = self._kept.get(project, (-_COUNT_S, 0))
        age_s = now - at
        if age_s >= _COUNT_S or (age_s >= _COUNT_AGAIN_S and used + wanted > MOST_KEPT):
            used = await self.rows.count_bytes(project)
            self._kept[project] = now, used
        return MOST_KEPT - used

    def note_kept(self, project: str, size: int) -> None:
        """Note that calls of a project have these bytes more."""
        if project in self._kept:
            at, used = self._kept[project]
            self._kept[project] = at, used + size

    def open_node(self, job: str, gang: str) -> NodeTunnel:
        """Return an unopened tunnel to the node of a job."""
        server, agents = self._server, self._parts.agents
        assert server is not None

        async def open_carrier(
            heard: Callable[[bytes], None], over: Callable[[str], None]
        ) -> TunnelCarrier:
            exec_id = server.peers.make_id()
            session = server.execs.start(exec_id, job, gang, 0, [], session=True)
            agents.notify(gang)
            return ExecCarrier(server.execs, session, server.peers, heard=heard, over=over)

        return NodeTunnel(open_carrier)


def find_calls(app_state: AppState) -> FunctionCalls:
    """Return what runs the calls of this server."""
    found = app_state.control_plane.find(FunctionCalls)
    assert found is not None  # it is made from the same description as the routes
    return found


def name_call(call: str) -> str:
    """Return the key by which requests wait for a call."""
    return f"function-call/{call}"


class AppCalls:
    """The calls of one app, while there are some."""

    def __init__(self, owner: FunctionCalls, state: AppState, key: str) -> None:
        self._owner, self._state, self._key = owner, state, key
        _, self.project, self.app = key.split("/")
        self._dial_at = self._dial_pause_s = 0.0  # of brokers that let the server wait
        self._ended = 0  # jobs in a row that took no call
        self._new: set[str] = set()  # jobs that were submitted here and took no call yet
        self._sent: set[str] = set()  # calls that a broker has
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}  # by revision and part

    async def run(self) -> None:
        """Run calls until none waits."""
        try:
            while not self._state.watch.closed:
                with self._state.watch.listen([self._key], _LOOK_S) as listener:
                    try:
                        if not await self._start_parts():
                            return
                    except StoreUnusable as error:
                        self._say("calls are read again", error)
                    await listener.wait()
        finally:
            for each in self._tasks.values():
                each.cancel()

    def _say(self, what: str, error: Exception) -> None:
        _log.info(what, extra={"app": self._key, "problem": str(error)})

    async def _start_parts(self) -> bool:
        """Start what runs the waiting calls. Return False if there is nothing to do."""
        self._tasks = {each: task for each, task in self._tasks.items() if not task.done()}
        wanted = set(await self._owner.rows.list_functions(self.project, self.app))
        if not wanted:
            return bool(self._tasks)
        parts = await self._owner.apps.parts(self.project, self.app)
        for part in parts:
            document = decode(part.document, type=wire.AppPartAsk)
            names = wanted & {each.name for each in document.functions}
            wanted -= names
            key = part.revision, part.part
            if names and key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._run_part(part, names))
        if wanted:
            known = f"has no function {', '.join(sorted(wanted))}" if parts else "was removed"
            await self._fail(wanted, f"the app {self.app} {known}")
        return True

    async def _run_part(self, part: StoredPart, names: set[str]) -> None:
        """Connect to the broker of a part, and run calls there until none waits or it is lost."""
        try:
            place = await self._connect(part, names)
            if place is None:
                await asyncio.sleep(_PAUSE_S)
                return
            reader, writer, others, job = place
            document = decode(part.document, type=wire.AppPartAsk)
            served = {each.name for each in document.functions}
            session = BrokerSession(
                *(self._owner, self._state, self._key, served, self._sent, reader, writer, job)
            )
            try:
                self._ended = 0
                self._new.clear()
                await session.run()
            finally:
                writer.close()
                for each in others:
                    each.cancel()
        except CannotRun as error:
            await self._fail(names, str(error))
        except (OSError, WrongFrame, TunnelLost, RemoteError, StoreUnusable) as error:
            self._say("calls are sent again", error)
            await asyncio.sleep(_PAUSE_S)
        except Exception:  # noqa: BLE001 - the other calls go on
            _log.exception("the calls of %s", self._key)
            await asyncio.sleep(_PAUSE_S)
        finally:
            self._state.watch.wake(self._key)

    async def _fail(self, names: set[str], text: str, kind: str = "AppBroken") -> None:
        """Let the waiting calls of these functions fail."""
        end = encode(wire.CallEnd(kind=kind, text=text)).decode()
        while True:
            rows = self._owner.rows
            waiting = await rows.list_waiting(self.project, self.app, _WINDOW, names)
            ended = [EndedCall(call, FAILED, end) for call, _ in waiting]
            if not ended:
                return
            await self._owner.store_ended(ended)

    async def _connect(self, part: StoredPart, names: set[str]) -> "BrokerPlace | None":
        """Return a connection to the broker; None if the job has ended or the app was deployed
        again. Raises CannotRun.
        """
        job = await self._find_job(part, names)
        meet = decode(part.document, type=wire.AppPartAsk).meet
        loop, running_at = asyncio.get_running_loop(), 0.0
        while job is not None:
            if is_own_place(meet) and loop.time() >= self._dial_at:
                try:
                    made = await loop.run_in_executor(_dials, dial_here, meet)
                    self._dial_pause_s = 0.0
                    return BrokerPlace(
                        *await asyncio.open_unix_connection(sock=made), others=[], job=job.id
                    )
                except TimeoutError:  # the job is the app's: it may keep threads from others
                    self._dial_pause_s = min(2 * self._dial_pause_s + _PAUSE_S, _DIAL_PAUSE_S)
                    self._dial_at = loop.time() + self._dial_pause_s
                except OSError:
                    pass
            found = await self._state.store.find_jobs([job.id])
            if not found or found[0].phase in JOB_ENDS:
                self._ended += 1
                new = job.id in self._new  # others may have taken calls before
                failed = new and bool(found) and found[0].phase is JobPhase.FAILED
                if self._ended >= _MOST_JOBS or failed:
                    self._ended = 0
                    raise CannotRun(
                        f"the job of the app {self.app} has ended before it took a call; "
                        f"`cavvy logs {job.id}` shows why"
                    )
                return None
            if found[0].phase is JobPhase.RUNNING:
                running_at = running_at or loop.time()
            if running_at and loop.time() - running_at > _HERE_S:
                return await self._connect_there(job)
            await asyncio.sleep(_DIAL_S)
        return None

    async def _connect_there(self, job: JobRecord) -> "BrokerPlace | None":
        for attempt in await self._state.store.attempts(job.id):
            if attempt.phase is AttemptPhase.RUNNING:
                opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                tunnel = self._owner.open_node(job.id, attempt.gang)
                carry = asyncio.create_task(reach_broker(tunnel, opened.set_result))
                await asyncio.wait([carry, opened], return_when=asyncio.FIRST_COMPLETED)
                if carry.done():
                    await carry
                    return None
                found = await asyncio.open_unix_connection(sock=opened.result())
                return BrokerPlace(*found, others=[carry], job=job.id)
        await asyncio.sleep(_PAUSE_S)
        return None

    async def _find_job(self, part: StoredPart, names: set[str]) -> JobRecord | None:
        """Return the job of a part; submit it, unless it waits or runs. Return None if the app was
        deployed again meanwhile, or if no call waits any more. Raises CannotRun.
        """
        job = part.job
        found = await self._state.store.find_jobs([job]) if job else []
        if found and found[0].phase not in JOB_ENDS:
            return found[0]
        if found or not job or not submission.is_of_now(self._state, job):
            ask = wire.NextJobAsk(part=part.part, revision=part.revision, ended=job)
            try:
                job = await self._owner.apps.claim(self.project, self.app, ask, make_key())
            except RowNotFound:
                return None
            if not job:
                return None
        try:
            if (made := await self._submit(part, job, names)) is None:
                return None
            now = await self._owner.apps.parts(self.project, self.app)
            if any(each.job == job for each in now):
                self._new.add(job)
                return made
            # the app was deployed again or removed, and the one who did so could not stop this job
            await self._state.control_plane.jobs.stop(self.project, job, reason="it was replaced")
            return None
        except (ApiProblem, SpecError) as error:
            hint = getattr(error, "hint", "")
            raise CannotRun(f"{error}\n{hint}".strip()) from error

    async def _submit(self, part: StoredPart, job: str, names: set[str]) -> JobRecord | None:
        """Submit the job in the name of who called first, who has agreed to its cost by this call,
        or by deploying the app. Return None if no call waits. Raises ApiProblem, SpecError.
        """
        document = decode(part.document, type=wire.AppPartAsk)
        caller = await self._find_caller(part, names)
        if caller is None:
            return None
        agreed = caller.consent or (
            document.consent and part.account is not None and part.account == (caller.account or "")
        )
        ask = SubmitRequest(
            text=document.text,
            path=self.app,
            origin=document.origin,
            user=caller.user,
            consent=agreed,
        )
        made, _ = await submission.submit_task(
            self._state, self.project, ask, job, caller.account or "", lambda *_: None
        )
        assert isinstance(made, JobRecord)  # no array, as `_REFUSED` of the routes says
        return made

    async def _find_caller(self, part: StoredPart, names: set[str]) -> CallerOfCall | None:
        """Return the first call whose caller has agreed to the costs, or else the first call, of
        callers who may run jobs; None if there is none any more."""
        waiting = await self._owner.rows.list_waiting(self.project, self.app, _WINDOW, names)
        ids = sorted(call for call, _ in waiting)
        calls = await self._drop_barred(
            await self._owner.rows.list_callers(self.project, self.app, ids)
        )
        agreed = [each for each in calls if each.consent or (each.account or "") == part.account]
        return next(iter([*agreed, *calls]), None)

    async def _drop_barred(self, calls: Sequence[CallerOfCall]) -> Sequence[CallerOfCall]:
        """Return the calls of those who may still run jobs in the project; let the others fail,
        since a job is submitted in the name of who called.
        """
        oldest: dict[str | None, CallerOfCall] = {}
        for each in calls:
            oldest.setdefault(each.account, each)
        barred: dict[str | None, str] = {}
        for account, first in oldest.items():
            try:
                await submission.check_runner(
                    self._state, self.project, account or "", first.created_at
                )
            except ApiProblem as error:
                end = wire.CallEnd(kind="CallFailed", text=str(error))
                barred[account] = encode(end).decode()
        if barred:
            ended = [each for each in calls if each.account in barred]
            await self._owner.store_ended(
                [EndedCall(each.id, FAILED, barred[each.account]) for each in ended]
            )
        return [each for each in calls if each.account not in barred]


class BrokerPlace(NamedTuple):
    """A connection to the broker in a job, with what keeps it up."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    others: list["asyncio.Task[None]"]
    job: str


class LimitedKey(NamedTuple):
    """A function, and the keys of its limits for a call."""

    function: str
    keys: str


class LongResult(NamedTuple):
    """What a broker says of a result that lies in a file of the node."""

    size: int
    ran_s: float | None
    share_s: float | None


class BrokerSession:
    """A connection to a broker: sends calls and stores their results until none waits for long."""

    def __init__(
        self,
        owner: FunctionCalls,
        state: AppState,
        key: str,
        served: set[str],
        sent: set[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        job: str = "",
    ) -> None:
        self._owner, self._state, self._key, self._job = owner, state, key, job
        _, self._project, self._app = key.split("/")
        self._served, self._sent = served, sent
        self._reader, self._writer = reader, writer
        self._number = 0
        self._open: dict[int, str] = {}  # calls that were sent, by their number here
        self._json: set[int] = set()
        self._numbers: dict[str, int] = {}
        self._fetched: dict[int, bytearray] = {}
        self._long: dict[int, LongResult] = {}  # those that are being read
        self._waiting: dict[int, LongResult] = {}  # those that are read later
        self._held: dict[int, int] = {}  # bytes of long results that are not stored yet
        self._ended: list[tuple[int, EndedCall]] = []
        self._news, self._results = asyncio.Event(), asyncio.Event()
        self._more, self._woken = True, False
        self._flight: Counter[str] = Counter()  # calls of each function that no limit holds back
        self._called: dict[int, LimitedKey] = {}  # the function and the keys of each call
        self._held_back: set[int] = set()  # calls that wait for a limit in the broker
        self._held_keys: Counter[LimitedKey] = Counter()
        self._scan_at = self._cancel_at = 0.0  # no earlier than this
        self._whys: dict[str, str] = {}  # what calls wait for, as far as it is not stored

    async def run(self) -> None:
        """Raises OSError, WrongFrame."""
        works = (self._send(), self._read(), self._store(), self._follow())
        tasks = [asyncio.create_task(each) for each in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                if each.done():
                    await each
        finally:
            for each in tasks:
                each.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await self._put_ended()
            self._sent -= set(self._numbers)

    async def _follow(self) -> None:
        """Learn that there are more calls, or that some were cancelled."""
        while not self._state.watch.closed:
            with self._state.watch.listen([self._key], _LOOK_S) as listener:
                self._woken = await listener.wait() or self._woken
            self._more = True
            self._news.set()
            if self._whys:
                whys, self._whys = self._whys, {}
                await self._owner.rows.tell(whys)

    async def _send(self) -> None:
        """Send calls as others end; return if none waits for long."""
        loop = asyncio.get_running_loop()
        used_at, check = loop.time(), False
        while True:
            woken, self._woken = self._woken, False
            self._news.clear()
            check = check or woken
            if check and self._numbers and loop.time() >= self._cancel_at:
                began, check = loop.time(), False
                await self._cancel()
                if len(self._numbers) > _WINDOW:
                    self._cancel_at = loop.time() + _SCAN_SHARE * (loop.time() - began)
            self._more = self._more or woken
            if self._more and loop.time() >= self._scan_at and self._has_room(woken):
                self._more = await self._send_more()
            if self._numbers:
                used_at = loop.time()
            elif loop.time() - used_at > _STAY_S:
                return
            await self._news.wait()

    def _has_room(self, woken: bool) -> bool:
        least = _WINDOW if woken else _WINDOW // 2
        return any(self._flight[each] < least for each in self._served)

    async def _send_more(self) -> bool:
        """Send calls that wait, and return whether there may be more."""
        loop = asyncio.get_running_loop()
        began, looked, more = loop.time(), 0, False
        new: list[WaitingCall] = []
        for function in self._served:
            room, after = _WINDOW - self._flight[function], None
            while room > 0:
                listed = await self._owner.rows.list_next(
                    self._project, self._app, function, after, _WINDOW
                )
                fit = [each for each in listed if self._may_send(each)]
                new += fit[:room]
                room -= len(fit)
                looked += len(listed)
                if len(listed) < _WINDOW:
                    break
                after = listed[-1].place
            more = more or room <= 0
        if looked > _SCAN:
            self._scan_at = loop.time() + _SCAN_SHARE * (loop.time() - began)
        return await self._send_some(new) or more

    def _may_send(self, call: WaitingCall) -> bool:
        """Return whether a call was not sent, and no limit of its keys holds others back."""
        if call.id in self._sent:
            return False
        return self._held_keys[LimitedKey(call.function, call.limit_keys)] < _PER_KEY

    async def _send_some(self, new: Sequence[WaitingCall]) -> bool:
        """Send calls, and return whether some are left, since their arguments are long."""
        ordered = sorted(new, key=lambda each: each.place)
        sizes = accumulate(each.size for each in ordered)
        ids = [each.id for each, size in zip(ordered, sizes, strict=True) if size <= MOST_HELD]
        ids = ids or [each.id for each in ordered[:1]]
        if not ids:
            return False
        self._sent.update(ids)
        self._numbers |= dict.fromkeys(ids, 0)
        places = {each.id: each.place for each in ordered}
        found = await self._owner.rows.get(self._project, self._app, ids)
        for call in sorted(found, key=lambda each: places[each.id]):
            self._send_one(call)
        await self._writer.drain()
        return len(ids) < len(new)

    def _send_one(self, call: FunctionCallRow) -> None:
        self._number += 1
        number = self._number
        self._open[number], self._numbers[call.id] = call.id, number
        self._called[number] = LimitedKey(call.function, call.limit_keys)
        self._flight[call.function] += 1
        told = decode(call.head)
        if told.get("reply") == "json":
            self._json.add(number)
        head = {"op": "call", "id": number, "fn": call.function, "key": call.id, **told}
        head["turn"] = call.caller
        body = call.body
        if len(body) > (_SMALL_BODY if call.limit_keys else MOST_BYTES):
            for at in range(0, len(body), MOST_BYTES):
                piece = body[at : at + MOST_BYTES]
                self._writer.write(pack({"op": "put", "id": number}, piece))
            body = b""
        self._writer.write(pack(head, body))

    async def _cancel(self) -> None:
        """Cancel the calls that were cancelled meanwhile."""
        ids = [*self._numbers]
        known = await self._owner.rows.list_states(self._project, self._app, ids)
        going = {call for call, state, _ in known if state == WAITING}
        for call in ids:  # also those that were deleted with their app
            if call not in going and (number := self._numbers.get(call)) in self._open:
                self._writer.write(pack({"op": "cancel", "id": number}))

    async def _read(self) -> None:
        frames = CallFrames()
        while data := await self._reader.read(_RECEIVE):
            for head, body in frames.feed(data):
                try:
                    self._hear(head, body)
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise WrongFrame(f"a frame of the broker: {error!r}") from error
        raise ConnectionResetError("the broker has ended")

    def _hear(self, head: Head, body: bytes) -> None:
        op, number = head["op"], int(head.get("id", 0))
        if len(body) > MOST_BYTES:
            raise WrongFrame("a body is longer than a broker sends")
        if number not in self._open:
            self._note_states(head)
            return
        if op == "piece":
            self._take_piece(number, body, more=bool(head["more"]))
        elif op == "done" and head.get("file"):
            self._await_long(number, head)
        elif op in ("done", "failed"):
            self._end(number, head, body)
        elif op == "waits":
            self._hold(number)
        elif op == "part":
            text = "a generator has many results: iterate over `remote` in a Python program"
            self._writer.write(pack({"op": "cancel", "id": number}))
            self._end(number, {"op": "failed", "kind": "CallFailed", "text": text}, b"")

    def _await_long(self, number: int, head: Head) -> None:
        """Take what the broker says of a result that lies in a file. Raises WrongFrame."""
        if number in self._long or number in self._waiting:
            raise WrongFrame("a call has ended twice")
        if (size := int(head["size"])) < 0:
            raise WrongFrame(f"a result of {size} bytes")
        if size > MOST_RESULT:
            text = f"the result has {size:,} bytes, and at most {MOST_RESULT:,} "
            text += "are kept: write it to a volume or a bucket, and return where"
            self._end(number, {"op": "failed", "kind": "NotSendable", "text": text}, b"")
            return
        share_s = read_seconds(head, "share_s")
        self._waiting[number] = LongResult(size, read_seconds(head), share_s)
        self._fetch_more()

    def _note_states(self, head: Head) -> None:
        """Take what the broker says of calls that have no result."""
        if head["op"] == "states":
            for number, why in head["of"]:
                if number in self._open:
                    self._whys[self._open[number]] = clean(why)[:_MOST_WHY]

    def _take_piece(self, number: int, piece: bytes, *, more: bool) -> None:
        """Take a part of a long result. Raises WrongFrame."""
        found = self._fetched[number]
        found += piece
        if len(found) > self._long[number].size:
            raise WrongFrame("a result is longer than was said")
        if not more:
            long = self._long[number]
            told = {"op": "done", "ran_s": long.ran_s, "share_s": long.share_s}
            self._end(number, told, bytes(found))

    def _hold(self, number: int) -> None:
        """Note that a call waits for a limit, so that others are sent meanwhile."""
        if number not in self._held_back:
            called = self._called[number]
            self._held_back.add(number)
            self._held_keys[called] += 1
            self._flight[called.function] -= 1
            self._more = True
            self._news.set()

    def _forget(self, number: int) -> None:
        """Count a call no more, whose result is stored."""
        called = self._called.pop(number)
        if number not in self._held_back:
            self._flight[called.function] -= 1
            return
        self._held_back.discard(number)
        self._more = True
        self._held_keys[called] -= 1
        if not self._held_keys[called]:
            del self._held_keys[called]

    def _fetch_more(self) -> None:
        """Ask for results that lie in files of the node, as many as memory is meant for."""
        for number, long in [*self._waiting.items()]:
            if self._held and sum(self._held.values()) + long.size > MOST_HELD:
                return
            self._long[number], self._fetched[number] = self._waiting.pop(number), bytearray()
            self._held[number] = long.size
            self._writer.write(pack({"op": "fetch", "id": number}))

    def _end(self, number: int, head: Head, body: bytes) -> None:
        """Note how a call has ended."""
        end = wire.CallEnd(ran_s=read_seconds(head))
        state = DONE
        if head["op"] == "failed":
            state = FAILED
            end = wire.CallEnd(
                kind=clean(head.get("kind", "error"))[:50],
                type=clean(head.get("type", ""))[:200],
                text=clean(head.get("text", ""))[:20_000],
                trace=clean(head.get("trace", ""))[:50_000],
                ran_s=end.ran_s,
            )
        elif number in self._json and not is_json(body):
            state, body = FAILED, b""
            end = wire.CallEnd(kind="CallFailed", text="the result is no JSON", ran_s=end.ran_s)
        self._fetched.pop(number, None)
        self._long.pop(number, None)
        self._waiting.pop(number, None)
        call = self._open.pop(number)
        self._whys.pop(call, None)
        share_us = round((read_seconds(head, "share_s") or 0) * 1e6)
        ended = EndedCall(call, state, encode(end).decode(), body, self._job, share_us)
        self._ended.append((number, ended))
        self._results.set()

    async def _store(self) -> None:
        """Store results together, and confirm them."""
        while True:
            await self._results.wait()
            self._results.clear()
            while self._ended:
                await self._put_ended()

    async def _put_ended(self) -> None:
        ended, self._ended = self._ended[:_WINDOW], self._ended[_WINDOW:]
        if not ended:
            return
        try:
            stored = await self._leave_out([each for _, each in ended])
            await self._owner.store_ended(stored)
        except BaseException:
            self._ended = [*ended, *self._ended]
            raise
        self._owner.note_kept(self._project, sum(len(each.result) for each in stored))
        for number, each in ended:
            self._numbers.pop(each.id, None)
            self._sent.discard(each.id)
            self._json.discard(number)
            self._held.pop(number, None)
            self._forget(number)
            self._writer.write(pack({"op": "confirm", "id": number}))
        self._fetch_more()
        self._news.set()

    async def _leave_out(self, ended: list[EndedCall]) -> list[EndedCall]:
        """Return how calls have ended, without the results that the project has no room for."""
        size = sum(len(each.result) for each in ended)
        left = await self._owner.find_room(self._project, size) if size else 0
        stored = []
        for each in ended:
            left -= len(each.result)
            if left < 0 and each.result:
                left += len(each.result)
                end = wire.CallEnd(kind="NotSendable", text=explain_full(self._project))
                told = encode(end).decode()
                stored.append(each._replace(state=FAILED, answer=told, result=b""))
            else:
                stored.append(each)
        return stored


def explain_full(project: str) -> str:
    """Return why no more bytes of calls are kept."""
    return (
        f"the arguments and results of the kept calls of project {project} may have {MOST_KEPT:,} "
        "bytes: write long values to a volume or a bucket, or remove an app "
        "whose results are read; results of ended calls are removed after seven days"
    )


def read_seconds(head: Head, name: str = "ran_s") -> float | None:
    """Return how long a call ran, or another time, if the broker says it."""
    found = head.get(name)
    return found if isinstance(found, int | float) and 0 <= found < _LONGEST_S else None


def is_json(data: bytes) -> bool:
    """Return whether these bytes are a value of JSON, as all readers accept it."""
    try:
        decode(data)
    except (ValueError, RecursionError):
        return False
    return True
