"""Implements `Catalog.match` on a snapshot file without loading the whole file. SQL filters, counts
and sorts the rows, and Python builds the result from them. A property test checks that the result
equals the result of `catalog/fit.py`.

Reads offers from the catalog in use, for commands that need nothing else of the catalog and for
providers whose APIs report no prices.
"""

import sqlite3
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.catalog.doubts import OfferJudge
from cavvy.catalog.fit import (
    PURCHASES,
    Catalog,
    Constraint,
    NearMiss,
    OfferLot,
    OfferMatches,
    make_miss,
)
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace
from cavvy.store.snapshot import choose, query
from cavvy.store.snapshot.layout import PURCHASE_COLUMNS, SCHEMA_VERSION, SnapshotError
from cavvy.store.snapshot.lots import PURCHASE_OF, PlaceParts, find_places, list_lots, read_rows


class SourceInfo(Struct, frozen=True, kw_only=True):
    """A source of the catalog's prices."""

    name: str
    as_of: date
    providers: tuple[str, ...]
    rows: int


class ProviderInfo(Struct, frozen=True, kw_only=True):
    """A summary of the snapshot's data about one provider."""

    name: str
    regions: int
    instance_types: int
    on_demand: int
    spot: int
    reserved: int
    with_accelerator: int
    as_of: date  # date of the newest row


class SnapshotInfo(Struct, frozen=True, kw_only=True):
    """The contents of a snapshot."""

    path: Path
    schema_version: int
    as_of: date
    rows: int
    rows_with_accelerator: int
    bytes: int


class LotMatches(Struct, frozen=True, kw_only=True):
    """The fitting offers of a snapshot as lots, and in `found` the counts of all offers and the
    near misses. `parts` is for `CatalogSnapshot.read_lots`.
    """

    found: OfferMatches
    lots: Sequence[OfferLot]
    parts: PlaceParts


class CatalogSnapshot:
    """A snapshot file that is open for reading. Use the snapshot in a `with` statement, or call
    `close`.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._sources: dict[int, tuple[str, date]] | None = None

    @classmethod
    def open(cls, path: Path | None = None) -> "CatalogSnapshot":
        """Open the snapshot at `path`, or the snapshot in use if `path` is None (see
        `choose.path_in_use`). Raises SnapshotError.
        """
        if path is None:
            path = choose.path_in_use()
        connection = choose.connect(path)
        return cls(path, connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "CatalogSnapshot":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def match(
        self,
        need: ResourceSpec,
        *,
        limit: int | None = None,
        misses: int = 5,
        purchases: tuple[Purchase, ...] | None = None,
    ) -> OfferMatches:
        """Implement `Catalog.match`; `purchases` replace the purchase options that the need allows,
        which are never those with a commitment."""
        try:
            return self._match(need, limit, misses, purchases or PURCHASES[need.spot])
        except sqlite3.DatabaseError as error:
            raise choose.unusable(self.path, error) from error

    def _match(
        self,
        need: ResourceSpec,
        limit: int | None,
        wanted: int,
        allowed: tuple[Purchase, ...],
    ) -> OfferMatches:
        filters = query.make_filters(self._connection, need, allowed)
        counts = query.count(self._connection, filters)
        near = list(query.nearest(self._connection, need, filters, wanted)) if wanted else []
        rows = (
            query.walk(self._connection, filters.fitting(), limit=limit)
            if counts.matched
            else iter(())
        )
        return OfferMatches(
            offers=tuple(self._offers(rows)),
            matched=counts.matched,
            total=counts.total,
            rejected=counts.rejected,
            misses=self._misses(near, need),
        )

    def match_lots(
        self,
        need: ResourceSpec,
        *,
        misses: int = 5,
        skip: Collection[tuple[str, str]] = (),
        group: Callable[[str, str], Hashable] | None = None,
    ) -> LotMatches:
        """Find the offers that fit one node of `need`, without reading each offer. The offers of
        the regions in `skip` (provider and region) are not counted. If `group` is given, offers in
        locations with different results of `group` belong to different lots.
        """
        try:
            found = self._match(need, 0, misses, PURCHASES[need.spot])
            filters = query.make_filters(self._connection, need, PURCHASES[need.spot])
            parts = find_places(self._connection, filters.fitting(), skip, group)
            lots = list(list_lots(self._connection, parts)) if found.matched else []
        except sqlite3.DatabaseError as error:
            raise choose.unusable(self.path, error) from error
        spare = found.matched - sum(lot.count for lot in lots)
        left = replace(found, matched=found.matched - spare, total=found.total - spare)
        return LotMatches(found=left, lots=lots, parts=parts)

    def read_lots(self, matches: LotMatches, lots: Sequence[OfferLot]) -> Sequence[Offer]:
        """Return the offers of some of the matching lots, the cheapest first."""
        try:
            return list(self._offers(read_rows(self._connection, matches.parts, lots)))
        except sqlite3.DatabaseError as error:
            raise choose.unusable(self.path, error) from error

    def _misses(
        self, near: Sequence[tuple[Constraint, query.OfferRow]], need: ResourceSpec
    ) -> tuple[NearMiss, ...]:
        offers = self._offers(row for _, row in near)
        return tuple(
            make_miss(offer, need, constraint)
            for (constraint, _), offer in zip(near, offers, strict=True)
        )

    def all_offers(self) -> Iterator[Offer]:
        """Return all offers, sorted by price. The offers are used to compare and copy snapshots."""
        return self._offers(query.walk(self._connection, query.everything()))

    def make_judge(self) -> OfferJudge:
        """Return a judge of offers that compares them with the snapshot's offers. Raises
        SnapshotError."""
        try:
            chosen = query.with_accelerators(self._connection)
            return OfferJudge(self._offers(query.walk(self._connection, chosen)))
        except sqlite3.DatabaseError as error:
            raise choose.unusable(self.path, error) from error

    def list_doubts(self, judge: OfferJudge) -> list[str]:
        """Return why offers of the snapshot are in doubt."""
        rows = query.walk(self._connection, query.with_accelerators(self._connection))
        return [doubt for each in self._offers(rows) if (doubt := judge.doubt(each))]

    def egress(self) -> Mapping[str, Money]:
        """Return the price per GB of data sent to the internet, keyed by "provider/region" and by
        "provider"."""
        found = self._connection.execute(
            "SELECT provider, region, micros_per_gb FROM egress WHERE target = 'internet'"
        ).fetchall()
        return {
            f"{provider}/{region}" if region else provider: Money(micros)
            for provider, region, micros in found
        }

    def egress_dates(self) -> Mapping[str, date]:
        """Return the dates of the prices that `egress` returns, keyed as in `egress`."""
        return {
            f"{provider}/{region}" if region else provider: as_of
            for provider, region, target, _, _, as_of in self.egress_rows()
            if target == "internet"
        }

    def egress_rows(self) -> Iterator[tuple[str, str, str, Money, str, date]]:
        """Yield every egress price: provider, region ("" for all), target, price per GB, source,
        date."""
        sources = self._known_sources()
        found = self._connection.execute(
            "SELECT provider, region, target, micros_per_gb, source FROM egress"
        )
        for provider, region, target, micros, source in found:
            yield provider, region, target, Money(micros), *sources[source]

    def info(self) -> SnapshotInfo:
        meta = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        return SnapshotInfo(
            path=self.path,
            schema_version=SCHEMA_VERSION,
            as_of=date.fromisoformat(meta["as_of"]),
            rows=int(meta["rows"]),
            rows_with_accelerator=int(meta["rows_with_accelerator"]),
            bytes=self.path.stat().st_size,
        )

    def providers(self) -> tuple[ProviderInfo, ...]:
        found = self._connection.execute(
            "SELECT shape.provider, COUNT(DISTINCT place.region), COUNT(DISTINCT "
            "shape.instance_type), "
            "SUM(purchase = 0), SUM(purchase = 2), SUM(purchase = 1), SUM(pack.accelerator IS NOT "
            "NULL), MAX(as_of) "
            "FROM offer JOIN shape ON shape.id = offer.shape JOIN place ON place.id = offer.place "
            "JOIN pack ON pack.id = shape.pack JOIN source ON source.id = offer.source GROUP BY 1 "
            "ORDER BY 1"
        ).fetchall()
        return tuple(
            ProviderInfo(
                name=row[0],
                regions=row[1],
                instance_types=row[2],
                on_demand=row[3],
                spot=row[4],
                reserved=row[5],
                with_accelerator=row[6],
                as_of=date.fromisoformat(row[7]),
            )
            for row in found
        )

    def unpriced(self) -> Mapping[tuple[str, Purchase], tuple[int, int]]:
        """Count, for each provider and purchase option, the instance types with accelerators that
        have no price. Return this number and the number of all the provider's instance types with
        accelerators. A provider and purchase option are left out if every price is known.
        """
        missing = ", ".join(f"SUM(shape.{column} = 0)" for column in PURCHASE_COLUMNS.values())
        found = self._connection.execute(
            f"SELECT shape.provider, COUNT(*), {missing} FROM shape JOIN pack ON pack.id = "
            "shape.pack WHERE pack.accelerator IS NOT NULL GROUP BY 1 ORDER BY 1"
        ).fetchall()
        return {
            (provider, purchase): (without, total)
            for provider, total, *counts in found
            for purchase, without in zip(PURCHASE_COLUMNS, counts, strict=True)
            if without
        }

    def sources(self) -> tuple[SourceInfo, ...]:
        found = self._connection.execute(
            "SELECT source.name, as_of, GROUP_CONCAT(DISTINCT shape.provider), COUNT(*) "
            "FROM offer JOIN source ON source.id = offer.source JOIN shape ON shape.id = "
            "offer.shape "
            "GROUP BY source.id ORDER BY COUNT(*) DESC, source.name"
        ).fetchall()
        return tuple(
            SourceInfo(
                name=name,
                as_of=date.fromisoformat(day),
                providers=tuple(sorted(providers.split(","))),
                rows=rows,
            )
            for name, day, providers, rows in found
        )

    def machines(self, provider: str) -> Mapping[str, Offer]:
        """Return one offer of each instance type of a provider, from which the instance type's
        properties can be read."""
        rows = (
            row
            for row in query.walk(self._connection, query.everything())
            if row.provider == provider
        )
        return {offer.instance_type: offer for offer in self._offers(rows)}

    def rates(self, provider: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield the key and the rate (micro-US-dollars per hour) of every offer of one provider, or
        of all providers.
        """
        for row in query.walk(self._connection, query.everything()):
            if provider in (None, row.provider):
                term = f"-{row.term_months}m" if row.term_months else ""
                zone = f"/{row.zone}" if row.zone else ""
                place = f"{row.provider}/{row.region}{zone}"
                purchase = PURCHASE_OF[row.purchase]
                yield (
                    f"{place}/{row.instance_type}:{row.accelerator_count}/{purchase}{term}",
                    row.rate,
                )

    def regions(self) -> tuple[tuple[str, str, str | None], ...]:
        """Return all combinations of provider, region and area, sorted by provider and region."""
        return tuple(
            self._connection.execute(
                "SELECT DISTINCT provider, region, area FROM place ORDER BY 1, 2"
            ).fetchall()
        )

    def zones(self) -> tuple[str, ...]:
        found = self._connection.execute("SELECT DISTINCT zone FROM place WHERE zone IS NOT NULL")
        return tuple(zone for (zone,) in found)

    def instance_types(self) -> tuple[str, ...]:
        return tuple(
            name
            for (name,) in self._connection.execute(
                "SELECT DISTINCT instance_type FROM shape ORDER BY 1"
            )
        )

    def _offers(self, rows: Iterator[query.OfferRow]) -> Iterator[Offer]:
        sources = self._known_sources()
        for row in rows:
            name, as_of = sources[row.source]
            yield Offer(
                provider=row.provider,
                region=row.region,
                zone=row.zone,
                instance_type=row.instance_type,
                accelerator=row.accelerator,
                accelerator_count=row.accelerator_count,
                accelerator_memory_mib=row.accelerator_memory_mib,
                accelerator_part=row.accelerator_part,
                term_months=row.term_months,
                vcpus=row.vcpus,
                memory_mib=row.memory_mib,
                disk_gib=row.disk_gib,
                network_mbps=row.network_mbps,
                hosts=row.hosts,
                purchase=PURCHASE_OF[row.purchase],
                rate=HourlyRate(row.rate),
                source=name,
                as_of=as_of,
            )

    def _known_sources(self) -> dict[int, tuple[str, date]]:
        if self._sources is None:
            found = self._connection.execute("SELECT id, name, as_of FROM source").fetchall()
            self._sources = {number: (name, date.fromisoformat(day)) for number, name, day in found}
        return self._sources


if TYPE_CHECKING:
    # checks that the class satisfies `Catalog` in `catalog/fit.py`
    _: type[Catalog] = CatalogSnapshot

__all__ = ["CatalogSnapshot", "ProviderInfo", "SnapshotError", "SnapshotInfo", "SourceInfo"]


def find_offers(need: ResourceSpec, limit: int | None = None) -> Sequence[Offer]:
    """Return the catalog's offers that fit, the cheapest first. Raises SnapshotError."""
    with CatalogSnapshot.open() as snapshot:
        return snapshot.match(need, limit=limit, misses=0).offers


def list_prices(provider: str) -> Sequence[Offer]:
    """Return the on-demand and spot offers of a provider from the catalog. The result is empty if
    there is no catalog.
    """
    return _list_prices(provider, None)


def list_instance(provider: str, instance: str) -> Sequence[Offer]:
    """Return the on-demand and spot offers of an instance type in the catalog. The result is empty
    if there is no catalog.
    """
    return _list_prices(provider, instance)


def _list_prices(provider: str, instance: str | None) -> Sequence[Offer]:
    need = ResourceSpec(providers=(provider,), instance=instance, spot=SpotPolicy.AUTO)
    try:
        return find_offers(need)
    except SnapshotError as error:
        import logging  # `cavvy offers` would import it in vain

        logger = logging.getLogger(__name__)
        logger.warning("no catalog: prices of %s are unknown", provider, exc_info=error)
        return ()
