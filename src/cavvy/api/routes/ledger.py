"""Routes for the ledger: its sums and its entries."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Query
from msgspec.structs import asdict
from pydantic import AwareDatetime

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.views import energy_view
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_query
from cavvy.api.wire import view
from cavvy.client import ledger_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.ledger import LedgerLine
from cavvy.domain.request_bills import TokenUse
from cavvy.store.base import LedgerFilter, ProjectFilter
from cavvy.store.ledger import DIMENSIONS, MONTH, TAGS

router = RouteGroup("costs", prefix="/v1")
_LAST = 2**63 - 1  # the largest number that the databases can store
_MOST_DIMENSIONS = 4


@router.get("/ledger/sums", rule=in_query(Permission.SPENDING))
async def sums(
    app_state: AppState,
    projects: ProjectFilter,
    by: Annotated[
        str,
        Query(
            max_length=400,
            description="Dimensions, separated by commas: "
            f"{', '.join([*DIMENSIONS, MONTH, TAGS])} or tag:NAME.",
        ),
    ] = "job",
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
) -> list[wire.LedgerSumView]:
    """Get the spending in a period, summed by any dimensions."""
    dimensions = _read_dimensions(by)
    which = LedgerFilter(projects=projects, since=since, until=until)
    rows = await app_state.store.sum_ledger(which, dimensions)
    tokens = await app_state.store.meters.sum_tokens(which, dimensions)
    energy = await app_state.store.meters.sum_energy(which, dimensions)
    return [
        wire.LedgerSumView(
            groups=dict(row.groups),
            amount_micros=row.amount.micros,
            discount_micros=row.discount.micros,
            jobs=row.jobs,
            tokens=view_tokens(tokens.get(key, {})),
            energy=energy_view(energy.get(key, ())),
        )
        for row in rows
        for key in [tuple(row.groups[name] for name in dimensions)]
    ]


def view_tokens(uses: Mapping[str, TokenUse]) -> list[wire.TokensView]:
    return [wire.TokensView(model=model, **asdict(uses[model])) for model in sorted(uses)]


def _read_dimensions(by: str) -> list[str]:
    """Raises ApiProblem."""
    names = list(dict.fromkeys(filter(None, by.split(","))))
    known = {*DIMENSIONS, MONTH, TAGS}
    for name in names:
        if name not in known and name.removeprefix("tag:") == name:
            hint = f"use {', '.join(sorted(known))} or tag:NAME"
            raise ApiProblem("invalid-request", f"{name!r} is not a dimension", hint)
    if len(names) > _MOST_DIMENSIONS:
        hint = f"name at most {_MOST_DIMENSIONS} dimensions"
        raise ApiProblem("invalid-request", f"{len(names)} dimensions were named", hint)
    return names


@router.get("/ledger", rule=in_query(Permission.SPENDING))
async def entries(
    app_state: AppState,
    projects: ProjectFilter,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    after: Annotated[int, Query(ge=0, le=_LAST)] = 0,
) -> list[wire.LedgerEntryView]:
    """List the ledger entries that overlap a period, ordered by number."""
    which = LedgerFilter(projects=projects, since=since, until=until)
    store = app_state.store
    lines = await store.ledger_lines(which, after=after, limit=wire.PAGE)
    return [_view(line) for line in lines]


def _view(line: LedgerLine) -> wire.LedgerEntryView:
    entry, subject = line.entry, line.subject
    corrects = None if entry.corrects is None else f"{subject.id}/{entry.rank}/{entry.corrects}"
    given = {**asdict(subject), "id": entry.id, "project": entry.project}
    return view(
        wire.LedgerEntryView,
        entry,
        **given,
        corrects=corrects,
        rate_micros_per_hour=entry.rate.micros_per_hour,
        amount_micros=entry.amount.micros,
    )
