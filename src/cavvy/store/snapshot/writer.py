"""Writes a snapshot from a list of offers. The build script and `cavvy catalog refresh` use this
module.

With the same SQLite version, equal offers give an identical file.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

from cavvy.catalog.regions import locate
from cavvy.domain.offers import Offer
from cavvy.domain.units import Money
from cavvy.domain.values import Struct
from cavvy.store.snapshot.layout import (
    INDEXES,
    PURCHASE_COLUMNS,
    PURCHASE_NUMBERS,
    SCHEMA_VERSION,
    TABLES,
    SnapshotError,
)


class EgressPrice(Struct, frozen=True, kw_only=True):
    """The price of data that is sent from a region to `target`; the region "" stands for every
    region of the provider.
    """

    provider: str
    region: str = ""
    target: str = "internet"
    per_gb: Money
    source: str
    as_of: date


_Pack = tuple[str, int, int, float]
_Shape = tuple[str, str, int, str, int, float, float, int, int, int, int]
_Place = tuple[str, str, str]


def write_snapshot(
    path: Path,
    offers: Iterable[Offer],
    egress: Iterable[EgressPrice] = (),
    *,
    as_of: date,
) -> int:
    """Write a new file at `path` (which must not exist) and return its number of offers.

    If several offers have the same key, only the first of these offers is written.
    """
    unique: dict[str, Offer] = {}
    for offer in offers:
        _check(offer)
        unique.setdefault(offer.key, offer)
    if path.exists():
        raise SnapshotError(
            f"{path} already exists; write the snapshot to a new file, then move it into place"
        )
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.executescript(
            "PRAGMA page_size = 8192; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
        )
        connection.executescript(TABLES)
        connection.execute("BEGIN")
        _fill(connection, list(unique.values()), list(egress))
        _count(connection)
        _describe(connection, as_of)
        connection.execute("COMMIT")
        connection.executescript(INDEXES + "VACUUM;")
    finally:
        connection.close()
    return len(unique)


def _check(offer: Offer) -> None:
    if not offer.source or offer.as_of is None:
        raise SnapshotError(
            f"{offer.key} has no source or no date; every row of a snapshot needs both"
        )
    if offer.rate.micros_per_hour <= 0:
        raise SnapshotError(
            f"{offer.key} has no price above 0; every offer in a snapshot needs a price"
        )


def _fill(
    connection: sqlite3.Connection,
    offers: list[Offer],
    egress: list[EgressPrice],
) -> None:
    dated: list[Offer | EgressPrice] = [*offers, *egress]
    sources = _numbered({_source(row) for row in dated}, start=1)
    _insert(connection, "source", [(n, *key) for key, n in sources.items()])
    packs = _numbered({_pack(offer) for offer in offers} | {("", 0, 0, 1.0)})
    packed = [(n, name or None, *size, 0, 0, 0) for (name, *size), n in packs.items()]
    _insert(connection, "pack", packed)
    shapes = _numbered({_shape(offer) for offer in offers}, start=1)
    shaped = [(n, *_shape_row(shape, packs), 0, 0, 0) for shape, n in shapes.items()]
    _insert(connection, "shape", shaped)
    _fill_offers(connection, offers, shapes, sources)
    prices = [
        (row.provider, row.region, row.target, row.per_gb.micros, sources[_source(row)])
        for row in egress
    ]
    _insert(connection, "egress", sorted(prices), "INSERT OR IGNORE")


def _fill_offers(
    connection: sqlite3.Connection,
    offers: list[Offer],
    shapes: Mapping[_Shape, int],
    sources: Mapping[tuple[str, str], int],
) -> None:
    places = _numbered({_place(offer) for offer in offers}, start=1)
    counts = Counter(_place(offer) for offer in offers)
    located = [
        (
            n,
            provider,
            region,
            zone or None,
            *locate(provider, region),
            counts[provider, region, zone],
        )
        for (provider, region, zone), n in places.items()
    ]
    _insert(connection, "place", located)
    rows = [
        (
            shapes[_shape(offer)],
            PURCHASE_NUMBERS[offer.purchase],
            offer.rate.micros_per_hour,
            places[_place(offer)],
            offer.term_months,
            sources[_source(offer)],
        )
        for offer in offers
    ]
    _insert(connection, "offer", sorted(rows))


def _insert(
    connection: sqlite3.Connection,
    table: str,
    rows: Sequence[tuple[object, ...]],
    verb: str = "INSERT",
) -> None:
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        connection.executemany(f"{verb} INTO {table} VALUES ({marks})", rows)


def _source(row: Offer | EgressPrice) -> tuple[str, str]:
    return row.source, str(row.as_of)


_Key = TypeVar("_Key", bound=tuple[str | int | float, ...])


def _numbered(keys: Iterable[_Key], start: int = 0) -> dict[_Key, int]:
    return {key: number for number, key in enumerate(sorted(keys), start)}


def _place(offer: Offer) -> _Place:
    return offer.provider, offer.region, offer.zone or ""


def _pack(offer: Offer) -> _Pack:
    name, memory = offer.accelerator or "", offer.accelerator_memory_mib
    return name, offer.accelerator_count, memory, offer.accelerator_part


def _shape(offer: Offer) -> _Shape:
    name, count, memory, part = _pack(offer)
    return (
        offer.provider,
        offer.instance_type,
        count,
        name,
        memory,
        part,
        offer.vcpus,
        offer.memory_mib,
        -1 if offer.disk_gib is None else offer.disk_gib,
        -1 if offer.network_mbps is None else offer.network_mbps,
        offer.hosts,
    )


def _shape_row(shape: _Shape, packs: Mapping[_Pack, int]) -> tuple[object, ...]:
    provider, instance_type, count, name, memory, part, vcpus, memory_mib, *rest = shape
    disk, network, hosts = rest
    known = (None if disk < 0 else disk, None if network < 0 else network, hosts)
    return provider, instance_type, packs[name, count, memory, part], vcpus, memory_mib, *known


def _count(connection: sqlite3.Connection) -> None:
    """Store the number of offers in each row of the tables `shape` and `pack`, for each purchase
    option.
    """
    for purchase, column in PURCHASE_COLUMNS.items():
        number = PURCHASE_NUMBERS[purchase]
        found = connection.execute(
            f"SELECT COUNT(*), shape FROM offer WHERE purchase = {number} GROUP BY shape"
        ).fetchall()
        connection.executemany(f"UPDATE shape SET {column} = ? WHERE id = ?", found)
        connection.execute(
            f"UPDATE pack SET {column} = (SELECT COALESCE(SUM({column}), 0) FROM shape WHERE "
            "shape.pack = pack.id)"
        )


def _describe(connection: sqlite3.Connection, as_of: date) -> None:
    (total,) = connection.execute("SELECT COUNT(*) FROM offer").fetchone()
    (with_accelerator,) = connection.execute(
        "SELECT COALESCE(SUM(on_demand + reserved + spot), 0) FROM pack WHERE accelerator IS NOT "
        "NULL"
    ).fetchone()
    meta = {
        "schema_version": SCHEMA_VERSION,
        "as_of": as_of.isoformat(),
        "rows": total,
        "rows_with_accelerator": with_accelerator,
    }
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?)", [(key, str(value)) for key, value in meta.items()]
    )
