"""Stores a new snapshot in the state folder: from a file, a folder or a URL, or made from newly
fetched offers. The build script also writes snapshots from lists of offers with this module; with
the same SQLite version, equal offers give an identical file.

Compares two snapshots, offer by offer.
"""

import hashlib
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TypeVar

from cavvy.catalog.regions import locate
from cavvy.domain.offers import Offer
from cavvy.domain.units import Money
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, NoReply, ReplyTooLong, TargetDenied
from cavvy.store.snapshot import choose
from cavvy.store.snapshot.layout import (
    INDEXES,
    PURCHASE_COLUMNS,
    PURCHASE_NUMBERS,
    SCHEMA_VERSION,
    TABLES,
    SnapshotError,
)
from cavvy.store.snapshot.reader import CatalogSnapshot


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


_MOST_BYTES = 512 << 20
_TIMEOUT_S, _LIMIT_S = 60, 3600  # seconds without any byte, and for the whole file


def refresh_from(place: str, *, sha256: str | None = None) -> Path:
    """Copy a snapshot from a file, a folder or a URL, check the copy, and use the copy from now on.
    Returns its path.

    If the new snapshot is not usable, raise SnapshotError and keep the current catalog.
    """
    with _new_file() as new:
        if "://" in place:
            _download(place, new)
        else:
            _copy(Path(place).expanduser(), new)
        _check_hash(new, place, sha256)
        choose.put_in_place(new, choose.refreshed_path(), source=place)
    return choose.refreshed_path()


def refresh_offers(
    fetched: Mapping[str, Sequence[Offer]], *, today: date, partial: Collection[str] = ()
) -> Path:
    """Create and use a new snapshot: the fetched offers replace all old offers of their providers.
    For a provider in `partial`, the fetched offers replace only the old offers with the same keys.
    """
    with _new_file() as new:
        with CatalogSnapshot.open() as old:
            write_snapshot(
                new,
                _merged(old, fetched, partial),
                _egress(old),
                as_of=today,
            )
        choose.put_in_place(new, choose.refreshed_path(), source="the new catalog")
    return choose.refreshed_path()


def _merged(
    old: CatalogSnapshot, fetched: Mapping[str, Sequence[Offer]], partial: Collection[str]
) -> Iterator[Offer]:
    """Yield the new offers, then the old offers. If several offers have equal keys, the writer
    keeps the first of these offers.
    """
    for offers in fetched.values():
        yield from offers
    for offer in old.all_offers():
        if offer.provider not in fetched or offer.provider in partial:
            yield offer


def _egress(old: CatalogSnapshot) -> Iterator[EgressPrice]:
    for provider, region, target, price, source, as_of in old.egress_rows():
        yield EgressPrice(
            provider=provider,
            region=region,
            target=target,
            per_gb=price,
            source=source,
            as_of=as_of,
        )


@contextmanager
def _new_file() -> Iterator[Path]:
    """Yield the path of a new file next to the catalog. Also delete files that interrupted
    refreshes have left behind.
    """
    folder = choose.refreshed_path().parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(".catalog.*.new"):
            if not _is_running(left.name.split(".")[2]):
                left.unlink(missing_ok=True)
        new = folder / f".catalog.{os.getpid()}.new"
        new.unlink(missing_ok=True)
        try:
            yield new
        finally:
            new.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise SnapshotError(f"the new catalog cannot be written to {folder}: {error}") from error


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _copy(place: Path, new: Path) -> None:
    if place.is_dir():
        found = [place / name for name in ("catalog.db", "snapshot.db") if (place / name).is_file()]
        if not found:
            raise SnapshotError(f"{place} contains neither catalog.db nor snapshot.db")
        place = found[0]
    if not place.is_file():
        raise SnapshotError(
            f"the file {place} does not exist; use a snapshot file, a folder that "
            "contains a snapshot file, or a URL"
        )
    shutil.copyfile(place, new)


def _download(url: str, new: Path) -> None:
    if url.split("://", 1)[0] not in ("http", "https"):
        raise SnapshotError(f"{url} is not an http or https URL")
    client = HttpClient(redirects=True, idle_s=_TIMEOUT_S, limit_s=_LIMIT_S, most_bytes=_MOST_BYTES)
    try:
        with new.open("wb") as file:
            reply = client.send("GET", url, into=file)
    except ReplyTooLong as error:
        raise SnapshotError(f"{error}; {url} is not a catalog") from error
    except (NoReply, TargetDenied) as error:
        raise SnapshotError(f"{url} cannot be read: {error}") from error
    if reply.status != 200:
        raise SnapshotError(f"{url} cannot be read: HTTP {reply.status} {reply.reason}")


def _check_hash(new: Path, place: str, sha256: str | None) -> None:
    if sha256 is None:
        return
    found = hashlib.sha256(new.read_bytes()).hexdigest()
    if found != sha256.lower().strip():
        raise SnapshotError(f"{place} has SHA-256 {found}, not {sha256}; it was not used")


class OfferChange(Struct, frozen=True, kw_only=True):
    """One offer that was added or removed, or whose price changed. Rates are in micro-US-dollars
    per hour.
    """

    kind: str
    key: str
    old: int | None = None
    new: int | None = None

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.new is not None and self.old else None


def compare(
    old: CatalogSnapshot, new: CatalogSnapshot, provider: str | None = None
) -> list[OfferChange]:
    """List the changes from `old` to `new`. Changed prices come first, the largest change first.
    New and removed offers come after the changed prices, sorted by name.
    """
    before, after = dict(old.rates(provider)), dict(new.rates(provider))
    moved = [
        OfferChange(
            kind="dearer" if after[key] > rate else "cheaper", key=key, old=rate, new=after[key]
        )
        for key, rate in before.items()
        if key in after and after[key] != rate
    ]
    moved.sort(key=lambda change: (-_size(change), change.key))
    return [*moved, *_only("new", after, before), *_only("gone", before, after)]


def _only(kind: str, here: dict[str, int], there: dict[str, int]) -> Iterator[OfferChange]:
    for key in sorted(here.keys() - there.keys()):
        yield OfferChange(
            kind=kind, key=key, **({"new": here[key]} if kind == "new" else {"old": here[key]})
        )


def _size(change: OfferChange) -> float:
    """Return the factor by which the price grew or shrank."""
    ratio = change.ratio or 1.0
    return ratio if ratio >= 1 else 1 / ratio
