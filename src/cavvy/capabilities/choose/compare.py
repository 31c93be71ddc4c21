"""`cavvy compare`: compares the accelerators of several providers by price and performance."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_gpus, providers_option
from cavvy.cli.task.load import yes_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import NumberRange, count_option
from cavvy.cli.view.output import TableColumn, json_out, output_option, rows_out, text_out
from cavvy.domain.units import format_price
from cavvy.domain.values import Struct, replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.capabilities.choose.comparison import ComparedAccelerator
    from cavvy.catalog.accelerators import Precision
    from cavvy.cli.task.place_runs import PlaceRun
    from cavvy.domain.facts import Fact
    from cavvy.domain.tasks import ResourceSpec
    from cavvy.planner.placements import Placement

_ROWS = 25  # rows of a table by default
_DRAWN = 60  # points of a chart
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("compare")
@click.argument("what", metavar="[GPU|TASK.YAML]...", nargs=-1, shell_complete=complete_gpus)
@providers_option
@click.option("--region", "regions", metavar="NAME", multiple=True, help="Only here; repeatable.")
@click.option(
    "--precision",
    type=click.Choice(_PRECISIONS),
    default="bf16",
    help="The peak rate by which prices are divided.",
)
@count_option("--limit", least=0, help="Rows, 0 for all.  [default: 25 in tables]")
@click.option(
    "--report", type=_FILE, help="Write a report with charts: .html, or .pdf by Chromium."
)
@click.option("--plot", type=_FILE, help="Draw price against performance (.svg).")
@click.option("--timeline", type=_FILE, help="Draw the generations of accelerators (.svg).")
@click.option(
    "--benchmark",
    "script",
    metavar="TRAIN.PY",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run this script as a job at each --provider and on each GPU, and compare the runs.",
)
@click.option(
    "--seconds", type=NumberRange(min=1), default=60, help="How long to measure each run."
)
@click.option("--samples", type=NumberRange(min=1), help="Samples of the whole work, for its cost.")
@yes_option
@output_option
def command(
    what: tuple[str, ...],
    providers: tuple[str, ...],
    regions: tuple[str, ...],
    precision: str,
    limit: int | None,
    report: Path | None,
    plot: Path | None,
    timeline: Path | None,
    script: Path | None,
    seconds: float,
    samples: float | None,
    yes: bool,
    output: str,
) -> None:
    """Compare prices, specifications and regions of accelerators across providers.

    Prices are of one accelerator and hour, the lowest of each purchase option. `-o json` lists each
    figure with its source and date. For a task, only machines that fit are compared, with time and
    cost of the whole task where its file states the work.

    \b
      cavvy compare H100 A100:80GB MI300X
      cavvy compare task.yaml --report report.html
      cavvy compare --benchmark train.py --provider local --provider aws --yes
    """
    from cavvy.catalog.accelerators import Precision

    for path in (plot, timeline):
        if path is not None and path.suffix.lower() != ".svg":
            raise CommandFailure(f"{path}: charts are SVG files", "end the name with .svg", 2)
    chosen = Precision(precision)
    if script is not None:
        runs = _run_places(script, what, providers, seconds, samples, yes)
        _runs_out(runs, report, output)
        return
    compared = _compare(what, providers, regions)
    if not compared.rows:
        raise CommandFailure(
            f"nothing to compare: {compared.unknown or 'no offer with an accelerator matches'}",
            "" if compared.unknown else "`cavvy offers --accelerators` lists the accelerators",
        )
    _write_files(compared, chosen, report, plot, timeline)
    most = len(compared.rows) if limit == 0 or (limit is None and output == "json") else limit
    rows = _take(compared.rows, what, most or _ROWS)
    if output == "json":
        json_out(_make_document(compared, rows, chosen))
    else:
        rows_out(_columns(compared), [_make_row(compared, each, chosen) for each in rows], output)
        if output == "table" and len(rows) < len(compared.rows):
            click.echo(f"{len(rows)} of {len(compared.rows)} rows; --limit 0 shows all.", err=True)
        if output == "table":
            _lacking_out({each.provider for each in rows})


def _lacking_out(providers: set[str]) -> None:
    """Say which prices of these providers the catalog does not have, and why."""
    from cavvy.catalog.tables import list_unlisted_reasons
    from cavvy.cli.task.market import list_lacking_prices
    from cavvy.domain.offers import Purchase
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    wanted = (Purchase.SPOT, Purchase.RESERVED)
    try:
        with CatalogSnapshot.open() as snapshot:
            lacking = list_lacking_prices(snapshot, wanted, providers)
            counts = snapshot.unpriced()
    except SnapshotError:
        return
    for each in lacking:
        text_out(f"\n{each}.", sys.stderr)
    told = list_unlisted_reasons().keys()
    for purchase in wanted:
        others = [
            name
            for (name, which), (without, total) in counts.items()
            if which is purchase and without == total and name in providers
            if (name, purchase) not in told
        ]
        if others:
            text_out(
                f"\nThe price tables have no {purchase} prices of {', '.join(sorted(others))}.",
                sys.stderr,
            )


def _take(
    rows: "Sequence[ComparedAccelerator]", what: tuple[str, ...], limit: int
) -> "Sequence[ComparedAccelerator]":
    """Return the first rows, with as many of each accelerator that was asked for as of the
    others."""
    from cavvy.capabilities.choose.comparison import take_evenly
    from cavvy.catalog.accelerators import names_matching

    asked = [each.partition(":")[0] for each in what if not each.endswith((".yaml", ".yml"))]
    groups = [set(names_matching(each) or ()) for each in asked]
    return take_evenly(rows, groups, limit)


class _Comparison(Struct, frozen=True, kw_only=True):
    """The rows, what this installation has seen of each, and for a task the best placement of each
    provider and accelerator."""

    title: str
    rows: "Sequence[ComparedAccelerator]"
    seen: "Sequence[str | None]"
    placements: "dict[tuple[str, str, int], Placement]"
    unknown: str  # says which names the catalog does not have, if there are no rows

    def find_placement(self, row: "ComparedAccelerator") -> "Placement | None":
        return self.placements.get((row.provider, row.accelerator, row.memory_mib))


def _compare(
    what: tuple[str, ...], providers: tuple[str, ...], regions: tuple[str, ...]
) -> _Comparison:
    from cavvy.capabilities.choose.comparison import compare_offers
    from cavvy.cli.task.market import describe_seen, list_offers, seen_here

    files = [each for each in what if each.endswith((".yaml", ".yml"))]
    if files and len(what) > 1:
        raise CommandFailure("one task is compared alone", f"omit all but {files[0]}", 2)
    title = ", ".join(what) or "all accelerators"
    need, placements = _read_task(files[0]) if files else (_read_need(what), {})
    changed = replace(need, providers=providers or need.providers, regions=regions or need.regions)
    rows = compare_offers(list_offers(changed))
    observed = seen_here().values()
    seen = [
        describe_seen(
            [
                each
                for each in observed
                if each.market.split("/")[0] == row.provider
                and each.market.rsplit("/", 2)[1].rpartition(":")[0] in row.types
            ]
        )
        for row in rows
    ]
    unknown = "" if rows else _explain_unknown(changed)
    return _Comparison(title=title, rows=rows, seen=seen, placements=placements, unknown=unknown)


def _explain_unknown(need: "ResourceSpec") -> str:
    from cavvy.cli.task.unknown import unknown_names
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        return unknown_names(snapshot, need)


def _read_need(what: tuple[str, ...]) -> "ResourceSpec":
    """Return a request for any number of these accelerators. Raises CommandFailure."""
    from cavvy.catalog.needs import MOST, NeedError, parse_accelerator
    from cavvy.domain.tasks import ResourceSpec, SpotPolicy

    try:
        needs = [
            need for each in what or ("gpu", "tpu", "Trainium") for need in parse_accelerator(each)
        ]
    except NeedError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    wide = [replace(each, count_min=1, count_max=MOST) for each in needs]
    return ResourceSpec(accelerators=tuple(wide), spot=SpotPolicy.AUTO)


def _read_task(file: str) -> "tuple[ResourceSpec, dict[tuple[str, str, int], Placement]]":
    """Return what the task needs, and its best placement by provider and accelerator. Raises
    CommandFailure."""
    from datetime import UTC, datetime

    from cavvy.cli.task.available import gather
    from cavvy.cli.task.load import read_task
    from cavvy.cli.task.profiles import with_rates
    from cavvy.planner.rank import plan

    task = with_rates(read_task(file, {}).task, Path(file).parent)
    offered = gather(task, anywhere=True, output_mib=None)
    made = plan(task, offered.offers, now=datetime.now(UTC), situation=offered.situation)
    best: dict[tuple[str, str, int], Placement] = {}
    for placement in made.placements:
        offer = placement.offer
        key = offer.provider, offer.accelerator or "", offer.accelerator_memory_mib
        best.setdefault(key, placement)
    return task.resources, best


def _columns(compared: _Comparison) -> "list[TableColumn]":
    def dollars(value: float) -> str:
        return format_price(value).removeprefix("$")

    return [
        TableColumn("provider"),
        TableColumn("accelerator"),
        TableColumn("memory_gib", "GIB"),
        TableColumn("bandwidth_gb_s", "GB/S", show=lambda value: f"{value:g}", drop=4),
        TableColumn("tflops", "TFLOP/S", show=lambda value: f"{value:g}", drop=5),
        TableColumn("on_demand_usd_hr", "ON-DEMAND", dollars),
        TableColumn("spot_usd_hr", "SPOT", dollars),
        TableColumn("reserved_12m_usd_hr", "1 YEAR", dollars, drop=9),
        TableColumn("reserved_36m_usd_hr", "3 YEARS", dollars, drop=8),
        TableColumn("usd_hr_per_tflops", "$/TFLOP/S", lambda value: f"{value:.5f}", drop=7),
        TableColumn("usd_hr_per_memory_gib", "$/GIB", lambda value: f"{value:.4f}", drop=6),
        TableColumn("usd_hr_per_bandwidth_gb_s", "$/GB/S", lambda value: f"{value:.5f}", drop=3),
        TableColumn("interconnect", drop=1),
        TableColumn("network_gbps", "GBIT/S", show=lambda value: f"{value:g}", drop=2),
        TableColumn("regions", "REGIONS", show=lambda names: str(len(names)), right=True, drop=5),
        TableColumn("quota_nodes", "QUOTA", hidden=all(r.quota is None for r in compared.rows)),
        TableColumn("seen", "SEEN HERE", hidden=not any(compared.seen), wrap=True),
        TableColumn("time_s", "TIME", _length, hidden=not compared.placements),
        TableColumn("cost_micros", "TOTAL", hidden=not compared.placements),
    ]


def _length(seconds: float) -> str:
    from datetime import timedelta

    from cavvy.domain.units import format_duration

    return format_duration(timedelta(seconds=seconds))


def _make_row(
    compared: _Comparison, row: "ComparedAccelerator", precision: "Precision"
) -> dict[str, object]:
    from cavvy.capabilities.choose.comparison import OPTIONS, list_facts, name_price

    values = {fact.name: fact.value for fact in list_facts(row)}
    names = ["bandwidth_gb_s", "memory_gib", "network_gbps"]
    names += ["usd_hr_per_memory_gib", "usd_hr_per_bandwidth_gb_s"]
    names += [name_price(*option) for option in OPTIONS]
    placement = compared.find_placement(row)
    wall = placement.wall_time if placement else None
    return {
        "provider": row.provider,
        "accelerator": row.accelerator,
        **{name: values.get(name) for name in names},
        "memory_gib": row.memory_mib // 1024,
        "tflops": values.get(f"{precision}_tflops"),
        "usd_hr_per_tflops": values.get(f"usd_hr_per_{precision}_tflops"),
        "interconnect": row.model.interconnect if row.model else None,
        "regions": list(row.regions),
        "quota_nodes": row.quota,
        "seen": compared.seen[list(compared.rows).index(row)],
        "time_s": None if wall is None else wall.total_seconds(),
        "cost_micros": placement.cost.micros if placement and placement.cost else None,
    }


def _make_document(
    compared: _Comparison, rows: "Sequence[ComparedAccelerator]", precision: "Precision"
) -> list[dict[str, object]]:
    """Return each row with all its figures and their sources."""
    from cavvy.capabilities.choose.comparison import list_facts
    from cavvy.domain.values import asdict

    return [
        {
            **_make_row(compared, row, precision),
            "facts": [asdict(fact) for fact in list_facts(row)],
        }
        for row in rows
    ]


def _write_files(
    compared: _Comparison,
    precision: "Precision",
    report: Path | None,
    plot: Path | None,
    timeline: Path | None,
) -> None:
    from cavvy.capabilities.choose.report import write_report
    from cavvy.cli.view.output_file import write_text

    if plot is not None:
        write_text(plot, _draw_prices(compared, precision))
    if timeline is not None:
        from cavvy.capabilities.choose.diagrams import draw_generations

        write_text(timeline, draw_generations({row.accelerator for row in compared.rows}))
    if report is not None:
        write_report(report, _make_report(compared, precision))


def _draw_prices(compared: _Comparison, precision: "Precision") -> str:
    from cavvy.capabilities.choose.drawing import ChartPoint, draw_points
    from cavvy.domain.offers import Purchase

    points = []
    several = len({row.accelerator for row in compared.rows[:_DRAWN]}) > 1
    for row in compared.rows[:_DRAWN]:
        rate = row.model.peak.get(precision) if row.model else None
        for purchase in (Purchase.ON_DEMAND, Purchase.SPOT):
            price = row.price(purchase)
            if rate and price:
                note = (
                    f"{row.provider} {row.accelerator}, {purchase}: {format_price(price)} an hour"
                )
                label = f"{row.accelerator} {row.provider}" if several else row.provider
                points.append(ChartPoint(rate / 1e12, price, label, str(purchase), note))
    return draw_points(
        "Lowest price against peak performance",
        points,
        f"TFLOP/s ({precision}, dense, from data sheets)",
        "US dollars per accelerator and hour",
    )


def _make_report(compared: _Comparison, precision: "Precision") -> str:
    from cavvy.capabilities.choose.comparison import list_facts
    from cavvy.capabilities.choose.diagrams import draw_generations
    from cavvy.capabilities.choose.report import ReportSection, ReportTable, make_page

    columns = [each for each in _columns(compared) if not each.hidden]
    rows = [_make_row(compared, each, precision) for each in compared.rows]
    facts = [
        replace(
            fact, name=f"{row.provider} {row.accelerator} {row.memory_mib // 1024} GiB: {fact.name}"
        )
        for row in compared.rows
        for fact in [*list_facts(row), *_list_forecast(compared, row)]
    ]
    cells = [[_cell(row[each.name]) for each in columns] for row in rows]
    sections = [
        ReportSection(
            title="Price against performance",
            texts=[
                "Prices are of one accelerator and hour, the lowest of each purchase option; the "
                "lower one without a commitment is divided by rates, memory and bandwidth. Peak "
                "rates are those of the vendors' data sheets; no program reaches them."
            ],
            pictures=[_draw_prices(compared, precision)],
        ),
        ReportSection(
            title="Comparison",
            table=ReportTable(heads=[each.title or each.name for each in columns], rows=cells),
        ),
        ReportSection(
            title="Generations",
            pictures=[draw_generations({row.accelerator for row in compared.rows})],
        ),
    ]
    return make_page(f"Comparison: {compared.title}", sections, facts)


def _list_forecast(compared: _Comparison, row: "ComparedAccelerator") -> "list[Fact]":
    """Return the time and cost of the task on this accelerator, as `cavvy plan` states them."""
    from cavvy.domain.facts import Fact

    placement = compared.find_placement(row)
    if placement is None:
        return []
    time, cost = placement.wall_time, placement.cost
    values = {
        "time_s": time.total_seconds() if time else None,
        "cost_micros": float(cost.micros) if cost else None,
    }
    source = f"`cavvy plan {compared.title}`: {placement.offer.key}"
    return [
        Fact(name=name, value=value, unit=name, source=source, as_of=placement.offer.as_of)
        for name, value in values.items()
        if value is not None
    ]


def _cell(value: object) -> object:
    return len(value) if isinstance(value, list) else value


def _run_places(
    script: Path,
    what: tuple[str, ...],
    providers: tuple[str, ...],
    seconds: float,
    samples: float | None,
    yes: bool,
) -> "Sequence[PlaceRun]":
    from cavvy.cli.task.place_runs import run_places

    if len(what or (None,)) * len(providers or (None,)) < 2:
        raise CommandFailure(
            "a comparison needs two or more places",
            "repeat --provider, or name several GPUs: cavvy compare --benchmark train.py "
            "--provider local --provider aws",
            2,
        )
    return run_places(script, what, providers, seconds=seconds, samples=samples, consent=yes)


def _runs_out(runs: "Sequence[PlaceRun]", report: Path | None, output: str) -> None:
    from cavvy.cli.task.place_runs import list_run_facts

    columns = [
        TableColumn("place"),
        TableColumn("machine", drop=2),
        TableColumn("start_s", "START", _length),
        TableColumn("samples_per_s", "SAMPLES/S", lambda rate: f"{rate:,.1f}"),
        TableColumn("usd_hr", "USD/H", lambda usd: f"{usd:,.{2 if usd >= 0.1 else 4}f}"),
        TableColumn("usd_per_1000", "USD/1,000", lambda usd: f"{usd:.4g}", drop=1),
        TableColumn("finish_s", "TO FINISH", _length),
        TableColumn("finish_usd", "COST TO FINISH", lambda usd: f"{usd:,.4g}"),
        TableColumn("outcome"),
        TableColumn("job"),
    ]
    rows_out(columns, runs, output)
    if report is not None:
        from cavvy.capabilities.choose.drawing import draw_bars
        from cavvy.capabilities.choose.report import (
            ReportSection,
            ReportTable,
            make_page,
            write_report,
        )

        bars = [(each.place, {"samples/s": each.samples_per_s or 0.0}) for each in runs]
        costs = [(each.place, {"cost": each.finish_usd or 0.0}) for each in runs]
        cells = [[getattr(each, column.name) for column in columns] for each in runs]
        section = ReportSection(
            title="Measured",
            texts=["Each row is a job of one script, measured after its first report."],
            pictures=[
                draw_bars("Measured throughput", bars, "samples/s"),
                draw_bars("Cost to finish", costs, "USD"),
            ],
            table=ReportTable(heads=[each.title or each.name for each in columns], rows=cells),
        )
        write_report(report, make_page("Measured comparison", [section], list_run_facts(runs)))
    if any(each.samples_per_s is None for each in runs):
        raise CommandFailure(
            "some places reported no progress",
            "`cavvy logs JOB` shows a job's output; scripts report by `cavvy.train` or by lines "
            'such as CAVVY_PROGRESS {"done": 1280}',
        )
