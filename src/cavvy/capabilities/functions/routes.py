"""Routes for deployed apps, and for calls of their functions. The server stores what submits the
jobs of apps; it reads arguments and results only if they are JSON.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate, islice
from typing import Annotated

from fastapi import Header, Path, Query
from msgspec import Raw
from msgspec.json import decode, encode
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import submission
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, name_user, principal_of
from cavvy.api.wire import MIB, read_bytes, reply
from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.call_costs import JobBill, add_up, divide, price_calls
from cavvy.capabilities.functions.dispatcher import explain_full, find_calls, name_call
from cavvy.capabilities.functions.limits import MOST_LIMITS, find_key, name_windows
from cavvy.capabilities.functions.options import MOST_PRIORITY
from cavvy.capabilities.functions.rows import (
    CANCELLED,
    DONE,
    WAITING,
    EndedCall,
    FunctionCallRow,
    FunctionRows,
    StoredPart,
)
from cavvy.capabilities.functions.schema import (
    MOST_STEPS,
    Steps,
    TooManySteps,
    explain_unfit,
    find_faults,
)
from cavvy.capabilities.functions.state.rows import StateRows
from cavvy.capabilities.functions.waits import explain_waits
from cavvy.client.paths import make_key, make_keys
from cavvy.client.wire import SubmitRequest
from cavvy.costs.running import charge_to_now
from cavvy.domain.accounts import Permission
from cavvy.domain.authorization import Verdict, decide
from cavvy.sdk.errors import InvalidArgument
from cavvy.store.base import RowNotFound

router = RouteGroup("apps", prefix="/v1/projects/{project}/apps")
NamePath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=50)]
CallPath = Annotated[str, Path(max_length=32)]
FunctionPath = Annotated[str, Path(max_length=200)]
_MOST = 200  # apps of a project
_MOST_CALLS = 1000  # of a request
_MOST_WAITING = 1_000_000  # calls of an app
_MOST_SENT = 32 * MIB  # of a request with calls, whose arguments are written in base 64
_MOST_ARGUMENTS = 16 * MIB
_MOST_KEY, _MOST_LIMIT_KEY = 200, 256
_ANYTHING = Raw(b"{}")  # the schema of functions that were deployed without one
_MOST_FAULTS = 5
_SMALL, _FEW_STEPS = 64 << 10, 2000  # bytes and steps of a check that needs no thread
# long checks, one at a time, which keep no thread from others
_checks = ThreadPoolExecutor(1, thread_name_prefix="arguments")
_SHOWN = 200  # calls in a list
_MOST_READ = 16 * MIB  # bytes of results in an answer
_LOOK_S = 2.0  # between two looks at calls for which a request waits, if nothing tells of them
_MOST_PARTS = 50
_MOST_JOBS = 20  # whose bills are read for a list
_FEW_WAITS = 3  # calls of a request that are told what they wait for
_MOST_BRIEF = 500  # letters of an error in a list
# keys of a task that no job of functions has; some need more rights than to run a job
_REFUSED = (
    "edge", "service", "array", "sweep", "search", "after", "group", "schedule", "session",
    "machine", "pool", "webhooks",
)  # fmt: skip
_MISSING: dict[type[Exception], str] = {RowNotFound: "app-not-found"}


@router.get("", rule=in_path(Permission.VIEW))
async def list_apps(
    request: Request, app_state: AppState, project: ProjectPath
) -> list[wire.DeployedApp]:
    """List the deployed apps of a project."""
    by_name: dict[str, list[StoredPart]] = {}
    for each in await _rows(app_state).parts(project):
        by_name.setdefault(each.app, []).append(each)
    return [_view(request, name, parts) for name, parts in by_name.items()]


@router.get("/{name}", rule=in_path(Permission.VIEW), errors=("app-not-found",))
async def read_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> wire.DeployedApp:
    """Get a deployed app."""
    return _view(request, name, await _find(app_state, project, name))


@router.put(
    "/{name}",
    rule=in_path(Permission.RUN),
    errors=("invalid-task", "snapshot-missing"),
    limit=1 << 20,
)
async def put_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.AppAsk
) -> wire.AppReplaced:
    """Deploy a revision of an app, which replaces the one before."""
    if not 0 < len(ask.parts) <= _MOST_PARTS:
        raise ApiProblem("invalid-request", f"an app has 1 to {_MOST_PARTS} parts")
    for part in ask.parts:
        await _check_part(app_state, project, name, part)
    rows = _rows(app_state)
    known = await rows.revisions(project)
    before = known.get(name)
    if before is None and len(known) >= _MOST:
        raise ApiProblem(
            "invalid-request",
            f"{project} has {_MOST} apps",
            "delete one of them, by DELETE …/apps/NAME",
        )
    note_change(
        request,
        before={"revision": before} if before is not None else None,
        after={"revision": ask.revision},
    )
    user, now = name_user(request, ask.user), app_state.now()
    account = principal_of(request).account or ""
    replaced = await rows.put(
        project,
        name,
        [
            StoredPart(
                project=project,
                app=name,
                part=part,
                revision=ask.revision,
                snapshot=each.snapshot,
                document=encode(each).decode(),
                job="",
                user=user,
                updated_at=now,
                account=account,
            )
            for part, each in enumerate(ask.parts)
        ],
    )
    find_calls(app_state).look(project, name)
    return wire.AppReplaced(replaced=replaced)


@router.delete("/{name}", rule=in_path(Permission.RUN), errors=("app-not-found",), when=_MISSING)
async def delete_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> None:
    """Remove a deployed app with its calls. Its jobs go on until they are stopped."""
    before = await _find(app_state, project, name)
    note_change(request, before={"revision": before[0].revision}, after=None)
    await _rows(app_state).delete(project, name)
    await find_calls(app_state).rows.delete(project, name)
    await find_calls(app_state).counts.delete(project, name)
    with suppress(RowNotFound):  # what its limits know of earlier calls
        await StateRows(*app_state.store.database).delete(project, "dict", name_windows(name))
    find_calls(app_state).look(project, name)


@router.post(
    "/{name}/claim",
    rule=in_path(Permission.RUN),
    errors=("app-not-found", "app-changed"),
    when=_MISSING,
)
async def claim(
    app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.NextJobAsk
) -> wire.NextJob:
    """Get the ID of an app's next job, which the caller submits. All who ask when the same job has
    ended get the same ID, so an app has one job.
    """
    job = await _rows(app_state).claim(project, name, ask, make_key())
    if not job:
        raise ApiProblem("app-changed", f"the app {name} has no revision {ask.revision} any more")
    return wire.NextJob(job=job)


@router.get("/{name}/calls", rule=in_path(Permission.VIEW), errors=("app-not-found",))
async def list_calls(
    app_state: AppState,
    project: ProjectPath,
    name: NamePath,
    traces: bool = True,
    limit: Annotated[int, Query(ge=1, le=_SHOWN)] = _SHOWN,
) -> list[wire.CallSummary]:
    """List the newest calls of an app that the server keeps. Without `traces`, those that failed
    have no traceback."""
    await _find(app_state, project, name)
    listed = await find_calls(app_state).rows.list_brief(project, name, limit)
    waiting = [(each.id, each.function, each.why) for each in listed if each.state == WAITING]
    whys = await explain_waits(app_state, project, name, waiting)
    costs = await _price(app_state, [(each.id, each.job, each.share_us) for each in listed])
    return [
        wire.CallSummary(
            id=each.id,
            function=each.function,
            state=each.state,
            user=each.user,
            end=_read_end(each.answer) if traces else _leave_trace(each.answer),
            created_at=each.created_at,
            ended_at=each.ended_at,
            why=whys.get(each.id, ""),
            job=each.job,
            cost_micros=costs.get(each.id),
        )
        for each in listed
    ]


async def _price(app_state: AppState, calls: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """Return the cost of calls in the newest jobs: see `price_calls`."""
    jobs = sorted({job for _, job, _ in calls if job}, reverse=True)[:_MOST_JOBS]
    bills = {each: await _add_up(app_state, each) for each in jobs}
    return price_calls(calls, bills)


async def _add_up(app_state: AppState, job: str) -> JobBill:
    """Return the bill of a job until now, also if the ledger's rows of it are older."""
    charges = await app_state.store.charges(job)
    attempts = await app_state.store.attempts(job)
    return add_up(charge_to_now(attempts, charges, app_state.now()))


@router.get("/{name}/costs", rule=in_path(Permission.VIEW), errors=("app-not-found",))
async def list_costs(
    app_state: AppState, project: ProjectPath, name: NamePath
) -> list[wire.JobCosts]:
    """List how the bills of an app's newest jobs are divided among their calls."""
    await _find(app_state, project, name)
    shares = await find_calls(app_state).rows.sum_shares(project, name, _MOST_JOBS)
    told = await find_calls(app_state).counts.find_shared([job for job, _, _ in shares])
    found = []
    for job, calls, share_us in shares:
        bill = await _add_up(app_state, job)
        shared_us = max(share_us, round(told.get(job, 0.0) * 1e6))
        parts = divide(bill, share_us, shared_us)
        found.append(
            wire.JobCosts(
                job=job,
                calls=calls,
                bill_micros=parts.bill,
                kept_micros=parts.kept,
                others_micros=parts.others,
                idle_micros=parts.rest,
            )
        )
    return found


@router.post(
    "/{name}/calls",
    rule=in_path(Permission.RUN),
    errors=("app-not-found", "function-not-found"),
    limit=_MOST_SENT,
)
async def add_calls(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.CallsAsk
) -> list[wire.CallTaken]:
    """Call functions of an app, and keep the calls until they have results."""
    if not 0 < len(ask.calls) <= _MOST_CALLS:
        raise ApiProblem("invalid-request", f"send 1 to {_MOST_CALLS} calls")
    parts = await _find(app_state, project, name)
    known = {each.name: each for each in _list_functions(parts)}
    for each in ask.calls:
        _check_call(name, known, each)
    return await _store(request, app_state, project, name, ask, known)


@router.post("/{name}/calls/read", rule=in_path(Permission.RUN), errors=("app-not-found",))
async def read_calls(
    app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.CallsReadAsk
) -> wire.CallsRead:
    """Get the results of calls."""
    if not 0 < len(ask.ids) <= _MOST_CALLS or not 0 <= ask.wait_s <= wire.CALL_WAIT_S:
        told = f"send 1 to {_MOST_CALLS} IDs, and `wait_s` from 0 to {wire.CALL_WAIT_S:g}"
        raise ApiProblem("invalid-request", told)
    return await _wait_for(app_state, project, name, ask.ids, ask.wait_s)


@router.delete(
    "/{name}/calls/{call}", rule=in_path(Permission.RUN), errors=("function-call-not-found",)
)
async def cancel_call(
    app_state: AppState, project: ProjectPath, name: NamePath, call: CallPath
) -> None:
    """Cancel a call, unless it has ended."""
    calls = find_calls(app_state)
    if not await calls.rows.get(project, name, [call]):
        raise ApiProblem("function-call-not-found", f"the app {name} has no call {call}")
    end = wire.CallEnd(kind="CallCancelled", text="the call was cancelled")
    await calls.store_ended([EndedCall(call, CANCELLED, encode(end).decode())])
    calls.look(project, name)


@router.get(
    "/{name}/functions/{function}",
    rule=in_path(Permission.VIEW),
    errors=("app-not-found", "function-not-found"),
)
async def read_function(
    app_state: AppState, project: ProjectPath, name: NamePath, function: FunctionPath
) -> wire.FunctionView:
    """Get the JSON schemas of a function."""
    found = await _find_function(app_state, project, name, function)
    return wire.FunctionView(
        app=name,
        function=function,
        generator=found.generator,
        arguments=found.arguments or _ANYTHING,
        result=found.result or _ANYTHING,
    )


@router.post(
    "/{name}/functions/{function}",
    rule=in_path(Permission.RUN),
    answer=wire.FunctionAnswer,
    sends=True,
    errors=("app-not-found", "function-not-found", "invalid-arguments", "call-failed"),
)
async def call_function(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: NamePath,
    function: FunctionPath,
    key: Annotated[str, Header(alias="Idempotency-Key", max_length=200)] = "",
    wait_s: Annotated[float, Query(ge=0, le=wire.CALL_WAIT_S)] = wire.CALL_WAIT_S,
    consent: bool = False,
    priority: Annotated[int | None, Query(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = None,
) -> Response:
    """Call a function with arguments of JSON.

    The body is an object with the arguments by name. Without a result in time, the status is 202,
    and the answer has the ID of the call. A repeated request with the same `Idempotency-Key` is the
    same call. An exception of the function is `call-failed`.
    """
    found = await _find_function(app_state, project, name, function)
    body = await read_bytes(request, _MOST_ARGUMENTS)
    text = await _read_arguments(found, body)
    call = wire.CallAsk(
        function=function,
        body=text,
        json=True,
        key=key or make_key(),
        priority=priority,
        limits=_make_keys(found, text) if found.limits else (),
        turn="route",
    )
    _check_call(name, {function: found}, call)
    asked = wire.CallsAsk(calls=[call], consent=consent)
    (taken,) = await _store(request, app_state, project, name, asked, {function: found})
    done = await _wait_for(app_state, project, name, [taken.id], wait_s)
    if not done.ended:
        return reply(wire.FunctionAnswer(call=taken.id, state=WAITING, result=Raw(b"null")), 202)
    ended = done.ended[0]
    if ended.state != DONE or not ended.json:
        told = ended.end.text or ended.state
        if not ended.json:
            told = "a call with this key was made from Python: its result is a pickle"
        raise ApiProblem(
            "call-failed", f"{ended.end.type or ended.end.kind or 'CallFailed'}: {told}"
        )
    return reply(
        wire.FunctionAnswer(
            call=taken.id, state=ended.state, result=Raw(ended.result), end=ended.end
        )
    )


def _make_keys(function: wire.DeployedFunction, text: bytes) -> tuple[str, ...]:
    """Return the keys of the function's limits for these arguments. Raises ApiProblem."""
    defaults = decode(function.arguments or _ANYTHING).get("properties", {})
    given = {name: each["default"] for name, each in defaults.items() if "default" in each}
    given |= decode(text)["kwargs"]
    try:
        return tuple(find_key(function.name, paths, given) for paths in function.limits)
    except InvalidArgument as error:
        raise ApiProblem("invalid-arguments", error.message) from None


async def _read_arguments(function: wire.DeployedFunction, body: bytes) -> bytes:
    """Return the checked arguments of a call as a worker reads them. Raises ApiProblem."""
    if len(body) <= _SMALL:
        try:
            return _check_arguments(function, body, _FEW_STEPS)
        except TooManySteps:
            pass
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_checks, _check_arguments, function, body, MOST_STEPS)
    except TooManySteps:
        raise ApiProblem(
            "invalid-arguments",
            f"{function.name}: the arguments have too many values for a check against its schema",
            "send fewer in a call, or write them to a bucket and send where they are",
        ) from None


def _check_arguments(function: wire.DeployedFunction, body: bytes, steps: int) -> bytes:
    """Raises ApiProblem, TooManySteps."""
    try:
        given = decode(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiProblem("invalid-arguments", f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiProblem("invalid-arguments", "the body must be an object with the arguments")
    found = find_faults(given, decode(function.arguments or _ANYTHING), steps=Steps(steps))
    if faults := list(islice(found, _MOST_FAULTS)):
        raise ApiProblem("invalid-arguments", f"{function.name}: {'; '.join(faults)}")
    return encode({"args": [], "kwargs": given})


def _check_call(app: str, known: Mapping[str, wire.DeployedFunction], call: wire.CallAsk) -> None:
    """Raise ApiProblem if a call cannot be kept."""
    if call.function not in known:
        raise _miss_function(app, call.function, known)
    if known[call.function].generator:
        raise ApiProblem(
            "invalid-request",
            f"{call.function} is a generator, whose values the server does not keep",
            "iterate over `remote(...)` in a Python program, or return a list",
        )
    if abs(call.priority or 0) > MOST_PRIORITY or len(call.limits) > MOST_LIMITS:
        told = f"a priority is from -{MOST_PRIORITY} to {MOST_PRIORITY}, and a function has "
        raise ApiProblem("invalid-request", f"{told}{MOST_LIMITS} limits at most")
    if len(call.turn) > _MOST_KEY or any(len(each) > _MOST_LIMIT_KEY for each in call.limits):
        raise ApiProblem("invalid-request", f"keys of limits have {_MOST_LIMIT_KEY} characters")
    if len(call.key) > _MOST_KEY or "\0" in call.key:
        raise ApiProblem(
            "invalid-request", f"a key has at most {_MOST_KEY} characters, without NUL"
        )


def _miss_function(app: str, function: str, known: Iterable[str]) -> ApiProblem:
    told = f"the app {app} has no function {function}"
    return ApiProblem("function-not-found", told, f"it has {', '.join(known)}")


async def _find_function(
    app_state: AppState, project: str, name: str, function: str
) -> wire.DeployedFunction:
    """Raises ApiProblem."""
    listed = _list_functions(await _find(app_state, project, name))
    for each in listed:
        if each.name == function:
            return each
    raise _miss_function(name, function, [each.name for each in listed])


def _list_functions(parts: Sequence[StoredPart]) -> list[wire.DeployedFunction]:
    documents = [decode(each.document, type=wire.AppPartAsk) for each in parts]
    return [each for document in documents for each in document.functions]


async def _store(
    request: Request,
    app_state: AppState,
    project: str,
    name: str,
    ask: wire.CallsAsk,
    known: Mapping[str, wire.DeployedFunction],
) -> list[wire.CallTaken]:
    """Store calls, and let them run. Raises ApiProblem if too many calls of the app wait."""
    calls = find_calls(app_state)
    if await calls.rows.count(project, name) + len(ask.calls) > _MOST_WAITING:
        raise ApiProblem(
            "invalid-request",
            f"{_MOST_WAITING:,} calls of {name} wait already",
            "try again when some have ended, or cancel some",
        )
    size = sum(len(each.body) for each in ask.calls)
    if size > await calls.find_room(project, size):
        raise ApiProblem("invalid-request", explain_full(project))
    await app_state.store.archive.check(project)
    user, now = name_user(request, ask.user), app_state.now()
    account = principal_of(request).account
    made = make_keys(len(ask.calls))
    stored = [
        FunctionCallRow(
            id=call_id,
            project=project,
            app=name,
            function=each.function,
            once_key=each.key or call_id,
            state=WAITING,
            head=_write_head(each),
            body=each.body,
            answer="",
            result=b"",
            account=account,
            user=user,
            consent=int(ask.consent),
            created_at=now,
            ended_at=None,
            precedence=-(known[each.function].priority if each.priority is None else each.priority),
            caller=_name_caller(account, user, each.turn),
            limit_keys=encode(each.limits).decode() if any(each.limits) else "",
        )
        for call_id, each in zip(made, ask.calls, strict=True)
    ]
    taken = [wire.CallTaken(id=each, created=new) for each, new in await calls.rows.add(stored)]
    calls.note_kept(project, size)
    calls.look(project, name)
    return taken


def _write_head(call: wire.CallAsk) -> str:
    """Return what the broker must know of a call."""
    head: dict[str, object] = {"enc": "json", "reply": "json"} if call.json else {}
    if call.priority is not None:
        head["priority"] = call.priority
    if call.limits:
        head["limits"] = call.limits
    return encode(head).decode()


def _name_caller(account: str | None, user: str, turn: str) -> str:
    """Return a name of who takes turns with others."""
    return sha256(encode([account, user, turn])).hexdigest()[:16]


async def _wait_for(
    app_state: AppState, project: str, name: str, ids: Sequence[str], wait_s: float
) -> wire.CallsRead:
    """Return those of the calls that have ended, or the first one that ends in this time."""
    calls = find_calls(app_state)
    until = time.monotonic() + wait_s
    while True:
        left_s = max(until - time.monotonic(), 0)
        with app_state.watch.listen([name_call(each) for each in ids], left_s) as listener:
            known = {
                call: (state, size)
                for call, state, size in await calls.rows.list_states(project, name, ids)
            }
            missing = [each for each in ids if each not in known]
            over = [each for each in ids if each in known and known[each][0] != WAITING]
            if over or missing or left_s <= 0 or app_state.watch.closed:
                break
            await listener.wait(_LOOK_S)
    wait = [each for each in ids if each in known and known[each][0] == WAITING][:_FEW_WAITS]
    told = await calls.rows.list_whys(project, name, wait)
    waiting = await explain_waits(app_state, project, name, told)
    sizes = accumulate(known[each][1] for each in over)
    sent = [each for each, size in zip(over, sizes, strict=True) if size <= _MOST_READ] or over[:1]
    rows = await calls.rows.get(project, name, sent)
    costs = await _price(app_state, [(each.id, each.job, each.share_us) for each in rows])
    ended = [
        wire.CallResult(
            id=each.id,
            function=each.function,
            state=each.state,
            json="json" in each.head,
            end=_read_end(each.answer),
            result=each.result,
            cost_micros=costs.get(each.id),
        )
        for each in rows
    ]
    return wire.CallsRead(ended=ended, missing=missing, waiting=waiting)


def _read_end(answer: str) -> wire.CallEnd:
    return decode(answer, type=wire.CallEnd) if answer else wire.CallEnd()


def _leave_trace(answer: str) -> wire.CallEnd:
    """Return how a call has ended in a few words."""
    end = _read_end(answer)
    return replace(end, trace="", text=end.text[:_MOST_BRIEF])


async def _check_part(app_state: AppState, project: str, name: str, part: wire.AppPartAsk) -> None:
    """Raise ApiProblem if this is more than a job of functions: who calls them submits it, with
    rights that the one who deploys may not have.
    """
    for each in part.functions:
        for schema in (each.arguments, each.result):
            if unfit := explain_unfit(decode(schema or _ANYTHING)):
                raise ApiProblem("invalid-request", f"the schema of {each.name}: {unfit}")
    ask = SubmitRequest(text=part.text, path=name, origin=part.origin)
    origin = submission.read_origin(ask, part.text)
    if (origin.snapshot or "") != part.snapshot:
        raise ApiProblem("invalid-request", "`snapshot` is another than that of `origin`")
    task = await submission.read_task(app_state, project, ask, part.text, origin, app_state.now())
    if refused := [f"`{each}`" for each in _REFUSED if getattr(task, each)]:
        raise ApiProblem(
            "invalid-task",
            f"{name}: {', '.join(refused)}: functions run in plain jobs",
            "remove it from what is deployed; `cavvy run` submits such a task",
        )
    await submission.check_snapshot(app_state, project, origin.snapshot)


def _rows(app_state: AppState) -> FunctionRows:
    return FunctionRows(*app_state.store.database)


async def _find(app_state: AppState, project: str, name: str) -> Sequence[StoredPart]:
    """Raises ApiProblem."""
    if not (found := await _rows(app_state).parts(project, name)):
        raise ApiProblem("app-not-found", f"project {project} has no app {name}")
    return found


def _view(request: Request, name: str, parts: Sequence[StoredPart]) -> wire.DeployedApp:
    principal = principal_of(request)
    project = str(request.path_params["project"])
    runs = decide(principal, Permission.RUN, project) is Verdict.ALLOWED
    shown = [_view_part(each, principal.account or "", runs=runs) for each in parts]
    return wire.DeployedApp(name=name, parts=shown)


def _view_part(row: StoredPart, account: str, *, runs: bool) -> wire.AppPart:
    """Return the part as this account sees it, which has not consented to what others have. Who may
    not run jobs learns no key of the meeting place.
    """
    ask = decode(row.document, type=wire.AppPartAsk)
    return wire.AppPart(
        part=row.part,
        revision=row.revision,
        text=ask.text,
        origin=ask.origin,
        snapshot=row.snapshot,
        meet=ask.meet if runs else "",
        functions=ask.functions,
        consent=ask.consent and account == row.account,
        job=row.job,
        user=row.user,
        updated_at=row.updated_at,
    )
