"""Builds and runs the SQL that matches offers with a task's requirements. The module filters rows,
counts the rows that fail, and reads the matching rows in the order of their prices.

Finds near misses, which are rows that fail only one constraint. For each constraint, the rows that
are closest to meeting the constraint come first.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cavvy.catalog.fit import ELSEWHERE, Constraint, accelerator_fit, memory_bounds, relative_gap
from cavvy.catalog.networks import has_fabric
from cavvy.catalog.regions import region_of_zone, wished_place
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import NetworkNeed, ResourceSpec
from cavvy.domain.values import Struct, field, replace
from cavvy.store.snapshot.layout import PURCHASE_COLUMNS, PURCHASE_NUMBERS

# Measured times in microseconds per row: to skip a row because of its shape, to skip a row because
# of its price, to sort the key of a row, and to build a row for the caller.
_BY_SHAPE_US, _BY_RATE_US, _SORT_US, _BUILD_US = 0.1, 0.25, 0.05, 2.5
# Measured share of all rows that cost less than the first machine of a requested size.
_CHEAPER = 0.2
_FABRIC = "has_fabric"  # the name of `has_fabric` as an SQL function
_ASKED = 60  # how many rows a reader without a limit is assumed to read


class OfferRow(NamedTuple):
    """One offer as stored in the file."""

    rate: int
    place: int
    shape: int
    purchase: int
    source: int
    term_months: int
    provider: str
    region: str
    zone: str | None
    instance_type: str
    accelerator: str | None
    accelerator_count: int
    accelerator_memory_mib: int
    accelerator_part: float
    vcpus: float
    memory_mib: int
    disk_gib: int | None
    network_mbps: int | None
    hosts: int


_COLUMNS = (
    "offer.rate, offer.place, offer.shape, offer.purchase, offer.source, offer.term_months, "
    "shape.provider, "
    "place.region, place.zone, shape.instance_type, pack.accelerator, pack.count, pack.memory_mib, "
    "pack.part, shape.vcpus, "
    "shape.memory_mib, shape.disk_gib, shape.network_mbps, shape.hosts"
)


class ShapeCondition(Struct, frozen=True, kw_only=True):
    """A condition on shapes: an SQL expression and the values for its parameters."""

    constraint: Constraint
    sql: str
    values: tuple[object, ...] = ()
    columns: tuple[str, ...] = ()  # columns from which the distance of a failing row is computed


class AcceleratorPacks(Struct, frozen=True, kw_only=True):
    """Accelerator packs, grouped by whether they meet a requirement. A pack is a combination of an
    accelerator's name, count and memory. Packs that do not meet the requirement are grouped by the
    constraint that they fail.
    """

    fitting: tuple[int, ...]
    near: Mapping[
        tuple[Constraint, float], tuple[int, ...]
    ]  # packs that fail only one constraint, keyed by the constraint and the distance
    # number of rows with packs that fail, keyed by the constraint
    rejected: Mapping[Constraint, Mapping[Purchase, int]]


class RowSelection(Struct, frozen=True, kw_only=True):
    """Conditions that select the rows to read. None means no condition."""

    conditions: tuple[ShapeCondition, ...] = ()
    packs: tuple[int, ...] | None = None
    purchases: tuple[int, ...] = tuple(PURCHASE_NUMBERS.values())
    places: tuple[int, ...] | None = None
    share: float = 1.0  # share of all rows that are in `places`
    outside: bool = False  # whether to select every location except `places`
    max_rate: int | None = None
    above_rate: int | None = None

    def shapes_sql(self) -> tuple[str, tuple[object, ...]]:
        tests = [condition.sql for condition in self.conditions]
        if self.packs is not None:
            tests.append(f"shape.pack IN {_list(self.packs)}")
        return " AND ".join(tests) or "1", tuple(
            value for item in self.conditions for value in item.values
        )

    def rows_sql(self) -> str:
        # The + prevents SQLite from using the index for the purchase options. With that index,
        # SQLite 3.40 returns rows outside the price range. The cause is a bug in its "seek-scan",
        # which is used for an IN and a range on columns of the same index.
        tests = (
            [f"+offer.purchase IN {_list(self.purchases)}"]
            if len(self.purchases) < len(PURCHASE_NUMBERS)
            else []
        )
        if self.places is not None:
            tests.append(f"offer.place {'NOT ' if self.outside else ''}IN {_list(self.places)}")
        if self.max_rate is not None:
            tests.append(f"offer.rate <= {self.max_rate:d}")
        if self.above_rate is not None:
            tests.append(f"offer.rate > {self.above_rate:d}")
        return " AND ".join(tests) or "1"


class NeedFilters(Struct, frozen=True, kw_only=True):
    """A requirement, translated into conditions on the snapshot's tables."""

    allowed: tuple[Purchase, ...]
    packs: AcceleratorPacks | None
    conditions: tuple[ShapeCondition, ...]
    places: tuple[int, ...] | None
    share: float  # share of all rows that are in `places`
    max_rate: int | None

    def fitting(self) -> RowSelection:
        return RowSelection(
            conditions=self.conditions,
            packs=self.packs.fitting if self.packs else None,
            purchases=tuple(PURCHASE_NUMBERS[purchase] for purchase in self.allowed),
            places=self.places,
            share=self.share,
            max_rate=self.max_rate,
        )


class MatchCounts(Struct, frozen=True, kw_only=True):
    """The number of all rows (`total`), the number of matching rows (`matched`), and the numbers of
    rejected rows by constraint (`rejected`). A rejected row counts under the first constraint that
    it fails.
    """

    total: int
    matched: int
    rejected: Mapping[Constraint, int] = field(default_factory=dict)


def everything() -> RowSelection:
    return RowSelection()


def with_accelerators(connection: sqlite3.Connection) -> RowSelection:
    """Select the rows of machines that have accelerators."""
    found = connection.execute("SELECT id FROM pack WHERE accelerator IS NOT NULL").fetchall()
    return RowSelection(packs=tuple(number for (number,) in found))


def make_filters(
    connection: sqlite3.Connection, need: ResourceSpec, allowed: tuple[Purchase, ...]
) -> NeedFilters:
    """Translate a requirement into filters; reads only the small tables of packs and locations."""
    if need.network is not None and need.network.fabric is not None:
        connection.create_function(_FABRIC, 3, has_fabric, deterministic=True)
    places, share = _places(connection, need.regions) if need.regions else (None, 1.0)
    return NeedFilters(
        allowed=allowed,
        packs=_sort_packs(connection, need) if need.accelerators else None,
        conditions=tuple(_conditions(need)),
        places=places,
        share=share,
        max_rate=need.max_rate.micros_per_hour if need.max_rate else None,
    )


def count(connection: sqlite3.Connection, filters: NeedFilters) -> MatchCounts:
    """Count every row once: as matching, or at the first constraint that it fails."""
    rejected: dict[Constraint, int] = {}
    total = 0
    for column, rows in _purchase_totals(connection).items():
        total += rows
        if column not in filters.allowed:
            rejected[Constraint.PURCHASE] = rejected.get(Constraint.PURCHASE, 0) + rows
    if filters.packs:
        for constraint, rows_of in filters.packs.rejected.items():
            rejected[constraint] = sum(rows_of[purchase] for purchase in filters.allowed)
    fitting = 0
    for constraint_or_none, rows in _tally(connection, filters):
        if constraint_or_none is None:
            fitting = rows
        else:
            rejected[constraint_or_none] = rows
    if fitting and (filters.places is not None or filters.max_rate is not None):
        elsewhere, dear = _tally_rows(connection, filters, fitting)
        rejected |= {Constraint.REGION: elsewhere, Constraint.PRICE: dear}
        fitting -= elsewhere + dear
    ordered = {
        constraint: rejected[constraint] for constraint in Constraint if rejected.get(constraint)
    }
    return MatchCounts(total=total, matched=fitting, rejected=ordered)


def walk(
    connection: sqlite3.Connection, selection: RowSelection, *, limit: int | None = None
) -> Iterator[OfferRow]:
    """Yield the selected rows, sorted by price, location, shape and purchase option. The rows are
    read only as the caller consumes them.
    """
    shapes, values = selection.shapes_sql()
    tests = f"WHERE {shapes} AND {selection.rows_sql()}"
    order = (
        "ORDER BY offer.rate, offer.place, offer.shape, offer.purchase LIMIT "
        f"{-1 if limit is None else limit:d}"
    )
    by_shape = "shape CROSS JOIN offer ON offer.shape = shape.id"
    if not _is_sorting_quicker(connection, selection, limit):
        tables = "offer INDEXED BY offer_by_rate CROSS JOIN shape ON shape.id = offer.shape"
    elif limit is None:
        tables = by_shape
    else:  # sort without the columns of other tables, which are read only for the rows that remain
        tables = (
            f"(SELECT offer.* FROM {by_shape} {tests} {order}) AS offer "
            "CROSS JOIN shape ON shape.id = offer.shape"
        )
        tests = ""
    sql = (
        f"SELECT {_COLUMNS} FROM {tables} CROSS JOIN place ON place.id = offer.place "
        f"CROSS JOIN pack ON pack.id = shape.pack {tests} {order}"
    )
    return map(OfferRow._make, connection.execute(sql, values))


def replace_condition(
    filters: NeedFilters, old: ShapeCondition, sql: str, values: tuple[object, ...]
) -> tuple[ShapeCondition, ...]:
    """Return the conditions in `filters`, where the condition `old` has the new SQL `sql` and the
    new `values`.
    """
    return tuple(
        replace(condition, sql=sql, values=values) if condition is old else condition
        for condition in filters.conditions
    )


def _is_sorting_quicker(
    connection: sqlite3.Connection, selection: RowSelection, limit: int | None
) -> bool:
    """Return whether reading and sorting all rows of the selected shapes is faster than reading
    rows by price until `limit` rows match.
    """
    shapes, values = selection.shapes_sql()
    columns = " + ".join(
        column
        for purchase, column in PURCHASE_COLUMNS.items()
        if PURCHASE_NUMBERS[purchase] in selection.purchases
    )
    of_shapes, all_rows = connection.execute(
        f"SELECT (SELECT SUM({columns}) FROM shape WHERE {shapes}), value FROM meta WHERE key = "
        "'rows'",
        values,
    ).fetchone()
    hits = (of_shapes or 0) * (1 - selection.share if selection.outside else selection.share)
    taken = min(limit or _ASKED, hits)
    built = hits if limit is None else taken
    sorting = (of_shapes or 0) * _BY_SHAPE_US + hits * _SORT_US + built * _BUILD_US
    skipped = 0.0 if selection.max_rate is not None else _CHEAPER
    walking = int(all_rows) * _BY_RATE_US * (min(1, skipped + taken / hits) if hits else 1)
    walking += taken * _BUILD_US
    return sorting <= walking


def _list(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, map(int, numbers)))})"


def _purchase_totals(connection: sqlite3.Connection) -> dict[Purchase, int]:
    columns = ", ".join(f"COALESCE(SUM({column}), 0)" for column in PURCHASE_COLUMNS.values())
    return dict(
        zip(
            PURCHASE_COLUMNS,
            connection.execute(f"SELECT {columns} FROM pack").fetchone(),
            strict=True,
        )
    )


def _sort_packs(connection: sqlite3.Connection, need: ResourceSpec) -> AcceleratorPacks:
    fitting: list[int] = []
    near: dict[tuple[Constraint, float], list[int]] = {}
    rejected: dict[Constraint, dict[Purchase, int]] = {}
    columns = ", ".join(PURCHASE_COLUMNS.values())
    for number, name, many, memory, part, *rows in connection.execute(
        f"SELECT id, accelerator, count, memory_mib, part, {columns} FROM pack"
    ):
        failed, missed = accelerator_fit(name, many, memory, need.accelerators, part=part)
        if failed is None:
            fitting.append(number)
            continue
        sums = rejected.setdefault(failed, dict.fromkeys(PURCHASE_COLUMNS, 0))
        for purchase, some in zip(PURCHASE_COLUMNS, rows, strict=True):
            sums[purchase] += some
        if missed is not None:
            near.setdefault(missed, []).append(number)
    return AcceleratorPacks(
        fitting=tuple(fitting),
        near={key: tuple(numbers) for key, numbers in near.items()},
        rejected=rejected,
    )


def _conditions(need: ResourceSpec) -> Iterator[ShapeCondition]:
    """Yield the conditions on shapes that follow from a requirement, in the order in which they are
    checked."""
    if need.instance is not None:
        yield ShapeCondition(
            constraint=Constraint.INSTANCE, sql="shape.instance_type = ?", values=(need.instance,)
        )
    yield from _range(Constraint.CPUS, "shape.vcpus", need.cpus_min, need.cpus_max)
    if need.memory_per_cpu_mib is None:
        yield from _range(
            Constraint.MEMORY, "shape.memory_mib", need.memory_min_mib, need.memory_max_mib
        )
    else:
        yield _memory_by_cpus(need, need.memory_per_cpu_mib)
    if need.disk_gib is not None:
        sql = "(shape.disk_gib IS NULL OR shape.disk_gib >= ?)"
        yield ShapeCondition(
            constraint=Constraint.DISK,
            sql=sql,
            values=(need.disk_gib,),
            columns=("shape.disk_gib",),
        )
    if need.network is not None:
        yield from _network(need.network)
    if need.providers:
        marks = ", ".join("?" * len(need.providers))
        yield ShapeCondition(
            constraint=Constraint.PROVIDER,
            sql=f"shape.provider IN ({marks})",
            values=need.providers,
        )


def _network(need: NetworkNeed) -> Iterator[ShapeCondition]:
    """Yield the condition on the network. If the task requests a fabric, Cavvy does not compute how
    far a row is from the requirement.
    """
    speed = "COALESCE(shape.network_mbps, 0)"
    tests = [f"{speed} >= ?"] if need.min_mbps is not None else []
    tests += [f"{_FABRIC}(shape.provider, shape.instance_type, ?)"] if need.fabric else []
    if tests:
        values = (need.min_mbps, need.fabric and str(need.fabric))
        yield ShapeCondition(
            constraint=Constraint.NETWORK,
            sql=f"({' AND '.join(tests)})",
            values=tuple(value for value in values if value is not None),
            columns=() if need.fabric else (speed,),
        )


def _memory_by_cpus(need: ResourceSpec, each_mib: int) -> ShapeCondition:
    """Return the condition on the memory per CPU together with the bounds on the memory."""
    tests = ["shape.memory_mib > 0", "shape.vcpus > 0", "shape.memory_mib >= shape.vcpus * ?"]
    tests += ["shape.memory_mib >= ?"] if need.memory_min_mib is not None else []
    tests += ["shape.memory_mib <= ?"] if need.memory_max_mib is not None else []
    values = tuple(
        mib for mib in (each_mib, need.memory_min_mib, need.memory_max_mib) if mib is not None
    )
    return ShapeCondition(
        constraint=Constraint.MEMORY,
        sql=f"({' AND '.join(tests)})",
        values=values,
        columns=("shape.memory_mib", "shape.vcpus"),
    )


def _range(
    constraint: Constraint, column: str, low: float | None, high: float | None
) -> Iterator[ShapeCondition]:
    if low is None and high is None:
        return
    tests = [f"{column} > 0", *([f"{column} >= ?"] if low is not None else [])]
    tests += [f"{column} <= ?"] if high is not None else []
    values = tuple(bound for bound in (low, high) if bound is not None)
    yield ShapeCondition(
        constraint=constraint, sql=f"({' AND '.join(tests)})", values=values, columns=(column,)
    )


def _places(connection: sqlite3.Connection, wanted: Sequence[str]) -> tuple[tuple[int, ...], float]:
    """Return the IDs of the requested locations, and the share of all rows in these locations."""
    found: dict[int, int] = {}
    for name in wanted:
        sql = (
            "SELECT id, rows FROM place WHERE region = ?1 OR COALESCE(zone, region) = ?1 OR "
            "country = ?1 OR area = ?1 OR (zone IS NULL AND region = ?2)"
        )
        wish = wished_place(name)
        found.update(connection.execute(sql, (wish, region_of_zone(wish))).fetchall())
    (total,) = connection.execute("SELECT SUM(rows) FROM place").fetchone()
    return tuple(sorted(found)), sum(found.values()) / (total or 1)


def _tally(
    connection: sqlite3.Connection, filters: NeedFilters
) -> Iterator[tuple[Constraint | None, int]]:
    """Count the rows of the shapes that have a matching pack. The counts are grouped by the first
    condition that a shape fails. The key None stands for rows that meet all conditions.
    """
    allowed = " + ".join(PURCHASE_COLUMNS[purchase] for purchase in filters.allowed)
    where = f"shape.pack IN {_list(filters.packs.fitting)}" if filters.packs else "1"
    cases = " ".join(
        f"WHEN NOT {condition.sql} THEN {number}"
        for number, condition in enumerate(filters.conditions)
    )
    case = f"CASE {cases} ELSE -1 END" if cases else "-1"
    values = [value for condition in filters.conditions for value in condition.values]
    sql = f"SELECT {case} AS failed, SUM({allowed}) FROM shape WHERE {where} GROUP BY failed"
    for number, rows in connection.execute(sql, values):
        yield (filters.conditions[number].constraint if number >= 0 else None), rows or 0


def _tally_rows(
    connection: sqlite3.Connection, filters: NeedFilters, fitting: int
) -> tuple[int, int]:
    """Count the rows outside the requested locations, and the rows inside these locations that cost
    too much. Only rows that meet all conditions except location and price are counted; `fitting` is
    the number of these rows.
    """
    selection = replace(filters.fitting(), max_rate=None)
    shapes, values = selection.shapes_sql()
    dear = "0" if filters.max_rate is None else f"offer.rate > {filters.max_rate:d}"
    inside, too_dear = connection.execute(
        f"SELECT COUNT(*), COALESCE(SUM({dear}), 0) "
        f"FROM shape CROSS JOIN offer ON offer.shape = shape.id WHERE {shapes} AND "
        f"{selection.rows_sql()}",
        values,
    ).fetchone()
    return fitting - inside, too_dear


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
