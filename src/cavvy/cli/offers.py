"""`cavvy offers`: lists offers of all providers from the catalog, without a server."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_gpus, complete_regions, providers_option
from cavvy.cli.view.failure import note_out
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.domain.offers import list_sellers
from cavvy.domain.units import (
    UnitError,
    format_memory,
    format_price,
    parse_memory_mib,
    parse_rate,
    read_number,
)
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cavvy.catalog.fit import NearMiss, OfferMatches
    from cavvy.cli.task.market import LiveMarket
    from cavvy.domain.offers import Offer, Readiness
    from cavvy.domain.tasks import ResourceSpec, SpotPolicy
    from cavvy.store.snapshot import CatalogSnapshot

_TABLE_ROWS = 20
_SORTS = ("price", "gpu-price", "memory", "cpus", "gpu-memory", "provider", "region")


# The choices of --reserved and the months of commitment of each; None means any length.
_TERMS = {"any": None, "1y": 12, "3y": 36}


@click.command("offers")
@click.argument("wanted", metavar="[GPU]", required=False, shell_complete=complete_gpus)
@click.option(
    "--gpu",
    metavar="GPU",
    shell_complete=complete_gpus,
    help="Accelerators of each node, such as H100:8, A100:80GB:1..4, A10:0.5, 24GB or tpu; the "
    "same as GPU.",
)
@click.option("--spot", is_flag=True, help="Show only spot capacity, which can be reclaimed.")
@click.option("--on-demand", is_flag=True, help="Show only on-demand capacity.")
@click.option("--ready", is_flag=True, help="Show only offers that a job can use now.")
@click.option(
    "--reserved",
    type=click.Choice(list(_TERMS)),
    is_flag=False,
    flag_value="any",
    help="Show only offers that need a commitment, of any length, of one year or of three years.",
)
@click.option("--max-price", metavar="USD", help="Maximum price of a node per hour.")
@click.option(
    "--region",
    "regions",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_regions,
    help="Show only this region, zone, country or area (such as eu); repeatable.",
)
@providers_option
@click.option("--instance", metavar="TYPE", help="Show only this exact instance type.")
@click.option("--cpus", metavar="N", help="Minimum number of CPUs, or a range such as 8..32.")
@click.option("--memory", metavar="SIZE", help="Minimum memory, such as 64GB, or a range.")
@click.option(
    "--disk",
    metavar="SIZE",
    help="Minimum disk size. Offers whose disk size can be chosen always fit.",
)
@click.option(
    "--sort",
    type=click.Choice(_SORTS),
    default="price",
    help="The order of the offers.",
)
@count_option(
    "--limit", least=0, help="The number of rows, 0 for all.  [default: 20 in tables, else all]"
)
@click.option(
    "--accelerators",
    is_flag=True,
    help="List the known accelerators with values from their data sheets.",
)
@output_option
def command(output: str, accelerators: bool, wanted: str | None, **given: object) -> None:
    """List the machines that you can rent or use, the cheapest first.

    Prices are per node and hour, from the catalog in use (see `cavvy catalog info`). A configured
    provider replaces the catalog's prices in its regions by its own; a configured provider that is
    not in the catalog is only queried if --provider names it. If no offer matches, the command
    shows what to change and exits with 1.

    \b
      cavvy offers A100:8
      cavvy offers --gpu H100:8 --spot --max-price 20 --region eu
      cavvy offers --gpu 'H100|A100:80GB:8' --sort gpu-price
      cavvy offers --gpu TPU-v5e:16
      cavvy offers --cpus 32 --memory 128GB -o json
    """
    if accelerators:
        _list_accelerators(output, given["limit"])
        return
    from cavvy.catalog.tpu_slices import spread_slices
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    _refuse_blank({"GPU": wanted, **given})
    if wanted and given["gpu"]:
        raise click.UsageError(
            f"the accelerators are given twice: {wanted} and --gpu {given['gpu']}; join "
            f"alternatives with |, as in '{wanted}|{given['gpu']}'"
        )
    need = spread_slices(_read_need({**given, "gpu": wanted or given["gpu"]})).needs
    try:
        with CatalogSnapshot.open() as snapshot:
            _list_offers(snapshot, need, given, output)
    except SnapshotError as error:
        raise click.ClickException(str(error)) from error


def _refuse_blank(given: "Mapping[str, object]") -> None:
    """Refuse empty values, which scripts pass if a variable is not set. Raises UsageError."""
    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(each, str) and not each.strip() for each in texts):
            option = {"regions": "--region", "providers": "--provider", "GPU": "GPU"}.get(name)
            raise click.UsageError(
                f"{option or '--' + name.replace('_', '-')} is empty; omit it to list all offers"
            )


# How rejected offers differ from the request, by constraint. Each text completes a sentence such as
# "1,200 cost more".
_FAULTS = {
    "purchase": "have another purchase option (spot or on-demand)",
    "accelerator": "have other accelerators or none",
    "accelerator count": "have another number of accelerators",
    "accelerator memory": "have accelerators with another memory size",
    "instance type": "are of another instance type",
    "cpus": "have other CPUs",
    "memory": "have another amount of memory",
    "disk": "have a smaller disk",
    "network": "have a slower network or do not state its speed",
    "provider": "are at another provider",
    "region": "are in another region",
    "price": "cost more",
}


def _list_offers(
    snapshot: "CatalogSnapshot", need: "ResourceSpec", given: dict[str, object], output: str
) -> None:
    from cavvy.cli.task.market import merge

    limit, sort, reserved = given["limit"], str(given["sort"]), given["reserved"] is not None
    rows = limit if isinstance(limit, int) else _TABLE_ROWS if output == "table" else 0
    by_price, ready = sort == "price", bool(given["ready"])
    market = _ask_configured(snapshot, need, ready)
    is_asked = market.answers and not reserved  # no provider reports offers with a commitment
    own = [*market.match(need, ready=ready).values()] if is_asked else []
    found = merge(own)
    if not ready:
        term = _TERMS[str(given["reserved"])] if reserved else None
        at_most = rows or None if by_price and not own else None
        listed = _match(snapshot, need, at_most, reserved, term)
        found = merge([market.complete(listed), *own]) if own else listed
    if not found.matched:
        sellers = list_sellers(need.providers)
        alone = ready or (sellers and market.answers.keys() >= sellers)
        _explain_nothing(snapshot, need, output, reserved, merge(own) if alone else None)
    offers = found.offers if by_price else sorted(found.offers, key=_sort_key(sort))
    offers = offers[: rows or None]
    _offers_out(offers, market.make_judge(), output)
    if output == "table":
        _remark(_lacking(snapshot, need, reserved), len(offers), found.matched)


def _remark(lines: "Sequence[str]", shown: int, matched: int) -> None:
    for line in lines:
        click.echo(line, err=True)
    if shown < matched:
        click.echo(f"{shown} of {matched:,} matching offers; --limit 0 lists all.", err=True)


def _offers_out(
    offers: "Sequence[Offer]", readiness: "Callable[[Offer], Readiness]", output: str
) -> None:
    from cavvy.cli.task.market import describe_seen, seen_here

    seen = seen_here().values()
    texts = [describe_seen([row for row in seen if _is_of(row.market, offer)]) for offer in offers]
    shown = [
        [*_row(offer), readiness(offer), text] for offer, text in zip(offers, texts, strict=True)
    ]
    about_seen = TableColumn("seen", "SEEN HERE", hidden=not any(texts), wrap=True)
    reserved = any(offer.term_months for offer in offers)
    together = any(offer.hosts > 1 for offer in offers)
    columns = [*_columns(reserved, together), TableColumn("readiness", drop=8), about_seen]
    rows_out(columns, shown, output)
    if together and output == "table":
        click.echo(
            "HOSTS is the number of hosts that form one TPU slice. Each host is one "
            "node, at the shown price.",
            err=True,
        )


def _ask_configured(snapshot: "CatalogSnapshot", need: "ResourceSpec", ready: bool) -> "LiveMarket":
    """Ask all configured providers if `ready` is true; otherwise only the providers that `need`
    names or, if it names none, those that are in the catalog.
    """
    from cavvy.cli.task.market import ask_market

    listed = {provider for provider, _, _ in snapshot.regions()}
    market = ask_market(None if ready else list_sellers(need.providers) or listed)
    for problem in market.list_problems(need):
        note_out(problem)
    return market


def _match(
    snapshot: "CatalogSnapshot",
    need: "ResourceSpec",
    limit: int | None,
    reserved: bool,
    term: int | None,
) -> "OfferMatches":
    """Return the matching offers of the catalog: without a commitment, or with `reserved` only
    those with one, of `term` months or of any length."""
    from cavvy.domain.offers import Purchase

    if not reserved:
        return snapshot.match(need, limit=limit, misses=0)
    found = snapshot.match(
        need, limit=None if term else limit, misses=0, purchases=(Purchase.RESERVED,)
    )
    if term is None:
        return found
    offers = [offer for offer in found.offers if offer.term_months == term]
    return replace(found, offers=offers[:limit], matched=len(offers))


def _is_of(market: str, offer: "Offer") -> bool:
    """Return whether the observed market contains the offer. An offer without a zone covers all
    zones of its region.
    """
    if offer.zone is not None:
        return market == offer.key
    location, kind, purchase = market.rsplit("/", 2)
    own, own_kind, own_purchase = offer.key.rsplit("/", 2)
    return (kind, purchase) == (own_kind, own_purchase) and (
        location == own or location.startswith(f"{own}/")
    )


def _columns(reserved: bool = False, together: bool = False) -> "list[TableColumn]":
    def dollars(usd: float) -> str:
        return format_price(usd).removeprefix("$")

    return [
        TableColumn("provider"),
        TableColumn("region", drop=6),
        TableColumn("zone", drop=2),
        TableColumn("instance_type", "INSTANCE", below=True),
        TableColumn("accelerator", hidden=True),
        TableColumn("accelerator_count", hidden=True),
        TableColumn("accelerator_memory_mib", hidden=True),
        TableColumn("accelerator_part", hidden=True),
        TableColumn("accelerators", "ACCELERATORS"),
        TableColumn("hosts", hidden=not together),
        TableColumn("vcpus", "CPUS", show=lambda value: f"{value:g}", drop=5),
        TableColumn("memory_mib", "MEMORY", show=format_memory, drop=4),
        TableColumn("disk_gib", hidden=True),
        TableColumn("network_mbps", hidden=True),
        TableColumn("purchase", "PURCHASE"),
        TableColumn("term_months", "MONTHS", hidden=not reserved),
        TableColumn("price_usd_hr", "USD/H", show=dollars),
        TableColumn("accelerator_price_usd_hr", "EACH/H", show=dollars, drop=3),
        TableColumn("as_of", "AS OF", drop=1),
        TableColumn("source", hidden=True),
    ]


def _row(offer: "Offer") -> "list[object]":
    price = float(offer.rate.usd)
    devices = offer.accelerator_count * offer.accelerator_part
    each = round(price / devices, 6) if devices else None
    size = f" {offer.accelerator_memory_mib // 1024}GB" if offer.accelerator_memory_mib else ""
    return [
        offer.provider,
        offer.region,
        offer.zone,
        offer.instance_type,
        offer.accelerator,
        offer.accelerator_count,
        offer.accelerator_memory_mib or None,
        offer.accelerator_part if offer.accelerator else None,
        f"{offer.accelerators_text} x {offer.accelerator}{size}" if offer.accelerator else None,
        offer.hosts,
        _whole(offer.vcpus) if offer.vcpus else None,
        offer.memory_mib or None,
        offer.disk_gib,
        offer.network_mbps,
        str(offer.purchase),
        offer.term_months or None,
        price,
        each,
        str(offer.as_of) if offer.as_of else None,
        offer.source,
    ]


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _read_need(given: dict[str, object]) -> "ResourceSpec":
    from cavvy.catalog.needs import NeedError, parse_accelerator
    from cavvy.domain.tasks import ResourceSpec

    try:
        cpus = _read_range("--cpus", given["cpus"], read_number)
        memory = _read_range("--memory", given["memory"], parse_memory_mib)
        disk = _read_range("--disk", given["disk"], parse_memory_mib)[0]
        rate = parse_rate(str(given["max_price"])) if given["max_price"] else None
        gpus = parse_accelerator(str(given["gpu"])) if given["gpu"] else ()
    except (UnitError, NeedError) as error:
        raise click.UsageError(str(error)) from error
    return ResourceSpec(
        instance=_words(given["instance"])[0] if given["instance"] else None,
        accelerators=gpus,
        cpus_min=cpus[0],
        cpus_max=cpus[1],
        memory_min_mib=int(memory[0]) if memory[0] is not None else None,
        memory_max_mib=int(memory[1]) if memory[1] is not None else None,
        disk_gib=int(disk) // 1024 if disk is not None else None,
        spot=_read_spot(given),
        providers=tuple(name.lower() for name in _words(given["providers"])),
        regions=_words(given["regions"]),
        max_rate=rate,
    )


def _read_spot(given: dict[str, object]) -> "SpotPolicy":
    from cavvy.domain.tasks import SpotPolicy

    options = {"spot": "--spot", "on_demand": "--on-demand", "reserved": "--reserved"}
    if len(both := [text for name, text in options.items() if given[name]]) > 1:
        raise click.UsageError(
            f"{' and '.join(both)} cannot be used together; without these options offers on demand "
            "and on spot are listed"
        )
    if given["ready"] and given["reserved"]:
        raise click.UsageError(
            "--ready and --reserved cannot be used together: jobs use a commitment by the settings "
            "of a provider, which `cavvy cost reserve` explains"
        )
    if given["spot"]:
        return SpotPolicy.ONLY
    return SpotPolicy.NEVER if given["on_demand"] else SpotPolicy.AUTO


def _words(value: object) -> tuple[str, ...]:
    """Split the comma-separated values of a repeatable option."""
    texts = value if isinstance(value, tuple) else (value,)
    return tuple(word.strip() for text in texts for word in str(text).split(",") if word.strip())


def _read_range(
    option: str, value: object, read: "Callable[[str], float]"
) -> "tuple[float | None, float | None]":
    """Read the lower and upper bound of a range. `8` and `8+` mean at least 8; `8..32`, `8..` and
    `..32` are ranges, with or without a bound on each side.
    """

    if value is None:
        return None, None
    low, dots, high = str(value).removesuffix("+").partition("..")
    try:
        least, most = (read(end) if end.strip() else None for end in (low, high))
    except ValueError as error:
        raise click.UsageError(
            f"{option}: {error if isinstance(error, UnitError) else f'{value!r} is not a number'}"
        ) from None
    if (
        (least is None and most is None)
        or min(least or 0, most or 0) < 0
        or (least is not None and most is not None and least > most)
    ):
        raise click.UsageError(f"{option}: expected a size or a range such as 8..32, not {value!r}")
    return least, most if dots else None


def _sort_key(name: str) -> "Callable[[Offer], tuple[float | str, ...]]":
    def key(offer: "Offer") -> "tuple[float | str, ...]":
        price = offer.rate.micros_per_hour
        match name:
            case "gpu-price":
                devices = offer.accelerator_count * offer.accelerator_part
                return (devices == 0, price / (devices or 1), price)
            case "memory":
                return (-offer.memory_mib, price)
            case "cpus":
                return (-offer.vcpus, price)
            case "gpu-memory":
                return (-offer.accelerator_memory_mib * offer.accelerator_count, price)
            case "provider":
                return (offer.provider, price)
            case "region":
                return (offer.region, price)
            case _:
                return (price,)

    return key


def _explain_nothing(
    snapshot: "CatalogSnapshot",
    need: "ResourceSpec",
    output: str,
    reserved: bool,
    live: "OfferMatches | None",
) -> None:
    """Explain why nothing matches and what to change, and exit with 1."""
    from cavvy.catalog.fit import Constraint
    from cavvy.cli.task.unknown import unknown_names
    from cavvy.domain.offers import Purchase

    only = (Purchase.RESERVED,) if reserved else None
    found = live or snapshot.match(need, limit=0, misses=5, purchases=only)
    if reserved:  # an offer without a commitment is no near miss
        misses = [each for each in found.misses if each.constraint is not Constraint.PURCHASE]
        found = replace(found, misses=misses)
    if output != "table":
        rows_out(_columns(), [], output)
    unknown = "" if live else unknown_names(snapshot, need)
    lines = ["No offer matches.", *_why(found), *map(_nearest, found.misses)]
    lines += _lacking(snapshot, need, reserved)
    click.echo(unknown or "\n".join(lines), err=True)
    raise click.exceptions.Exit(1)


def _lacking(snapshot: "CatalogSnapshot", need: "ResourceSpec", reserved: bool) -> list[str]:
    """For each large cloud where requested spot or reserved prices are missing from the catalog,
    return the reason.
    """
    from cavvy.cli.task.market import list_lacking_prices
    from cavvy.domain.offers import Purchase
    from cavvy.domain.tasks import SpotPolicy

    wanted = {Purchase.RESERVED} if reserved else set()
    if need.spot is SpotPolicy.ONLY:
        wanted.add(Purchase.SPOT)
    return list_lacking_prices(snapshot, wanted, need.providers)


def _why(found: "OfferMatches") -> list[str]:
    counted = ", ".join(
        f"{rows:,} {_FAULTS[constraint]}" for constraint, rows in found.rejected.items()
    )
    if not found.total:
        return ["No configured provider has an offer; `cavvy setup PROVIDER` sets one up."]
    lines = [f"Of {found.total:,} offers {counted}."]
    return (
        [*lines, "Nearest misses, each of which fails only one condition:"]
        if found.misses
        else lines
    )


def _nearest(miss: "NearMiss") -> str:
    from cavvy.catalog.fit import Constraint

    offer = miss.offer
    option = {
        Constraint.PURCHASE: f"omit --{'spot' if offer.purchase != 'spot' else 'on-demand'}",
        Constraint.ACCELERATOR: f"--gpu {offer.accelerator}:{offer.accelerator_count}",
        Constraint.COUNT: f"--gpu {offer.accelerator}:{offer.accelerator_count}",
        Constraint.ACCELERATOR_MEMORY: (
            f"--gpu {offer.accelerator}:{offer.accelerator_memory_mib // 1024}GB:"
            f"{offer.accelerator_count}"
        ),
        Constraint.CPUS: f"--cpus {offer.vcpus:g}",
        Constraint.MEMORY: f"--memory {offer.memory_mib // 1024}GB",
        Constraint.DISK: f"--disk {offer.disk_gib}GB",
        Constraint.PROVIDER: f"--provider {offer.provider}",
        Constraint.REGION: f"--region {offer.region}",
        Constraint.PRICE: f"--max-price {_cents(offer.rate.micros_per_hour)}",
    }.get(miss.constraint, "")
    where = f"{offer.provider} {offer.zone or offer.region} {offer.instance_type}"
    return f"  {where}: {miss.text}" + (f"  [{option}]" if option else "")


def _cents(micros: int) -> str:
    """Return the amount in dollars, rounded up, so that a price limit of this amount admits the
    offer.
    """
    return f"{-(-micros // 10_000) / 100:.2f}"


def _list_accelerators(output: str, limit: object) -> None:
    from cavvy.catalog.accelerators import Precision, list_accelerators

    def tera(value: float) -> str:
        return f"{value / 1e12:g}"

    columns = [
        TableColumn("name"),
        TableColumn("vendor", drop=4),
        TableColumn("kind", drop=2),
        TableColumn("announced", drop=3),
        TableColumn("memory_gib", "GB", show=lambda sizes: "/".join(map(str, sizes)), right=True),
        TableColumn("bandwidth_gb_s", "GB/S", show=lambda value: f"{value:g}"),
        *(
            TableColumn(f"{precision}_flops", str(precision).upper(), show=tera, drop=6)
            for precision in Precision
        ),
        TableColumn("interconnect", drop=1),
        TableColumn("tdp_w", "W", drop=5),
        TableColumn("source", hidden=True),
    ]
    rows = [
        [
            row.name,
            str(row.vendor),
            str(row.kind),
            row.year,
            [memory.mib // 1024 for memory in row.memory],
            row.bandwidth(),
            *(row.peak.get(precision) for precision in Precision),
            row.interconnect,
            row.tdp_w,
            row.source,
        ]
        for row in list_accelerators()[: limit if isinstance(limit, int) and limit else None]
    ]
    title = (
        "Dense TFLOP/s (TOP/s for INT8) of one accelerator, from its vendor's data sheet."
        if output == "table"
        else None
    )
    rows_out(columns, rows, output, title)
