"""The route that reads the audit log. No route changes or removes records of the audit log."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.openapi import document
from cavvy.api.rules import filter_projects, in_query
from cavvy.api.wire import PositionQuery, reply, view
from cavvy.client import audit_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.audit import AuditOutcome

router = APIRouter(tags=["audit log"])


@router.get(
    "/v1/audit-log",
    **document(
        "Get records of changes and refusals in the caller's projects, ordered by number: the "
        "oldest records after `after` or, with `newest`, the newest records. The hashes can be "
        "checked only if all records are visible.",
        rule=in_query(Permission.AUDIT),
        answer=wire.AuditLogPage,
    ),
)
async def read_log(
    request: Request,
    project: Annotated[str | None, Query(max_length=63)] = None,
    account: Annotated[str | None, Query(max_length=63)] = None,
    outcome: AuditOutcome | None = None,
    since: AwareDatetime | None = None,
    after: PositionQuery = 0,
    newest: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    found = await app_state_of(request).store.audit_records(
        filter_projects(request, Permission.AUDIT, project),
        account=account,
        outcome=outcome,
        since=since,
        after=after,
        limit=limit,
        newest=newest,
    )
    return reply(wire.AuditLogPage(records=[view(wire.AuditLogRow, each) for each in found]))
