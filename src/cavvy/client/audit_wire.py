"""Response types of the audit-log route, and a client function that calls this route."""

from collections.abc import Iterator
from datetime import datetime

from cavvy.client.client import ApiClient
from cavvy.client.paths import query
from cavvy.client.wire import Answer

_PAGE = 1000


class AuditLogRow(Answer, frozen=True, kw_only=True):
    """A record of the audit log. `text` is the whole record in JSON, and `hash` is the SHA-256 of
    `text`. All fields except `text` and `hash` are copies of fields in `text`.
    """

    number: int
    at: datetime
    account: str
    project: str
    outcome: str
    hash: str
    text: str


class AuditLogPage(Answer, frozen=True, kw_only=True):
    """One page of records of the audit log, ordered by number."""

    records: list[AuditLogRow]


def read_newest(client: ApiClient, limit: int, **filters: object) -> list[AuditLogRow]:
    """Return the newest records, ordered by number. `filters` become parameters of the request."""
    return _read(client, limit=limit, newest="true", **filters)


def read_all(client: ApiClient, **filters: object) -> Iterator[AuditLogRow]:
    """Yield all records, ordered by number. Filters are parameters of the route."""
    after = 0
    while page := _read(client, limit=_PAGE, after=after, **filters):
        yield from page
        after = page[-1].number


def _read(client: ApiClient, **parameters: object) -> list[AuditLogRow]:
    given = {name: value for name, value in parameters.items() if value is not None}
    return client.ask(f"/v1/audit-log{query(**given)}", AuditLogPage).records
