"""The tokens of language models by client key, model and day, next to the ledger's entries."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import add

from cavvy.domain.ledger import EntryKind
from cavvy.domain.request_bills import TokenUse, combine_tokens
from cavvy.store.base import LedgerFilter
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession
from cavvy.store.ledger import DIMENSIONS, filter_subjects, make_group

_NUMBERS = ("prompt", "cached", "completion", "estimated")
_ADD = (
    f"INSERT INTO token_uses (subject, model, day, {', '.join(_NUMBERS)}) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (subject, model, day) DO UPDATE SET "
    f"{', '.join(f'{name} = token_uses.{name} + excluded.{name}' for name in _NUMBERS)}"
)
# entries of a key's requests have this kind
_COLUMNS = {**DIMENSIONS, "kind": f"'{EntryKind.REQUEST}'", "subject": "t.subject"}
Group = tuple[str, ...]


def add_tokens(
    session: DatabaseSession, subject: str, at: datetime, uses: Mapping[str, TokenUse]
) -> None:
    """Add the tokens of a subject by model, in the open transaction."""
    day = to_micros(_day_of(at))
    for model, use in uses.items():
        numbers = [getattr(use, name) for name in _NUMBERS]
        session.run(_ADD, (subject, model, day, *numbers))


def sum_tokens(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Mapping[Group, Mapping[str, TokenUse]]:
    """Return the tokens by model of the whole days that overlap the period, for each combination of
    values of the dimensions `by`, as `ledger.add_up` names them.
    """
    columns = [name for name in by if name in _COLUMNS]
    keys = ", ".join([*(_COLUMNS[name] for name in columns), "s.tags", "t.day", "t.model"])
    conditions, values = filter_subjects(session, which, "s.project")
    since = 0 if which.since is None else to_micros(_day_of(which.since))
    until = 2**62 if which.until is None else to_micros(which.until)
    sums = ", ".join(f"CAST(SUM(t.{name}) AS BIGINT)" for name in _NUMBERS)
    sql = (
        f"SELECT {keys}, {sums} FROM token_uses t JOIN ledger_subjects s ON s.id = t.subject "
        f"WHERE {' AND '.join(conditions)} AND t.day >= ? AND t.day < ? "
        f"GROUP BY {', '.join(_group(columns))}"
    )
    found: defaultdict[Group, dict[str, TokenUse]] = defaultdict(dict)
    for row in session.run(sql, (*values, since, until)).fetchall():
        stored = dict(zip(columns, row, strict=False))
        tags, day, model, *numbers = row[len(columns) :]
        use = TokenUse(**dict(zip(_NUMBERS, numbers, strict=True)))
        key = make_group(by, stored, tags, to_time(day))
        found[key] = combine_tokens(add, found[key], {model: use})
    return found


def _group(columns: Sequence[str]) -> list[str]:
    names = [_COLUMNS[name] for name in columns if name != "kind"]
    return [*names, "s.tags", "t.day", "t.model"]


def _day_of(at: datetime) -> datetime:
    at = at.astimezone(UTC)
    return at - timedelta(
        hours=at.hour, minutes=at.minute, seconds=at.second, microseconds=at.microsecond
    )
