"""The tables of `cavvy plan`: offers, what does not fit, and the course until the deadline."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.formatting import show_dollars
from cavvy.cli.view.output import TableColumn, rows_out, text_out
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.cli.plan.answer import PlanAnswer
    from cavvy.domain.elastic import NodeRange
    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.explain import OfferMiss
    from cavvy.planner.placements import Placement, PlacementPlan


def show_answers(answers: "Sequence[PlanAnswer]", ordered: bool, all_locations: bool) -> None:
    which = "" if all_locations else " (the best location of each machine type)"
    order = "the first available alternative is used" if ordered else "the cheapest is used"
    for at, each in enumerate(answers, 1):
        if len(answers) > 1:
            click.echo(f"Alternative {at} of {len(answers)} ({order})")
        _placements_out(each, which)
        _forecast_out(each.forecast, each.task.elastic)
        if each.found.rejections:
            _rejections_out(each)


def put_out_csv(answers: "Sequence[PlanAnswer]") -> None:
    """Print all plans as one CSV table. If the task has several alternatives, each row has the
    number of its alternative.
    """
    found = [(at, row) for at, each in enumerate(answers, 1) for row in list_rows(each)]
    if len(answers) == 1:
        rows_out(COLUMNS, [row for _, row in found], "csv")
    else:
        rows_out((TableColumn("alternative"), *COLUMNS), [(at, *row) for at, row in found], "csv")


def _rate(micros: int) -> str:
    from cavvy.domain.units import HourlyRate, format_rate

    return format_rate(HourlyRate(micros)).removesuffix("/h")


def _length(seconds: float) -> str:
    from datetime import timedelta

    from cavvy.domain.units import format_duration

    return format_duration(timedelta(seconds=seconds))


def _range(bounds: Sequence[float]) -> str:
    return " to ".join(map(_length, bounds))


def _range_s(placement: "Placement") -> tuple[float, float] | None:
    """Return the range of the running time in seconds if it was scaled from a measurement on
    another device, otherwise None.
    """
    if placement.run_time is None or placement.spread == 1:
        return None
    seconds, spread = placement.run_time.total_seconds(), placement.spread
    return round(seconds / spread, 1), round(seconds * spread, 1)


_RANGE = TableColumn("run_time_range_s", "RANGE", _range, drop=2)
COLUMNS = (
    TableColumn("rank", "#"),
    TableColumn("provider"),
    TableColumn("location", drop=4),
    TableColumn("instance_type", "INSTANCE", below=True),
    TableColumn("accelerators", drop=3),
    TableColumn("vcpus", "CPUS", lambda number: f"{number:g}", drop=1),
    TableColumn("purchase", "BUY"),
    TableColumn("readiness", drop=8),
    TableColumn("rate_micros_per_hour", "$/H", _rate, drop=5),
    TableColumn("run_time_s", hidden=True),
    TableColumn("wall_time_s", "TIME", _length, drop=6),
    _RANGE,
    TableColumn("cost_micros", "TOTAL", drop=7),
    TableColumn("spot_loss_s", hidden=True),
    TableColumn("spot_loss_micros", hidden=True),
    TableColumn("preemptions", hidden=True),
    TableColumn("egress_micros", hidden=True),
    TableColumn("transfer_micros", hidden=True),
    TableColumn("transfer_s", hidden=True),
    TableColumn("available", hidden=True),
    TableColumn("as_of", hidden=True),
    TableColumn("source", hidden=True),
    TableColumn("notes", drop=2),
)


def list_rows(answer: "PlanAnswer", notes: Sequence[str] = ()) -> list[tuple[object, ...]]:
    """Return the cells of each row. If `notes` contains notes, the rows refer to the notes by
    number. If `notes` is (), the rows contain their notes in full.
    """
    return [
        _row(rank, placement, answer.offered.readiness(placement.offer), notes)
        for rank, placement in enumerate(answer.made.placements, 1)
    ]


def _row(
    rank: int, placement: "Placement", readiness: str, notes: Sequence[str]
) -> tuple[object, ...]:
    offer, loss = placement.offer, placement.spot_loss
    return (
        rank,
        offer.provider,
        _location_text(offer),
        offer.instance_type,
        _accelerators_text(offer),
        offer.vcpus or None,
        offer.purchase,
        readiness,
        placement.rate.micros_per_hour,
        None if placement.run_time is None else placement.run_time.total_seconds(),
        None if placement.wall_time is None else placement.wall_time.total_seconds(),
        _range_s(placement),
        None if placement.cost is None else placement.cost.micros,
        None if loss is None or loss.time is None else loss.time.total_seconds(),
        None if loss is None or loss.cost is None else loss.cost.micros,
        None if loss is None else loss.preemptions,
        None if placement.egress is None else placement.egress.micros,
        None if placement.transfer is None else placement.transfer.micros,
        None if placement.transfer_time is None else placement.transfer_time.total_seconds(),
        placement.available,
        offer.as_of,
        offer.source or None,
        " ".join(f"[{notes.index(note) + 1}]" for note in placement.notes)
        if notes
        else "; ".join(placement.notes),
    )


def _wished(nodes: int, wish: str) -> str:
    """Describe the requirements of the task, such as "any node", "2 nodes with 8 CPUs" or
    "4 nodes, each a H100:8".
    """
    if wish == "node":
        return "any node" if nodes == 1 else f"{nodes} nodes of any kind"
    if wish.startswith("node "):
        return f"a {wish}" if nodes == 1 else f"{nodes} nodes{wish.removeprefix('node')}"
    return wish if nodes == 1 else f"{nodes} nodes, each a {wish}"


def _location_text(offer: "Offer") -> str:
    """Return the zone if its name includes the region, otherwise both names."""
    if offer.zone and not offer.zone.startswith(offer.region):
        return f"{offer.region}/{offer.zone}"
    return offer.zone or offer.region


def _accelerators_text(offer: "Offer") -> str | None:
    return f"{offer.accelerators_text} x {offer.accelerator}" if offer.accelerator else None


def _placements_out(answer: "PlanAnswer", which: str) -> None:
    from cavvy.planner.explain import wish

    task, made = answer.task, answer.made
    notes = list(dict.fromkeys(note for placement in made.placements for note in placement.notes))
    wished = _wished(task.nodes, wish(task.resources))
    if task.elastic is not None:
        which_one = "the least of" if task.nodes == task.elastic.least else "of"
        wished += f", {which_one} {task.elastic}: on more nodes, $/H grows with them"
    title = f"{task.name}: {wished}; {_order_text(task, answer.by)}"
    rows = list_rows(answer, notes)
    if rows:
        scaled = any(placement.spread != 1 for placement in made.placements)
        shown = replace(_RANGE, hidden=not scaled)
        columns = [shown if each is _RANGE else each for each in COLUMNS]
        if _is_endless(task):
            ends = ("wall_time_s", "cost_micros")
            columns = [replace(each, hidden=each.hidden or each.name in ends) for each in columns]
        rows_out(columns, rows, title=title)
        for number, note in enumerate(notes, 1):
            text_out(f"[{number}] {note}")
        verb = "run" if task.service is None else "serve"
        text_out(f"{_sources_text(made, which)}; `cavvy {verb}` can use {_usable_text(answer)}")
        if priced := _priced_by(made):
            text_out(f"prices: {priced}")
        _spares_out(task)


def _spares_out(task: "TaskSpec") -> None:
    if task.service is None:
        return
    from cavvy.spec.describe import describe_spares

    if spares := describe_spares(task):
        text_out(f"on spot: {spares}")


def _priced_by(made: "PlacementPlan") -> str:
    """Return the sources of the prices of the shown offers, each with its newest date."""
    found: dict[str, date] = {}
    for offer in (each.offer for each in made.placements):
        if offer.source and offer.as_of is not None:
            found[offer.source] = max(offer.as_of, found.get(offer.source, offer.as_of))
    return "; ".join(f"{source}, {day}" for source, day in found.items())


def _is_endless(task: "TaskSpec") -> bool:
    """Return whether the task is a service, whose offers have no times and totals."""
    return task.service is not None and task.work is None


def _order_text(task: "TaskSpec", by: str) -> str:
    if _is_endless(task):
        return "by price per hour"
    if task.work is None:
        return (
            "the task file has no `work`, so offers have no times and are ordered by price per hour"
        )
    return "by expected total" if by == "cost" else "by expected finish"


def _sources_text(made: "PlacementPlan", which: str) -> str:
    dates = [
        placement.offer.as_of for placement in made.placements if placement.offer.as_of is not None
    ]
    text = f"{len(made.placements)} shown{which} of {made.kept:,} fitting offers"
    if dates:
        span = f"{min(dates)}" if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
        text += f"; list prices from {span}"
    return text


def _usable_text(answer: "PlanAnswer") -> str:
    """Return the names of the configured providers that have an offer for this alternative."""
    from cavvy.planner.placements import RankingView
    from cavvy.planner.rank import plan

    offered, best = answer.offered, RankingView(distinct=True)
    made = plan(
        answer.task, offered.here, now=datetime.now(UTC), situation=offered.situation, view=best
    )
    usable = sorted({placement.offer.provider for placement in made.placements})
    if usable:
        return ", ".join(usable)
    reason = (
        f"no offer of {', '.join(offered.live)} fits"
        if offered.live
        else "no provider is configured"
    )
    return f"none of them: {reason}"


def _rejections_out(answer: "PlanAnswer") -> None:
    found = answer.found
    count = found.considered - found.kept
    click.echo()
    columns = (
        TableColumn("reason", wrap=True),
        TableColumn("count", "OFFERS", lambda number: f"{number:,}"),
        TableColumn("field", drop=1),
    )
    rows_out(
        columns,
        found.rejections,
        title=f"{count:,} of {found.considered:,} offers do not fit, counted by the first "
        "requirement that they fail",
    )
    if found.misses:
        click.echo()
        misses = [_miss_row(miss, answer.offered.readiness(miss.offer)) for miss in found.misses]
        heads = (
            TableColumn("provider"),
            TableColumn("location", drop=1),
            TableColumn("instance_type", "INSTANCE"),
            TableColumn("rate", "$/H", _rate),
            TableColumn("readiness", drop=2),
            TableColumn("text", "REASON", wrap=True),
            TableColumn("change", "TO USE IT", wrap=True),
        )
        rows_out(heads, misses, title="nearest misses")


def _miss_row(miss: "OfferMiss", readiness: str) -> tuple[object, ...]:
    offer = miss.offer
    return (
        offer.provider,
        _location_text(offer),
        offer.instance_type,
        offer.rate.micros_per_hour,
        readiness,
        miss.text,
        miss.change,
    )


def _forecast_out(forecast: "Sequence[Forecast]", sizes: "NodeRange | None") -> None:
    if not forecast:
        return
    columns = (
        TableColumn("nodes", hidden=sizes is None),
        TableColumn("kind", "SPOT"),
        TableColumn("usd_mean", "EXPECTED", show_dollars),
        TableColumn("usd_p10", "P10", show_dollars, drop=2),
        TableColumn("usd_p90", "P90", show_dollars, drop=3),
        TableColumn("in_time", show=lambda share: f"{share:.0%}"),
        TableColumn("hours_p50", "HOURS (P50)", lambda hours: f"{hours:.1f}", drop=1),
    )
    each_of = "each value of resources.spot" + (", on more and fewer nodes" if sizes else "")
    click.echo()
    rows_out(
        columns,
        forecast,
        title=f"expected course of the job until its deadline, for {each_of}",
    )
    if sizes is not None:
        click.echo(_say_cheapest(forecast, sizes))
    runs = max(each.runs for each in forecast)
    click.echo(
        f"based on {runs} simulated runs per policy, which assume a conservative spot "
        "availability for markets without observations"
    )


def _say_cheapest(forecast: "Sequence[Forecast]", sizes: "NodeRange") -> str:
    """Return which size and policy of an elastic job is the cheapest safe one, and what this
    assumes."""
    from cavvy.domain.units import format_count
    from cavvy.planner.deadline.forecast import IN_TIME, find_cheapest_in_time

    assumes = f"assumes that N times as many nodes as {sizes.least} are N times as fast"
    best = find_cheapest_in_time(forecast)
    if best is None:
        return f"none of these is in time in {IN_TIME:.0%} of the runs; {assumes}"
    return (
        f"the cheapest that is in time in at least {IN_TIME:.0%} of the runs: "
        f"{format_count(best.nodes, 'node')} with `spot: {best.kind}`; {assumes}"
    )
