"""`cavvy plan`: ranks offers for a task by cost or duration, without a server."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.task.load import param_option, read_any_tasks, read_params
from cavvy.cli.task.options import TaskCommand, load_options, task_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import show_dollars
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out
from cavvy.domain.values import Struct, replace

if TYPE_CHECKING:
    from cavvy.cli.task.available import AvailableOffers
    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.explain import Explanation, OfferMiss
    from cavvy.planner.placements import Placement, PlacementPlan
    from cavvy.task_files import ReadOptions


@click.command("plan", cls=TaskCommand)
@task_options
@click.option(
    "--by",
    type=click.Choice(["cost", "time"]),
    default="cost",
    help="The order: the lowest expected total cost, or the earliest finish.",
)
@count_option("--limit", default=10, help="How many offers to show.")
@click.option(
    "--all-locations",
    is_flag=True,
    help="Show every region and zone, not only the best one for each machine type.",
)
@click.option(
    "--ready",
    "--here",
    "ready",
    is_flag=True,
    help="Show only offers that a job can use now: the offers of configured providers.",
)
@click.option(
    "--output-size",
    metavar="SIZE",
    help="Size of the results to download at the end, such as 50GB, to include egress costs.",
)
@load_options
@param_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@output_option
def command(
    file: str,
    options: "ReadOptions",
    by: str,
    limit: int,
    all_locations: bool,
    ready: bool,
    output_size: str | None,
    param: tuple[str, ...],
    project: str | None,
    output: str,
    **load: Any,
) -> None:
    """Rank the offers that a task could run on, with cost, time and reasons.

    The command launches no machines and costs no money. Estimates use the task's `work` and limits;
    notes below the table state their assumptions. If `cavvy run` would refuse the task for another
    reason than missing offers, the command reports this reason and exits with an error. The server
    is asked only if it is running. With --load, the command compares ways to run a
    service on recorded requests.
    """
    from cavvy.cli.task.problems import find_refusal
    from cavvy.cli.task.profiles import with_rates

    params = read_params(param)
    tasks = [with_rates(each, Path(file).parent) for each in read_any_tasks(file, params, options)]
    parts = [part for each in tasks for part in _list_parts(each)]
    count = sum(max(1, len(each.replica_groups)) for each in tasks)
    loaded = load["load"] is not None
    if (len(tasks) > 1 and loaded) or (count > 1 and not loaded and output != "table"):
        what = "tasks" if len(tasks) > 1 else "groups of replicas"
        rather = "omit --load" if loaded else "use -o table"
        raise click.UsageError(f"{file} has {count} {what}; {rather}")
    if loaded:
        from cavvy.cli.task.service_plan import show_ways

        show_ways(tasks[0], load, output)
        return
    for number, (title, task) in enumerate(parts):
        if number:
            click.echo()
        if title:
            click.echo(title)
        _plan(
            task,
            lambda each: _answer(each, by, limit, all_locations, ready, _size(output_size)),
            output,
            all_locations,
        )
    if refusal := find_refusal(file, params, options, project, files=True):
        raise refusal


_PLANNED = ("resources", "nodes", "image")  # groups with the same of these get the same offers


def _list_parts(task: "TaskSpec") -> "Iterator[tuple[str, TaskSpec]]":
    """Yield the task of the groups of replicas on the same nodes, with a title, or the task alone
    without groups.
    """
    from cavvy.domain.tasks import take_role

    parts: list[tuple[list[str], TaskSpec]] = []
    for each in task.replica_groups:
        least, most = each.replicas.least, each.replicas.most
        count = str(most) if least == most else f"{least} to {most}"
        role = "" if each.name == each.role else f"{each.role}, "
        known, part = f"{each.name} ({role}{count})", take_role(task, each)
        for names, other in parts:
            if all(getattr(other, key) == getattr(part, key) for key in _PLANNED):
                names.append(known)
                break
        else:
            parts.append(([known], part))
    for names, part in parts:
        what = "group" if len(names) == 1 else "groups"
        yield f"{what} {', '.join(names)}: each replica on one of these", part
    if not task.replica_groups:
        yield "", task


def _plan(
    task: "TaskSpec",
    answer: "Callable[[TaskSpec], _Alternative]",
    output: str,
    all_locations: bool,
) -> None:
    """Print the offers for one task. Raises CommandFailure if none fits."""
    from cavvy.cli.task.buckets import with_regions, with_sizes
    from cavvy.domain.arrays import count_members, is_array
    from cavvy.planner.candidates import join_reasons, tasks_of

    task, warnings = with_regions(*with_sizes(task))
    answers = [answer(each) for each in tasks_of(task)]
    _put_out(answers, task, output, all_locations)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if is_array(task):
        count = count_members(task)
        click.echo(f"note: this is the plan of each of the {count:,} jobs", err=True)
    _print_notes(answers, output)
    if all(each.message for each in answers):
        raise CommandFailure(join_reasons([each.message for each in answers]))


def _put_out(
    answers: "Sequence[_Alternative]", task: "TaskSpec", output: str, all_locations: bool
) -> None:
    from cavvy.cli.view.output import json_out

    match output:
        case "json":
            documents = [_document(each) for each in answers]
            several = {"task": task.name, "ordered": task.resources.ordered, "any_of": documents}
            json_out(documents[0] if len(documents) == 1 else several)
        case "csv":
            _csv_out(answers)
        case _:
            _show(answers, task.resources.ordered, all_locations)


def show_plan(task: "TaskSpec", file: str) -> None:
    """Print the best offers of the configured providers. Raises CommandFailure if no offer fits.
    The error's hint contains `file`, the name of the task's file.
    """
    from cavvy.planner.candidates import join_reasons, tasks_of

    if task.edge is not None:
        click.echo("the server does this step; it needs no node")
        return
    answers = [_answer(each, "cost", 5, False, True, None) for each in tasks_of(task)]
    _show(answers, task.resources.ordered, all_locations=False)
    _print_notes(answers, "table")
    if all(each.message for each in answers):
        from cavvy.cli.task.available import suggest_offer

        hint = suggest_offer(task, file, is_file=Path(file).is_file())
        raise CommandFailure(join_reasons([each.message for each in answers]), hint)


def _print_notes(answers: "Sequence[_Alternative]", output: str) -> None:
    warnings = [
        warning for each in answers for warning in each.warnings
    ]  # the JSON output contains the warnings
    notes = [f"warning: {each}" for each in warnings if output != "json"]
    notes += [f"note: {problem}" for each in answers for problem in each.offered.problems]
    hints = [advice for each in answers for advice in each.advice]
    notes += [f"hint: {each}" for each in hints if output != "json"]
    for note in dict.fromkeys(notes):
        click.echo(note, err=True)


class _Alternative(Struct, frozen=True):
    """The plan for one of the alternatives under a task's resources."""

    task: "TaskSpec"
    by: str
    offered: "AvailableOffers"
    made: "PlacementPlan"
    found: "Explanation"
    message: str  # why no offer fits, or "" if an offer fits
    forecast: "Sequence[Forecast]"
    warnings: Sequence[str]
    advice: Sequence[str] = ()  # what the task's model needs, and what would make it cheaper


def _answer(
    task: "TaskSpec", by: str, limit: int, all_locations: bool, ready: bool, output_mib: int | None
) -> _Alternative:
    from cavvy.cli.task.available import PlanRequest, advise_spot, gather
    from cavvy.cli.task.market import tell_forecast
    from cavvy.planner.explain import explain, say_no_offer
    from cavvy.planner.placements import Objective, RankingView
    from cavvy.planner.rank import plan, warn_of_dear_spot, warn_of_notices

    now, view = datetime.now(UTC), RankingView(limit=limit, distinct=not all_locations)
    only = PlanRequest(now=now, by=Objective(by), view=view)
    offered = gather(task, anywhere=not ready, output_mib=output_mib, only=only)
    made = plan(
        task,
        offered.offers,
        now=now,
        by=only.by,
        situation=offered.situation,
        view=view,
        others=offered.others,
    )
    forecast = tell_forecast(task, offered.offers, now, offered.situation.egress)
    warnings = warn_of_notices(task, offered.spots, offered.situation.notices)
    warnings += warn_of_dear_spot(task, offered.offers, offered.fixed, now, offered.situation)
    warnings += _warn_of_waits(task, offered)
    found = explain(offered.matches, made, refused=offered.refused, readiness=offered.readiness)
    message = ""
    if not made.placements:
        from cavvy.cli.task.problems import lead_to_wholes

        found, told = lead_to_wholes(task, found)
        message = _say_missing(task, offered, ready) or told or say_no_offer(task, found)
    need = _say_need(task, made)
    cheaper = advise_spot(
        task,
        next(iter(made.placements), None) if only.by is Objective.COST else None,
        now,
        anywhere=not ready,
        output_mib=output_mib,
        market=offered.market,
    )
    advice = tuple(each for each in (need, cheaper) if each)
    return _Alternative(task, by, offered, made, found, message, forecast, warnings, advice)


def _say_need(task: "TaskSpec", made: "PlacementPlan") -> str:
    """Return what the task's model needs, if offers of the plan have less."""
    if not task.resources.accelerators:
        return ""
    from cavvy.cli.task.model_needs import say_need

    return say_need(task, [each.offer for each in made.placements])


def _say_missing(task: "TaskSpec", offered: "AvailableOffers", ready: bool) -> str:
    """Return why no offer was found, for example because the task contains an unknown name or, if
    `ready` is true, because a provider did not answer. Returns "" if the offers were found but do
    not meet the task's requirements.
    """
    from cavvy.domain.offers import list_sellers
    from cavvy.planner.candidates import say_unread

    asked = list_sellers(task.resources.providers) or offered.live
    if ready and offered.problems and offered.answered.isdisjoint(asked):
        return say_unread(offered.problems)
    return f"No offer: {_uncapital(offered.unknown)}" if offered.unknown else ""


def _warn_of_waits(task: "TaskSpec", offered: "AvailableOffers") -> tuple[str, ...]:
    """Warn about configured providers without a bucket for results: if the server is unreachable
    when the work ends, the providers' nodes keep running and are billed.
    """
    from cavvy.cli.reach.providers import load_settings
    from cavvy.domain.units import format_duration
    from cavvy.providers import registry
    from cavvy.providers.base import Feature

    stored = task.checkpoint is not None and task.checkpoint.storage is not None
    if stored or load_settings().text("server.results_url"):
        return ()
    here = {offer.provider for offer in offered.here}
    names = [
        name
        for name, known in sorted(registry.list_known().items())
        if name in here and Feature.RESULTS in registry.manifest_of(known).unsupported
    ]
    if not names:
        return ()
    longest = format_duration(task.limits.unattended)
    return (
        f"{', '.join(names)}: if nodes cannot reach the server when the work ends, they wait for "
        f"up to {longest} and are billed; to avoid this, name a bucket for results in "
        "`checkpoint.storage` or in the setting `server.results_url`",
    )


def _csv_out(answers: Sequence[_Alternative]) -> None:
    """Print all plans as one CSV table. If the task has several alternatives, each row has the
    number of its alternative.
    """
    found = [(at, row) for at, each in enumerate(answers, 1) for row in _rows(each)]
    if len(answers) == 1:
        rows_out(_COLUMNS, [row for _, row in found], "csv")
    else:
        rows_out((TableColumn("alternative"), *_COLUMNS), [(at, *row) for at, row in found], "csv")


def _show(answers: Sequence[_Alternative], ordered: bool, all_locations: bool) -> None:
    which = "" if all_locations else " (the best location of each machine type)"
    order = "the first available alternative is used" if ordered else "the cheapest is used"
    for at, each in enumerate(answers, 1):
        if len(answers) > 1:
            click.echo(f"Alternative {at} of {len(answers)} ({order})")
        _placements_out(each, which)
        _forecast_out(each.forecast)
        if each.found.rejections:
            _rejections_out(each)


def _uncapital(text: str) -> str:
    return text[:1].lower() + text[1:] if text.startswith("The ") else text


def _size(text: str | None) -> int | None:
    from cavvy.domain.units import UnitError, parse_memory_mib

    try:
        return None if text is None else parse_memory_mib(text)
    except UnitError as error:
        raise CommandFailure(f"--output-size: {error}", exit_code=2) from error


# placements


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
_COLUMNS = (
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


def _rows(answer: _Alternative, notes: Sequence[str] = ()) -> list[tuple[object, ...]]:
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
        location_text(offer),
        offer.instance_type,
        accelerators_text(offer),
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


def location_text(offer: "Offer") -> str:
    """Return the zone if its name includes the region, otherwise both names."""
    if offer.zone and not offer.zone.startswith(offer.region):
        return f"{offer.region}/{offer.zone}"
    return offer.zone or offer.region


def accelerators_text(offer: "Offer") -> str | None:
    return f"{offer.accelerators_text} x {offer.accelerator}" if offer.accelerator else None


def _placements_out(answer: _Alternative, which: str) -> None:
    from cavvy.planner.explain import wish
    from cavvy.spec.describe import describe_spares

    task, made = answer.task, answer.made
    notes = list(dict.fromkeys(note for placement in made.placements for note in placement.notes))
    title = (
        f"{task.name}: {_wished(task.nodes, wish(task.resources))}; {_order_text(task, answer.by)}"
    )
    rows = _rows(answer, notes)
    if rows:
        scaled = any(placement.spread != 1 for placement in made.placements)
        shown = replace(_RANGE, hidden=not scaled)
        columns = [shown if each is _RANGE else each for each in _COLUMNS]
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


def _usable_text(answer: _Alternative) -> str:
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


def _rejections_out(answer: _Alternative) -> None:
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
        location_text(offer),
        offer.instance_type,
        offer.rate.micros_per_hour,
        readiness,
        miss.text,
        miss.change,
    )


def _forecast_out(forecast: "Sequence[Forecast]") -> None:
    if not forecast:
        return
    columns = (
        TableColumn("kind", "SPOT"),
        TableColumn("usd_mean", "EXPECTED", show_dollars),
        TableColumn("usd_p10", "P10", show_dollars, drop=2),
        TableColumn("usd_p90", "P90", show_dollars, drop=3),
        TableColumn("in_time", show=lambda share: f"{share:.0%}"),
        TableColumn("hours_p50", "HOURS (P50)", lambda hours: f"{hours:.1f}", drop=1),
    )
    click.echo()
    rows_out(
        columns,
        forecast,
        title="expected course of the job until its deadline, for each value of resources.spot",
    )
    runs = max(each.runs for each in forecast)
    click.echo(
        f"based on {runs} simulated runs per policy, which assume a conservative spot "
        "availability for markets without observations"
    )


def _document(answer: _Alternative) -> dict[str, object]:
    from msgspec import to_builtins

    return {
        "task": answer.task.name,
        "nodes": answer.task.nodes,
        "by": answer.by,
        "considered": answer.found.considered,
        "kept": answer.found.kept,
        "placements": [
            _placement_document(row, placement)
            for row, placement in zip(_rows(answer), answer.made.placements, strict=True)
        ],
        "rejected": to_builtins(answer.found.rejections),
        "misses": [
            {
                "offer": miss.offer.key,
                "rate_micros_per_hour": miss.offer.rate.micros_per_hour,
                "readiness": answer.offered.readiness(miss.offer),
                "reason": miss.reason,
                "text": miss.text,
                "change": miss.change,
            }
            for miss in answer.found.misses
        ],
        "message": answer.message or None,
        "warnings": list(answer.warnings),
        "advice": list(answer.advice),
        "forecast": [_forecast_document(each) for each in answer.forecast],
    }


def _placement_document(row: Sequence[object], placement: "Placement") -> dict[str, object]:
    loss = placement.spot_loss
    names = [column.name for column in _COLUMNS]
    return {
        **dict(zip(names, row, strict=True)),
        "offer": placement.offer.key,
        "finish": placement.finish,
        "checkpoint_every_s": None if loss is None else loss.checkpoint_every,
        "preemptions_per_hour": None if loss is None else loss.per_hour,
        "notes": placement.notes,
    }


def _forecast_document(forecast: "Forecast") -> dict[str, object]:
    from cavvy.domain.values import asdict

    fields = asdict(forecast)
    return {"spot": fields.pop("kind"), **fields}
