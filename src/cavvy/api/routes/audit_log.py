"""The route that reads the audit log. No route changes or removes records of the audit log."""

from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import filter_projects, in_query
from cavvy.api.wire import PositionQuery, view
from cavvy.client import account_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.audit import AuditOutcome

router = RouteGroup("audit log")


@router.get("/v1/audit-log", rule=in_query(Permission.AUDIT))
async def read_log(
    request: Request,
    app_state: AppState,
    project: Annotated[str | None, Query(max_length=63)] = None,
    account: Annotated[str | None, Query(max_length=63)] = None,
    outcome: AuditOutcome | None = None,
    since: AwareDatetime | None = None,
    after: PositionQuery = 0,
    newest: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> wire.AuditLogPage:
    """Get records of changes and refusals in the caller's projects, ordered by number: the oldest
    records after `after` or, with `newest`, the newest records. The hashes can be checked only if
    all records are visible.
    """
    found = await app_state.store.audit_records(
        filter_projects(request, Permission.AUDIT, project),
        account=account,
        outcome=outcome,
        since=since,
        after=after,
        limit=limit,
        newest=newest,
    )
    return wire.AuditLogPage(records=[view(wire.AuditLogRow, each) for each in found])
