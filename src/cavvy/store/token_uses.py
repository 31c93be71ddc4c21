"""The tokens of language models by client key, model and day, and the energy that nodes measured by
attempt and day, next to the ledger's entries."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import add
from typing import Any

from cavvy.domain.figures import FigureBlock
from cavvy.domain.ledger import EnergyUse, EntryKind
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
_COLUMNS = {**DIMENSIONS, "subject": "t.subject"}
ENERGY = "work_energy_j"  # the figure that agents report: joules of a minute
# of one node and minute: 50 kW, which no node with 16 accelerators reaches; an agent may lie
_MOST_JOULES = 3_000_000
_DAY_MINUTES = 24 * 60
_MICROS = 60_000_000  # of a minute
_SPEND = (
    "INSERT INTO energy_uses (subject, day, joules) VALUES (?, ?, ?) "
    "ON CONFLICT (subject, day) DO UPDATE SET joules = energy_uses.joules + excluded.joules"
)
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
    found: defaultdict[Group, dict[str, TokenUse]] = defaultdict(dict)
    # entries of a key's requests have this kind
    table = ("token_uses", EntryKind.REQUEST, ("t.model",), _NUMBERS)
    for key, (model, *numbers) in _sum_days(session, *table, which, by):
        use = TokenUse(**dict(zip(_NUMBERS, numbers, strict=True)))
        found[key] = combine_tokens(add, found[key], {model: use})
    return found


def add_energy(session: DatabaseSession, block: FigureBlock) -> None:
    """Add the energy of a new block of one minute to its attempt, in the open transaction."""
    if found := block.columns.get(ENERGY):
        joules = round(min(max(0.0, found.mean[0]), _MOST_JOULES))
        day = block.minutes[0] // _DAY_MINUTES * _DAY_MINUTES * _MICROS
        session.run(_SPEND, (block.attempt_id, day, joules))


def sum_energy(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Mapping[Group, Sequence[EnergyUse]]:
    """Return the energy by provider and region of the whole days that overlap the period, for each
    combination of values of the dimensions `by`, as `ledger.add_up` names them. The energy of a
    replica belongs to none of its keys.
    """
    found: defaultdict[Group, list[EnergyUse]] = defaultdict(list)
    table = ("energy_uses", EntryKind.NODE, ("s.provider", "s.region"), ("joules",))
    for key, (provider, region, joules) in _sum_days(session, *table, which, by):
        found[key].append(EnergyUse(provider=provider, region=region, joules=joules))
    return found


def read_energy(session: DatabaseSession, attempts: Collection[str]) -> Mapping[str, int]:
    """Return the joules of each of these attempts that has measured any."""
    if not attempts:
        return {}
    sql = (
        "SELECT subject, CAST(SUM(joules) AS BIGINT) FROM energy_uses "
        f"WHERE subject IN ({', '.join('?' * len(attempts))}) GROUP BY subject"
    )
    return {subject: joules for subject, joules in session.run(sql, [*attempts]).fetchall()}


def _sum_days(
    session: DatabaseSession,
    table: str,
    kind: EntryKind,
    more: Sequence[str],
    numbers: Sequence[str],
    which: LedgerFilter,
    by: Sequence[str],
) -> Iterator[tuple[Group, Sequence[Any]]]:
    """Yield the groups of the rows of a table by subject and day, which have the kind `kind`, with
    the columns `more` and the sums of `numbers`. A group may come several times.
    """
    columns = [name for name in by if name in _COLUMNS]
    names = [*(_COLUMNS[name] for name in columns if name != "kind"), "s.tags", "t.day", *more]
    shown = [f"'{kind}'" if name == "kind" else _COLUMNS[name] for name in columns]
    keys = ", ".join([*shown, "s.tags", "t.day", *more])
    conditions, values = filter_subjects(session, which, "s.project")
    since = 0 if which.since is None else to_micros(_day_of(which.since))
    until = 2**62 if which.until is None else to_micros(which.until)
    sums = ", ".join(f"CAST(SUM(t.{name}) AS BIGINT)" for name in numbers)
    sql = (
        f"SELECT {keys}, {sums} FROM {table} t JOIN ledger_subjects s ON s.id = t.subject "
        f"WHERE {' AND '.join(conditions)} AND t.day >= ? AND t.day < ? "
        f"GROUP BY {', '.join(dict.fromkeys(names))}"
    )
    for row in session.run(sql, (*values, since, until)).fetchall():
        stored = dict(zip(columns, row, strict=False))
        tags, day, *rest = row[len(columns) :]
        yield make_group(by, stored, tags, to_time(day)), rest


def _day_of(at: datetime) -> datetime:
    at = at.astimezone(UTC)
    return at - timedelta(
        hours=at.hour, minutes=at.minute, seconds=at.second, microseconds=at.microsecond
    )
