"""Writes the audit log: a record of each request that changes something, and of each refusal.

Routes need no code for the audit log. The middleware recognises a change by the request's
method, and a refusal by the answer. The store appends the record in the
transaction of the request's first write. For a request that changes something outside of the
database, the record is written before the answer is sent. Routes can describe the change by
`note_change`.

Requests of nodes are recorded only if they are refused. Nodes only report facts, which the server
stores as events of the nodes' jobs.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavvy.api.app_state import AppState
from cavvy.domain.audit import AuditEntry, AuditOutcome
from cavvy.domain.authorization import Principal
from cavvy.domain.values import Struct, replace
from cavvy.store.audit import PENDING
from cavvy.store.base import StoreError

PER_ADDRESS = 20  # maximum records per minute from one address
IN_TOTAL = 200  # maximum records per minute from all addresses together
_WINDOW = timedelta(minutes=1)


class LeftOut(Struct, frozen=True):
    """The number of refused requests from one address that were not recorded one by one."""

    address: str
    count: int


class RefusalLimiter:
    """Counts the refusals of each minute by address."""

    def __init__(self) -> None:
        self._begun: datetime | None = None
        self._admitted: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def admit(self, address: str, now: datetime) -> bool:
        """Return whether to record this refusal in the audit log."""
        if self._begun is None or now - self._begun >= _WINDOW:
            self._begun, self._admitted = now, {}
        mine = self._admitted.get(address, 0)
        if mine < PER_ADDRESS and sum(self._admitted.values()) < IN_TOTAL:
            self._admitted[address] = mine + 1
            return True
        # If there are too many addresses, the rest are counted together, so that memory is bounded.
        key = address if len(self._left_out) < IN_TOTAL or address in self._left_out else ""
        self._left_out[key] = self._left_out.get(key, 0) + 1
        return False

    def take_left_out(self, now: datetime) -> Sequence[LeftOut]:
        """Return the numbers of unrecorded refusals in a minute that has ended. A later call does
        not return these numbers again.
        """
        if not self._left_out or self._begun is None or now - self._begun < _WINDOW:
            return []
        found = [LeftOut(address, count) for address, count in self._left_out.items()]
        self._left_out = {}
        return found


_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST = 300  # maximum characters of a parameter in the path, or of an unknown path
_log = logging.getLogger(__name__)


def note_change(
    request: Request,
    *,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> None:
    """Describe what a request changes. Call this function before the store writes the change.
    Values must not be secret; they are strings, numbers, lists of these, or None.
    """
    request.scope["audit_change"] = (before, after)


def note_reading(request: Request, reading: bool = True) -> None:
    """Mark a request as read-only, although its method permits changes."""
    request.scope["audit_reading"] = reading


def note_project(request: Request, project: str | None) -> None:
    """Name the project of a request, if the request's path does not contain the project."""
    request.scope["audit_project"] = project or ""


def note_refusal(scope: Scope, code: str) -> None:
    """Mark a request as refused with this error code, because the caller lacks rights."""
    scope["audit_refusal"] = code


class AuditMiddleware:
    """Wraps the application and its token check with the audit log."""

    def __init__(self, app: ASGIApp, app_state: AppState) -> None:
        self._app = app
        self._app_state = app_state
        self._limiter = RefusalLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pending = _RequestEntry(scope, self._app_state)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._settle(pending, scope, int(message["status"]))
            await send(message)

        token = PENDING.set(pending)
        try:
            await self._app(scope, receive, watch)
        finally:
            pending.close()
            PENDING.reset(token)

    async def _settle(self, pending: "_RequestEntry", scope: Scope, status: int) -> None:
        """Record a refusal, or a change without a database write. When the store writes a change to
        the database, the store also records the change in the audit log.
        """
        try:
            if status < 400:
                if (entry := pending.claim()) is not None:
                    await self._app_state.store.record(entry)
            elif status in (401, 403) or "audit_refusal" in scope:
                pending.close()  # the write of the refusal must not be recorded as a change
                await self._refuse(pending.describe_refusal(str(status)))
        except StoreError as error:  # the cause may be a full disk; the answer must still be sent
            _log.error("a record of the audit log was not written: %s", error)

    async def _refuse(self, entry: AuditEntry) -> None:
        store = self._app_state.store
        for left_out in self._limiter.take_left_out(entry.at):
            told = replace(
                entry,
                signed_in=False,
                account="",
                token="",
                address=left_out.address,
                action="",
                target={},
                project="",
                code="left-out",
                left_out=left_out.count,
            )
            await store.record(told)
        if self._limiter.admit(entry.address, entry.at):
            await store.record(entry)


class _RequestEntry:
    """The audit-log entry of one request. The entry is created when it is first used, because the
    route and the caller are unknown until then.
    """

    def __init__(self, scope: Scope, app_state: AppState) -> None:
        self._scope = scope
        self._app_state = app_state
        self._open = scope["method"] not in _READING

    def claim(self) -> AuditEntry | None:
        scope = self._scope
        known = isinstance(scope.get("principal"), Principal) and scope.get("route") is not None
        if not self._open or not known or scope.get("audit_reading"):
            return None
        self._open = False
        return self._describe()

    def give_back(self) -> None:
        self._open = True

    def close(self) -> None:
        """Close the entry when the answer is sent: later writes do not belong to the request."""
        self._open = False

    def describe_refusal(self, code: str) -> AuditEntry:
        entry = self._describe()
        told = self._scope.get("audit_refusal", code)
        return replace(entry, outcome=AuditOutcome.REFUSED, code=told, before=None, after=None)

    def _describe(self) -> AuditEntry:
        scope = self._scope
        principal, route = scope.get("principal"), scope.get("route")
        who = principal if isinstance(principal, Principal) else None
        target = {
            name: str(value)[:_LONGEST] for name, value in scope.get("path_params", {}).items()
        }
        before, after = scope.get("audit_change", (None, None))
        path = route.path if route is not None else scope["path"][:_LONGEST]
        return AuditEntry(
            at=self._app_state.now(),
            signed_in=who is not None,
            account=(who and who.account) or "",
            token=who.token.id if who is not None and who.token is not None else "",
            address=scope["client"][0] if scope.get("client") else "",
            action=f"{scope['method']} {path}",
            target=target,
            project=target.get("project") or scope.get("audit_project") or "",
            before=before,
            after=after,
        )
