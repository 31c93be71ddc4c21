"""`cavvy tco`: compares the costs of rented machines, own machines and a mix over years."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, json_option, json_out, rows_out, text_out
from cavvy.domain.values import Struct, replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.capabilities.choose.ownership import (
        CostAssumption,
        CostSpread,
        OwnershipForecast,
        OwnershipPlan,
        TornadoRow,
    )
    from cavvy.domain.facts import Fact

_FILE = click.Path(dir_okay=False, path_type=Path)
_HOURS_PER_MONTH = 730
# how each kind of cost is computed; "x hours" are those of all months of the plan
_FORMULAS = {
    "purchase": "own machines x (price + setup once), the price again after each life",
    "spares": "own machines x price x spares",
    "sale of old machines": "- residual x price x machines that are replaced",
    "sale at the end": "- price x residual^(age / life) x own machines",
    "power": "own machines x kW x (idle + (1 - idle) x use) x PUE x tariff x hours",
    "cooling": "own machines x cooling x years",
    "space": "own machines x kW x space x years",
    "network": "own machines x network x years",
    "staff": "own machines x persons x salary x years",
    "maintenance": "own machines x price x maintenance x years",
    "reserved machines": "reserved machines x price x hours",
    "spot machines": "rest x spot share x (1 + overhead) x price x trend x hours",
    "machines on demand": "rest x (1 - spot share) x price x trend x hours",
    "storage": "GB x price x months",
    "egress": "GB a month x price x months",
    "total": "sum of the costs",
    "present value": "sum of each month's costs / (1 + capital rate)^(month / 12)",
}


@click.command("tco")
@click.argument("file", metavar="PLAN.YAML", type=click.Path(dir_okay=False))
@click.option(
    "--report", type=_FILE, help="Write a report with charts: .html, or .pdf by Chromium."
)
@count_option("--runs", least=0, most=100_000, default=1000, help="Random plans; 0 for none.")
@count_option("--seed", least=0, default=1, help="The seed of the random plans.")
@json_option
def command(file: str, report: Path | None, runs: int, seed: int, output: str) -> None:
    """Show what the same work costs on rented machines, on own machines and on a mix.

    The plan states the machines, their use, and prices. What it omits comes from the catalog (with
    `gpu`), data sheets and published defaults; all assumptions are listed with their sources. The
    reference page "Comparing, owning, deciding" describes the values.

    \b
      cavvy tco plan.yaml

    \b
    A plan is, for example:
      machines: 4
      gpu: H100:8
      use: 60%
      owned: {price_usd: 300000}
    """
    from random import Random

    from cavvy.capabilities.choose.ownership import (
        forecast_ownership,
        make_tornado,
        simulate_ownership,
    )
    from cavvy.capabilities.choose.plan_values import load_cost_plan

    plan = load_cost_plan(file)
    found = _Study(
        plan=plan,
        forecast=forecast_ownership(plan),
        tornado=make_tornado(plan),
        spread=None,
    )
    if runs:
        hidden = not sys.stderr.isatty()
        bar = click.progressbar(range(runs), label="random plans", file=sys.stderr, hidden=hidden)
        with bar as numbers:
            spread = simulate_ownership(plan, Random(seed), numbers)
        found = replace(found, spread=spread)
    if report is not None:
        from cavvy.capabilities.choose.report import write_report

        write_report(report, _make_report(found))
    if output == "json":
        json_out(_make_document(found))
    else:
        _show(found)


class _Study(Struct, frozen=True, kw_only=True):
    plan: "OwnershipPlan"
    forecast: "OwnershipForecast"
    tornado: "Sequence[TornadoRow]"
    spread: "CostSpread | None"


def _dollars(value: float) -> str:
    return f"{value:,.0f}"


def _list_kinds(study: _Study) -> list[tuple[object, ...]]:
    options = study.forecast.options
    kinds = dict.fromkeys(kind for option in options for kind in option.kinds)
    rows: list[tuple[object, ...]] = [
        (kind, *(round(option.kinds.get(kind, 0.0)) for option in options))
        for kind in kinds
        if any(round(option.kinds.get(kind, 0.0)) for option in options)
    ]
    rows.append(("total", *(round(option.total) for option in options)))
    return [*rows, ("present value", *(round(option.present) for option in options))]


def _say_break_even(study: _Study) -> list[str]:
    forecast, values = study.forecast, study.plan.values
    months, use = forecast.break_even_months, forecast.break_even_use
    if months is None:
        said = [f"Owning does not cost less than renting within {values['years']:g} years."]
    else:
        hours = months * _HOURS_PER_MONTH * values["use"]
        said = [
            f"Owning costs less than renting after {months:.1f} months "
            f"({hours:,.0f} hours of work of each machine)."
        ]
    if use is None:
        said.append("At no use does owning cost less over the whole plan.")
    elif not use:
        said.append("At any use owning costs less over the whole plan.")
    else:
        said.append(
            f"Owning costs less over the whole plan if machines work more than {use:.0%} of the "
            f"hours; the plan has {values['use']:.0%}."
        )
    if study.spread is not None:
        said.append(
            f"Owning costs less in {study.spread.owning_wins:.0%} of {study.spread.runs:,} random "
            "plans within the ranges of the assumptions."
        )
    return said


def _say_cheapest(study: _Study) -> str:
    """Return the answer: the cheapest option, and what it and the others cost."""
    years, cheapest = study.plan.values["years"], study.forecast.cheapest
    others = sorted(study.forecast.options, key=lambda each: each.present)
    rest = ", ".join(
        f"{each.name} ${each.present:,.0f}" for each in others if each.name != cheapest.name
    )
    return (
        f"Cheapest over {years:g} years: {cheapest.name}, ${cheapest.present:,.0f} (present value; "
        f"{rest})."
    )


def _say_weak(study: _Study) -> list[str]:
    """Return which values have weak sources, those that change the result most first."""
    assumptions = study.plan.assumptions
    names = dict.fromkeys([row.assumption.name for row in study.tornado] + list(assumptions))
    weak = [name for name in names if assumptions[name].weak]
    if not weak:
        return []
    return [
        f"{len(weak)} of {len(assumptions)} values have weak sources, which are assumptions or "
        f"pages that name no data: {', '.join(weak)}.",
        "State what you know, with its source, such as `owned: {maintenance: {value: 6%, source: "
        "offer of 3 May}}`.",
    ]


def _list_changes(study: _Study) -> list[tuple[str, float, float]]:
    """Return the values at which the answer between owning and renting changes."""
    from cavvy.capabilities.choose.ownership import find_change

    names = [row.assumption.name for row in study.tornado[:5]]
    changes = [(name, find_change(study.plan, name)) for name in dict.fromkeys(["use", *names])]
    values = study.plan.values
    return [(name, values[name], round(at, 4)) for name, at in changes if at is not None]


def _show(study: _Study) -> None:
    spread = study.spread
    heads = [TableColumn("cost", "US DOLLARS")]
    heads += [TableColumn(each.name, show=_dollars) for each in study.forecast.options]
    rows = _list_kinds(study)
    if spread is not None:
        for number, name in enumerate(("5 % of random plans", "50 %", "95 %")):
            rows.append((name, *(round(each[number]) for each in spread.percentiles.values())))
    for line in (_say_cheapest(study), *_say_break_even(study), *_say_weak(study)):
        text_out(line)
    click.echo()
    rows_out(heads, rows, title=f"{study.plan.name}: {study.plan.values['years']:g} years")
    if changes := _list_changes(study):
        click.echo("\nOwning and renting would cost the same at:")
        rows_out(["value", "plan", "equal_at"], changes)
    click.echo("\nWhat the result depends on (present value of owning minus renting):")
    rows_out(
        [
            TableColumn("assumption"),
            TableColumn("low", show=lambda value: f"{value:g}"),
            TableColumn("high", show=lambda value: f"{value:g}"),
            TableColumn("at_low", show=_dollars),
            TableColumn("at_high", show=_dollars),
        ],
        [
            (
                row.assumption.name,
                row.assumption.low,
                row.assumption.high,
                round(row.at_low),
                round(row.at_high),
            )
            for row in study.tornado
        ],
        empty="no assumption has a range",
    )
    click.echo("\nAssumptions:")
    rows_out(
        [*map(TableColumn, ("assumption", "value")), TableColumn("source", wrap=True), "as_of"],
        [
            (each.name, round(each.value, 6), _say_source(each), str(each.as_of or "no date"))
            for each in study.plan.assumptions.values()
        ],
    )


def _say_source(assumption: "CostAssumption") -> str:
    return f"weak: {assumption.source}" if assumption.weak else assumption.source


def _make_document(study: _Study) -> dict[str, object]:
    from cavvy.domain.values import asdict

    forecast = study.forecast
    return {
        "plan": study.plan.name,
        "options": [asdict(each) for each in forecast.options],
        "cheapest": forecast.cheapest.name,
        "break_even_months": forecast.break_even_months,
        "break_even_use": forecast.break_even_use,
        "changes": [
            {"assumption": name, "plan": value, "equal_at": at}
            for name, value, at in _list_changes(study)
        ],
        "tornado": [
            {"assumption": row.assumption.name, "at_low": row.at_low, "at_high": row.at_high}
            for row in study.tornado
        ],
        "spread": None if study.spread is None else asdict(study.spread),
        "assumptions": [asdict(each) for each in study.plan.assumptions.values()],
    }


def _list_results(study: _Study) -> "list[Fact]":
    """Return the computed figures; their date is the newest of the assumptions."""
    from cavvy.domain.facts import Fact

    as_of = max(each.as_of for each in study.plan.assumptions.values() if each.as_of)

    def computed(name: str, value: float, unit: str, formula: str) -> Fact:
        source = "computed from the assumptions of this report"
        return Fact(name=name, value=value, unit=unit, source=source, as_of=as_of, formula=formula)

    names = [each.name for each in study.forecast.options]
    found = [
        computed(f"{name}: {kind}", float(str(amount)), "USD", _FORMULAS[str(kind)])
        for kind, *amounts in _list_kinds(study)
        for name, amount in zip(names, amounts, strict=True)
    ]
    found += [
        computed(f"{name} at which owning and renting cost the same", at, "", "found by halving")
        for name, _, at in _list_changes(study)
    ]
    if study.spread is not None:
        drawn = f"{study.spread.runs:,} random plans, triangular between low and high"
        found += [
            computed(f"{name}: {share} of random plans", value, "USD, present value", drawn)
            for name, values in study.spread.percentiles.items()
            for share, value in zip(("5 %", "50 %", "95 %"), values, strict=True)
        ]
    return found


def _make_report(study: _Study) -> str:
    from cavvy.capabilities.choose.drawing import ChartPoint, draw_bars, draw_points, draw_tornado
    from cavvy.capabilities.choose.report import ReportSection, ReportTable, make_page

    options = study.forecast.options
    points = [
        ChartPoint(float(month), amount, each.name, each.name)
        for each in options
        for month, amount in enumerate(each.monthly, 1)
    ]
    bars = [(each.name, {k: v for k, v in each.kinds.items() if v > 0}) for each in options]
    own, rent = study.forecast.find("owned"), study.forecast.find("cloud")
    tornado = [(row.assumption.name, row.at_low, row.at_high) for row in study.tornado]
    sections = [
        ReportSection(
            title="Result",
            texts=[
                _say_cheapest(study),
                *_say_break_even(study),
                *_say_weak(study),
            ],
            pictures=[
                draw_points(
                    "Costs so far (present value)",
                    points,
                    "month",
                    "US dollars",
                    scales=("from-zero", "from-zero"),
                    lines=True,
                ),
                draw_bars("Costs by kind", bars, "USD"),
            ],
            table=ReportTable(
                heads=["US dollars", *(each.name for each in options)], rows=_list_kinds(study)
            ),
        ),
        ReportSection(
            title="What the result depends on",
            texts=["Present value of owning minus renting; below 0, owning costs less."],
            pictures=[
                draw_tornado("Tornado", tornado, own.present - rent.present, "USD"),
            ],
            table=ReportTable(
                heads=["assumption", "plan", "owning and renting cost the same at"],
                rows=_list_changes(study),
            ),
        ),
    ]
    if study.spread is not None:
        rows = [(name, *values) for name, values in study.spread.percentiles.items()]
        sections.append(
            ReportSection(
                title=f"Spread over {study.spread.runs:,} random plans",
                table=ReportTable(heads=["option", "5 %", "50 %", "95 %"], rows=rows),
            )
        )
    facts = [*_list_assumptions(study), *_list_results(study)]
    return make_page(f"Costs of ownership: {study.plan.name}", sections, facts)


def _list_assumptions(study: _Study) -> "list[Fact]":
    from cavvy.domain.facts import Fact

    return [
        Fact(
            name=each.name,
            value=each.value,
            unit=each.unit,
            source=_say_source(each),
            as_of=each.as_of,
            formula="" if each.low == each.high else f"{each.low:g} to {each.high:g}",
        )
        for each in study.plan.assumptions.values()
    ]
