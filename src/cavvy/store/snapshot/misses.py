"""Finds near misses, which are rows that fail only one constraint. For each constraint, the rows
that are closest to meeting the constraint come first.
"""

import sqlite3
from collections.abc import Iterator, Sequence

from cavvy.catalog.fit import ELSEWHERE, memory_bounds, relative_gap
from cavvy.catalog.query import Constraint
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.values import replace
from cavvy.store.snapshot.layout import PURCHASE_NUMBERS
from cavvy.store.snapshot.query import (
    NeedFilters,
    OfferRow,
    RowSelection,
    ShapeCondition,
    replace_condition,
    walk,
)

# distance, failed constraint, and the rows that fail the constraint by this distance
_Group = tuple[float, Constraint, RowSelection]


def nearest(
    connection: sqlite3.Connection, need: ResourceSpec, filters: NeedFilters, wanted: int
) -> Iterator[tuple[Constraint, OfferRow]]:
    """Yield the `wanted` nearest misses, at most one per instance type and constraint. If two
    misses are equally near, the cheaper offer comes first.
    """
    found: list[tuple[float, OfferRow, Constraint]] = []
    for distance, constraint, selection in sorted(
        _groups(connection, need, filters), key=lambda group: group[0]
    ):
        if len(found) >= wanted and distance > found[wanted - 1][0]:
            break
        found += _take(connection, need, constraint, selection, distance, wanted)
        found.sort(key=lambda item: (item[0], _order(item[1])))
    for _, row, constraint in found[:wanted]:
        yield constraint, row


def _take(
    connection: sqlite3.Connection,
    need: ResourceSpec,
    constraint: Constraint,
    selection: RowSelection,
    distance: float,
    wanted: int,
) -> list[tuple[float, OfferRow, Constraint]]:
    seen: set[tuple[str, str]] = set()
    taken: list[tuple[float, OfferRow, Constraint]] = []
    for row in walk(connection, selection):
        key = (row.provider, row.instance_type)
        if key in seen:
            continue
        seen.add(key)
        if constraint is Constraint.PRICE and need.max_rate is not None:
            distance = relative_gap(row.rate, None, need.max_rate.micros_per_hour or 1)
        taken.append((distance, row, constraint))
        if len(taken) >= wanted:
            break
    return taken


def _groups(
    connection: sqlite3.Connection, need: ResourceSpec, filters: NeedFilters
) -> Iterator[_Group]:
    """Yield all rows that fail only one constraint. The rows of a group miss this constraint by the
    same distance. For the constraint PRICE, the distance of a group is a lower bound.
    """
    fitting = filters.fitting()
    if filters.max_rate is not None:
        yield 0.0, Constraint.PRICE, replace(fitting, max_rate=None, above_rate=filters.max_rate)
    if filters.places is not None:
        yield ELSEWHERE, Constraint.REGION, replace(fitting, outside=True)
    other = {Purchase.ON_DEMAND, Purchase.SPOT}.difference(filters.allowed)
    if other:
        numbers = tuple(PURCHASE_NUMBERS[purchase] for purchase in other)
        yield ELSEWHERE, Constraint.PURCHASE, replace(fitting, purchases=numbers)
    if filters.packs:
        for (constraint, distance), packs in filters.packs.near.items():
            yield distance, constraint, replace(fitting, packs=packs)
    for condition in filters.conditions:
        if condition.constraint is Constraint.INSTANCE:
            continue  # if the user names an instance type, another type is no near miss
        yield from _condition_groups(connection, need, filters, condition)


def _condition_groups(
    connection: sqlite3.Connection,
    need: ResourceSpec,
    filters: NeedFilters,
    condition: ShapeCondition,
) -> Iterator[_Group]:
    fitting = filters.fitting()
    failing = replace(
        fitting,
        conditions=replace_condition(filters, condition, f"NOT {condition.sql}", condition.values),
    )
    if not condition.columns:
        yield ELSEWHERE, condition.constraint, failing
        return
    shapes, values = failing.shapes_sql()
    columns = ", ".join(condition.columns)
    same = " AND ".join(f"{column} = ?" for column in condition.columns)
    for facts in connection.execute(
        f"SELECT DISTINCT {columns} FROM shape WHERE {shapes}", values
    ).fetchall():
        conditions = replace_condition(filters, condition, same, facts)
        yield (
            _gap(need, condition.constraint, *facts),
            condition.constraint,
            replace(fitting, conditions=conditions),
        )


def _gap(need: ResourceSpec, constraint: Constraint, fact: float, cpus: float = 0) -> float:
    """Return the relative difference between the value `fact` and the nearest value that the
    constraint permits, computed as in `catalog/fit`.
    """
    match constraint:
        case Constraint.CPUS:
            return relative_gap(fact, need.cpus_min, need.cpus_max)
        case Constraint.MEMORY:
            return relative_gap(*memory_bounds(need, int(fact), cpus))
        case Constraint.DISK:
            return relative_gap(fact, need.disk_gib, None)
        case _:
            return relative_gap(fact, need.network.min_mbps if need.network else None, None)


def _order(row: OfferRow) -> Sequence[int | str]:
    """Return the sort key of a row, equal to the sort key of `catalog/fit.order`."""
    return (
        row.rate,
        row.provider,
        row.region,
        row.zone or "",
        row.instance_type,
        row.accelerator_count,
        row.purchase,
    )
