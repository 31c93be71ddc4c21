"""`cavvy catalog`: shows, refreshes and compares price catalogs."""

import sys
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_providers
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import (
    TableColumn,
    json_out,
    output_option,
    pairs_out,
    rows_out,
    text_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cavvy.domain.offers import Offer
    from cavvy.providers.prices import PriceSource, ProviderPrices
    from cavvy.store.snapshot.reader import CatalogSnapshot, SnapshotInfo, SourceInfo
    from cavvy.store.snapshot.refresh import OfferChange


# exceptions of a source if a reply lacks a field or a field has a value of another type
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@click.group("catalog", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show, refresh and compare the price catalog."""


@command.command("info")
@output_option
def info(output: str) -> None:
    """Show which catalog is in use, its age, its contents and their sources."""
    from cavvy.store.snapshot import CatalogSnapshot

    with _errors(), CatalogSnapshot.open() as snapshot:
        head, providers, sources = snapshot.info(), snapshot.providers(), snapshot.sources()
        unlisted, doubts = _list_unlisted(snapshot), _list_doubts(snapshot)
    columns = [
        TableColumn("provider"),
        TableColumn("regions", drop=1),
        TableColumn("instance_types", "TYPES", drop=4),
        TableColumn("on_demand", "ON-DEMAND"),
        TableColumn("spot"),
        TableColumn("reserved", drop=3),
        TableColumn("with_accelerator", "ACCELERATED"),
        TableColumn("as_of", "NEWEST", show=str, drop=2),
    ]
    names = [column.name for column in columns]
    rows = [
        {"provider": each.name, **{name: getattr(each, name) for name in names[1:]}}
        for each in providers
    ]
    if output == "csv":
        rows_out(columns, rows, output)
        return
    if output == "json":
        json_out({**_info_document(head, rows, sources), "unlisted": unlisted, "doubts": doubts})
        return
    pairs_out(_head(head))
    click.echo()
    rows_out(columns, rows)
    click.echo()
    _sources_out(sources)
    click.echo("\nAccelerated instance types that lack a price for a purchase option:")
    columns = [TableColumn(name, wrap=name == "reason") for name in _UNLISTED]
    rows_out(columns, [[each[name] for name in _UNLISTED] for each in unlisted])
    for doubt in doubts[:_MOST_DOUBTS]:
        text_out(f"\nIn doubt: {doubt}.")
    if len(doubts) > _MOST_DOUBTS:
        click.echo(f"\n{len(doubts) - _MOST_DOUBTS} more offers are in doubt.")


_MOST_DOUBTS = 5  # doubtful offers that are shown
_UNLISTED = ("provider", "purchase", "types", "of", "reason")


def _list_unlisted(snapshot: "CatalogSnapshot") -> list[dict[str, object]]:
    """List the accelerated instance types that lack a price, for each large cloud and purchase
    option, with the reason.
    """
    from cavvy.catalog.tables import list_unlisted_reasons

    counts = snapshot.unpriced()
    return [
        dict(zip(_UNLISTED, (*key, *counts[key], reason), strict=True))
        for key, reason in list_unlisted_reasons().items()
        if key in counts
    ]


def _sources_out(sources: "Sequence[SourceInfo]") -> None:
    columns = [
        TableColumn("rows"),
        TableColumn("as_of", "DATE", show=str),
        TableColumn("providers", drop=1),
        TableColumn("source", wrap=True),
    ]
    rows_out(columns, [(s.rows, s.as_of, ", ".join(s.providers), s.name) for s in sources])


def _info_document(
    head: "SnapshotInfo", providers: list[dict[str, object]], sources: "Sequence[SourceInfo]"
) -> dict[str, object]:
    from cavvy.store.snapshot.choose import SHIPPED

    fields = ("as_of", "rows", "rows_with_accelerator", "bytes")
    return {
        "path": str(head.path),
        "shipped": head.path == SHIPPED,
        **{name: getattr(head, name) for name in fields},
        "providers": providers,
        "sources": [
            {name: getattr(source, name) for name in ("name", "as_of", "rows", "providers")}
            for source in sources
        ],
    }


def _head(head: "SnapshotInfo") -> list[tuple[str, object]]:
    from cavvy.store.snapshot.choose import SHIPPED, problem_of_refreshed, refreshed_path

    shipped = head.path == SHIPPED
    pairs: list[tuple[str, object]] = [
        ("In use", f"{head.path} ({'shipped with Cavvy' if shipped else 'refreshed'})"),
        ("Newest price", str(head.as_of)),
        ("Offers", f"{head.rows_with_accelerator:,} with an accelerator ({head.rows:,} in all)"),
        ("Size", f"{head.bytes / 1e6:.1f} MB"),
    ]
    problem = problem_of_refreshed() if shipped else None
    if problem:
        pairs.append(("Not used", f"{refreshed_path()}: {problem}"))
    return pairs


@command.command("refresh")
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="A snapshot: a file, a folder that contains a snapshot, or a URL.",
)
@click.option("--sha256", metavar="HEX", help="The expected SHA-256 of the snapshot.")
@click.option(
    "--provider",
    "providers",
    shell_complete=complete_providers,
    metavar="NAME",
    multiple=True,
    help="Refresh only this provider's prices; repeatable.",
)
def refresh(source: str | None, sha256: str | None, providers: tuple[str, ...]) -> None:
    """Get newer prices, from a snapshot or from the providers' own public price lists.

    The new catalog replaces the old one only after it has been downloaded and checked completely.
    If a provider's price list cannot be read or has a new format, its old prices remain in use, all
    other providers are refreshed, and the exit code is 1.
    """
    from cavvy.store.snapshot.choose import path_in_use
    from cavvy.store.snapshot.refresh import refresh_from

    if source is not None and providers:
        raise click.UsageError("use either --from (a whole snapshot) or --provider (price lists)")
    if sha256 is not None and source is None:
        raise click.UsageError("--sha256 needs --from")
    problems: list[str] = []
    with _errors():
        if source is not None:
            path = refresh_from(source, sha256=sha256)
        else:
            path, problems = _refresh_lists(providers)
        if path_in_use() != path:
            click.echo(
                f"wrote {path}, but the catalog that ships with Cavvy is newer and stays in use"
            )
        else:
            click.echo(_summary(path))
    if problems:
        raise click.ClickException(
            f"{len(problems)} of the sources could not be read; the old prices of their providers "
            "remain in use"
        )


def _summary(path: "Path") -> str:
    from cavvy.domain.units import format_count
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open(path) as snapshot:
        head, doubts = snapshot.info(), _list_doubts(snapshot)
    said = f"{format_count(len(doubts), 'offer')} {'is' if len(doubts) == 1 else 'are'}"
    return "\n".join(
        [
            f"the catalog now has {head.rows:,} offers, the newest from {head.as_of}; `cavvy "
            "catalog diff` shows what changed",
            *([f"{said} in doubt: {doubts[0]}"] if doubts else []),
        ]
    )


def _list_doubts(snapshot: "CatalogSnapshot") -> list[str]:
    """Return why offers are in doubt, compared with the catalog that ships with Cavvy."""
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.choose import SHIPPED

    with CatalogSnapshot.open(SHIPPED) as shipped:
        return snapshot.list_doubts(shipped.make_judge())


def _refresh_lists(wanted: tuple[str, ...]) -> "tuple[Path, list[str]]":
    """Refresh the prices of these providers, or of all providers if `wanted` is empty. Returns the
    path of the new catalog, and a reason for each source that could not be read. If the prices of a
    provider could not be read, the provider's old prices are kept.
    """
    from cavvy.providers.prices import list_sources, list_unavailable
    from cavvy.store.snapshot.refresh import refresh_offers

    sources, unavailable = list_sources(), list_unavailable()
    for name in wanted:
        if name not in sources:
            known = (
                f"{name}: {unavailable[name]}"
                if name in unavailable
                else f"there is no price list for {name!r}"
            )
            raise click.ClickException(
                f"{known}. Providers with a price list: {', '.join(sorted(sources))}."
            )
    today = datetime.now(UTC).date()
    fetched, partial = dict[str, "Sequence[Offer]"](), set[str]()
    problems = list[str]()
    for name in wanted or sources:
        try:
            prices = _fetch_prices(name, sources[name], today, skip_logins=not wanted)
        except click.ClickException as error:  # The other sources are still read.
            problems.append(error.message)
            click.echo(f"prices not refreshed: {error.message}", err=True)
            continue
        if prices is not None:
            fetched[name] = prices.offers
            partial |= set() if prices.complete else {name}
    if problems and not fetched:
        raise click.ClickException("; ".join(problems))
    if not wanted and unavailable:
        click.echo(
            f"prices not refreshed: {', '.join(sorted(unavailable))} "
            "(`cavvy catalog sources` gives the reasons)",
            err=True,
        )
    return refresh_offers(fetched, today=today, partial=partial), problems


def _fetch_prices(
    name: str, source: "PriceSource", today: "date", *, skip_logins: bool
) -> "ProviderPrices | None":
    """Fetch the prices of a provider, or return None if the prices need a login and `skip_logins`
    is set.
    """
    import time

    from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        machines = snapshot.machines(name)
    try:
        query = PriceQuery(
            machines=machines,
            large=not skip_logins,
            today=today,
            progress=_progress,
            pause=time.sleep,
        )
        prices = source.fetch(query)
    except PriceError as error:
        if isinstance(error, NeedsLogin) and skip_logins:
            click.echo(f"prices not refreshed: {name}: {error}", err=True)
            return None
        raise click.ClickException(f"{name}: {error}") from error
    except _UNREADABLE as error:
        raise click.ClickException(
            f"{name}: the format of this source has changed: {source.title} "
            f"({type(error).__name__}: {error}); report this, and use a newer version of Cavvy"
        ) from error
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    click.echo(f"{clear}{name}: {len(prices.offers):,} prices", err=True)
    if prices.unknown_types:
        click.echo(
            f"  {prices.unknown_types:,} instance types of unknown size were left out", err=True
        )
    return prices


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


@command.command("sources")
@output_option
def list_price_sources(output: str) -> None:
    """List the providers whose prices `refresh` can read, and show the reason for each provider
    whose prices `refresh` cannot read.
    """
    from cavvy.providers.prices import list_sources, list_unavailable

    rows = [(name, True, source.title) for name, source in sorted(list_sources().items())]
    rows += [(name, False, reason) for name, reason in sorted(list_unavailable().items())]
    rows_out(
        [
            TableColumn("provider"),
            TableColumn("readable"),
            TableColumn("how", "HOW, OR WHY NOT", wrap=True),
        ],
        rows,
        output,
    )


@command.command("diff")
@click.argument("old", required=False)
@click.argument("new", required=False)
@click.option(
    "--provider", metavar="NAME", shell_complete=complete_providers, help="Only this provider."
)
@count_option("--limit", least=0, default=20, help="The number of changes to show, 0 for all.")
@output_option
def diff(old: str | None, new: str | None, provider: str | None, limit: int, output: str) -> None:
    """Show the differences between two catalogs: new offers, removed offers and changed prices. The
    largest changes come first.

    OLD defaults to the catalog that is shipped with Cavvy, and NEW defaults to the catalog in use.
    """

    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.choose import SHIPPED, path_in_use
    from cavvy.store.snapshot.refresh import compare

    with _errors():
        paths = Path(old) if old else SHIPPED, Path(new) if new else path_in_use()
        with CatalogSnapshot.open(paths[0]) as first, CatalogSnapshot.open(paths[1]) as second:
            changes = compare(first, second, provider)
    _diff_out(changes, limit, output, paths)


def _diff_out(
    changes: "list[OfferChange]", limit: int, output: str, paths: "tuple[Path, Path]"
) -> None:
    counts = {
        kind: sum(change.kind == kind for change in changes)
        for kind in ("new", "gone", "dearer", "cheaper")
    }
    columns = [
        TableColumn("change"),
        TableColumn("offer"),
        TableColumn("old_micros_per_hour", "WAS", drop=1),
        TableColumn("new_micros_per_hour", "IS"),
        TableColumn("ratio", "MOVED", show=lambda ratio: f"{(ratio - 1) * 100:+.1f} %", drop=2),
    ]
    rows = [(change.kind, change.key, change.old, change.new, change.ratio) for change in changes]
    shown = rows[: limit or None] if output == "table" else rows
    title = f"{paths[0]} -> {paths[1]}: " + ", ".join(
        f"{count:,} {kind}" for kind, count in counts.items()
    )
    rows_out(
        columns,
        shown,
        output,
        title if rows else None,
        empty="The two catalogs contain the same offers and prices.",
    )
    if len(shown) < len(rows):
        click.echo(f"{len(shown)} of {len(rows):,} changes; --limit 0 lists all.", err=True)


@contextmanager
def _errors() -> "Iterator[None]":
    """Turn a SnapshotError into an error of the CLI."""
    from cavvy.store.snapshot.layout import SnapshotError

    try:
        yield
    except SnapshotError as error:
        raise click.ClickException(str(error)) from error
