"""Reads the lots of a snapshot: SQL counts the offers that differ only in location and price, and
then only the offers of some lots are read.
"""

import sqlite3
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

from cavvy.catalog.fit import Constraint, OfferLot
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.store.snapshot.layout import PURCHASE_NUMBERS
from cavvy.store.snapshot.query import OfferRow, RowSelection, ShapeCondition, walk

PURCHASE_OF = {number: purchase for purchase, number in PURCHASE_NUMBERS.items()}


class PlaceParts(Struct, frozen=True, kw_only=True):
    """The locations of a snapshot, by number: provider, region and group. `selection` selects rows
    in these locations."""

    selection: RowSelection
    places: Mapping[int, tuple[str, str, int]]


def find_places(
    connection: sqlite3.Connection,
    selection: RowSelection,
    skip: Collection[tuple[str, str]],
    group: Callable[[str, str], Hashable] | None,
) -> PlaceParts:
    """Return the selected locations without those in `skip` (provider and region). If `group` is
    given, locations with equal results of `group` belong to one group."""
    places: dict[int, tuple[str, str, int]] = {}
    numbers: dict[Hashable, int] = {}
    left_out = False
    for number, provider, region in connection.execute("SELECT id, provider, region FROM place"):
        if selection.places is not None and number not in selection.places:
            continue
        if (provider, region) in skip:
            left_out = True
            continue
        key = group(provider, region) if group is not None else None
        places[number] = provider, region, numbers.setdefault(key, len(numbers))
    if left_out:
        selection = replace(selection, places=tuple(places))
    return PlaceParts(selection=selection, places=places)


def list_lots(connection: sqlite3.Connection, parts: PlaceParts) -> Iterator[OfferLot]:
    """Yield the selected offers by machine type, purchase option and group of locations."""
    shapes, values = parts.selection.shapes_sql()
    grouped = len({part for _, _, part in parts.places.values()}) > 1
    head, column, join = "", "0", ""
    if grouped:
        rows = ", ".join(f"({number}, {part})" for number, (_, _, part) in parts.places.items())
        head, column = f"WITH part (place, number) AS (VALUES {rows}) ", "part.number"
        join = "JOIN part ON part.place = offer.place"
    sql = (
        f"{head}SELECT shape.id, offer.purchase, {column}, MIN(offer.rate), MAX(offer.rate), "
        "COUNT(*), MIN(offer.place), shape.provider, shape.instance_type, pack.accelerator, "
        "pack.count, pack.memory_mib, pack.part, shape.vcpus, shape.network_mbps "
        "FROM shape CROSS JOIN offer ON offer.shape = shape.id "
        f"CROSS JOIN pack ON pack.id = shape.pack {join} "
        f"WHERE {shapes} AND {parts.selection.rows_sql()} GROUP BY 1, 2, 3"
    )
    for row in connection.execute(sql, values):
        number, purchase, part, least, most, count, place, provider, name, *machine = row
        accelerator, devices, memory, share, vcpus, network = machine
        yield OfferLot(
            number=number,
            part=part,
            sample=Offer(
                provider=provider,
                region=parts.places[place][1],
                instance_type=name,
                accelerator=accelerator,
                accelerator_count=devices,
                accelerator_memory_mib=memory,
                accelerator_part=share,
                vcpus=vcpus,
                network_mbps=network,
                purchase=PURCHASE_OF[purchase],
                rate=HourlyRate(least),
            ),
            most=most,
            count=count,
        )


def read_rows(
    connection: sqlite3.Connection, parts: PlaceParts, lots: Sequence[OfferLot]
) -> Iterator[OfferRow]:
    """Yield the rows of these lots, sorted as by `query.walk`."""
    wanted = {(lot.number, lot.sample.purchase, lot.part) for lot in lots}
    numbers = ", ".join(str(number) for number in sorted({number for number, _, _ in wanted}))
    only = ShapeCondition(constraint=Constraint.INSTANCE, sql=f"shape.id IN ({numbers})")
    selection = replace(parts.selection, conditions=(*parts.selection.conditions, only))
    for row in walk(connection, selection):
        purchase: Purchase = PURCHASE_OF[row.purchase]
        if (row.shape, purchase, parts.places[row.place][2]) in wanted:
            yield row
