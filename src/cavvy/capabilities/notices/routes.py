"""Routes for the targets of notices; the API never returns their addresses."""

import asyncio
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, name_user, require
from cavvy.api.wire import view
from cavvy.capabilities.notices import wire
from cavvy.capabilities.notices.events import list_events
from cavvy.capabilities.notices.messages import WrongAddress, make_message
from cavvy.capabilities.notices.notice import Notice, NoticeChannel, NoticeEvent, NoticeTarget
from cavvy.capabilities.notices.rows import SqlNotices
from cavvy.capabilities.notices.sender import NOTICES, NoticeSender, notice_key
from cavvy.domain.accounts import Permission
from cavvy.domain.values import replace
from cavvy.store.base import RowNotFound

router = RouteGroup("notices", prefix="/v1/projects/{project}/notices")
NamePath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
_LONGEST = 2000  # characters of an address
_MOST = 50  # targets of a project; each event is stored once for each of them
_MISSING: dict[type[Exception], str] = {RowNotFound: "notice-not-found"}


@router.get("", rule=in_path(Permission.RUN))
async def list_targets(app_state: AppState, project: ProjectPath) -> list[wire.NoticeRow]:
    """List where a project's notices are sent."""
    found = await _rows(app_state).targets(project)
    return [view(wire.NoticeRow, each, events=list(each.events)) for each in found]


@router.put("/{name}", rule=in_path(Permission.RUN))
async def put(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.NoticeAsk
) -> None:
    """Set where notices are sent. Members may do this for their own jobs; for all jobs, the caller
    must be an operator.
    """
    _require_own(request, project, ask.user)
    known = {each.name: each for each in await _rows(app_state).targets(project)}
    before = known.get(name)
    if before is not None:
        _require_own(request, project, before.user)
    elif len(known) >= _MOST:
        raise ApiProblem(
            "invalid-request", f"{project} has {_MOST} targets", "remove one: `cavvy notify rm`"
        )
    channel, events = _check(app_state, project, name, ask)
    target = NoticeTarget(
        project=project,
        name=name,
        channel=channel,
        sealed=b"",
        events=events,
        user=ask.user,
        updated_at=app_state.now(),
    )
    note_change(request, before=_facts(before), after=_facts(target))
    sealed = await asyncio.to_thread(app_state.sealer.seal, project, target.bound_name, ask.address)
    await _rows(app_state).put(replace(target, sealed=sealed))
    app_state.control_plane.hint(NOTICES)
    app_state.control_plane.hint(notice_key(project, name))


@router.delete("/{name}", rule=in_path(Permission.RUN), errors=("notice-not-found",), when=_MISSING)
async def delete(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> None:
    """Send no more notices to a target, and delete those that wait."""
    target = await _rows(app_state).target(project, name)
    _require_own(request, project, target.user)
    note_change(request, before=_facts(target), after=None)
    await _rows(app_state).delete(project, name)


@router.post(
    "/{name}/test", rule=in_path(Permission.RUN), errors=("notice-not-found",), when=_MISSING
)
async def send_test(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> wire.NoticeTest:
    """Send a test message to a target, and wait for the answer of the receiver."""
    target = await _rows(app_state).target(project, name)
    _require_own(request, project, target.user)
    sender = app_state.control_plane.find(NoticeSender)
    if sender is None:
        return wire.NoticeTest(problem="this server sends no notices")
    return wire.NoticeTest(problem=await sender.test(target, name_user(request, "")))


def _rows(app_state: AppState) -> SqlNotices:
    return SqlNotices(*app_state.store.database)


def _require_own(request: Request, project: str, user: str) -> None:
    """Raise ApiProblem unless the caller may decide about the notices of this user, or of all users
    if `user` is empty.
    """
    if not user or user != name_user(request, ""):
        require(request, Permission.OPERATE, project)


def _check(
    app_state: AppState, project: str, name: str, ask: wire.NoticeAsk
) -> tuple[NoticeChannel, tuple[str, ...]]:
    """Raises ApiProblem."""
    if max(len(ask.address), len(ask.user)) > _LONGEST:
        raise ApiProblem("invalid-request", f"a text has more than {_LONGEST} characters")
    try:
        channel = NoticeChannel(ask.channel)
    except ValueError as error:
        raise ApiProblem(
            "invalid-request",
            f"{str(error)[:200]}: expected a channel of {', '.join(NoticeChannel)}",
        ) from None
    known, events = list_events(), tuple(dict.fromkeys(ask.events))
    if not events or not known.keys() >= set(events):
        wrong = "".join(f"{each!r:.80} is no event; " for each in events if each not in known)
        raise ApiProblem("invalid-request", f"{wrong[:400]}expected {', '.join(known)}")
    now = app_state.now()
    trial = Notice(
        project=project, target=name, event=NoticeEvent.DONE, text="", at=now, due_at=now
    )
    try:
        make_message(channel, ask.address, [trial])
    except WrongAddress as error:
        raise ApiProblem("invalid-request", f"the address for {channel}: {error}") from None
    return channel, events


def _facts(target: NoticeTarget | None) -> dict[str, object] | None:
    """Return the facts about a target for the audit log, which must not contain its address."""
    if target is None:
        return None
    return {"channel": target.channel, "events": list(target.events), "user": target.user}
