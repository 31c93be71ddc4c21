"""The audit log: who changed what, newest first."""

from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.account_wire import AuditLogRow, read_newest
from cavvy.console.pages.page import Page, list_projects, try_part

_SHOWN = 300
_OWN = ("number", "at", "account", "project", "outcome", "prior")  # in columns, or only for checks


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The newest records of a project or an account. Raises ApiError."""
    asked = request.query_params
    given = {name: text for name in ("project", "account") if (text := asked.get(name, "").strip())}
    found = try_part(lambda: read_newest(client, _SHOWN, **given))
    return Page(
        "Audit log",
        "audit.html",
        {
            "found": found,
            "rows": [(each, _list_facts(each)) for each in reversed(found.value or [])],
            "given": {"project": "", "account": "", **given},
            "projects": list_projects(client, request),
            "most": _SHOWN,
        },
    )


def _list_facts(row: AuditLogRow) -> list[tuple[str, str]]:
    """Return what the record says besides the columns of the table."""
    try:
        record: dict[str, Any] = msgspec.json.decode(row.text)
    except msgspec.DecodeError:
        return [("text", row.text)]
    return [
        (name, value if isinstance(value, str) else msgspec.json.encode(value).decode())
        for name, value in record.items()
        if name not in _OWN and value not in (None, "", [], {})
    ]
