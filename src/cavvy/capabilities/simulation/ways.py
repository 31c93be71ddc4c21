"""`cavvy plan SERVICE --load FILE`: compares ways to run a service, with catalog prices, and shows
them with the source and date of each price.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.capabilities.serving.decide.traffic import make_terms
from cavvy.capabilities.simulation.serving.comparison import (
    ComparisonTerms,
    ServingWay,
    add_groups,
    compare_ways,
    find_crossings,
)
from cavvy.capabilities.simulation.serving.objectives import ObjectiveCost, compare_objectives
from cavvy.capabilities.simulation.serving.objectives import add_groups as add_goals
from cavvy.capabilities.simulation.serving.requests import (
    RequestOptions,
    RequestTrace,
    TokenSpeed,
    read_requests,
)
from cavvy.capabilities.simulation.serving.service import (
    ReplicaMarket,
    ServiceSetting,
    read_spot_markets,
)
from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.cli.task.available import gather
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.formatting import show_dollars
from cavvy.cli.view.output import TableColumn, json_out, rows_out, text_out
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ReplicaRole, ServiceSpec
from cavvy.domain.tasks import SpotPolicy, TaskSpec, take_role
from cavvy.domain.units import format_rate
from cavvy.domain.values import Struct, asdict, replace
from cavvy.packages import extra_command
from cavvy.providers import registry

if TYPE_CHECKING:
    from cavvy.capabilities.simulation.serving.comparison import LoadCosts, WayCost, WayCrossing
    from cavvy.capabilities.simulation.serving.objectives import ObjectiveCost
    from cavvy.domain.services import LatencyGoal


# multiples of the recorded load that are simulated, as long as they have few enough requests
_FACTORS = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0)
_MOST_REQUESTS = 50_000
_ZONES = 3  # number of spot zones that are assumed without recorded capacity
_DRAWN = (".svg", ".png", ".pdf")


def show_ways(task: TaskSpec, options: Mapping[str, Any], output: str) -> None:
    """Compare the ways to run the service, and print the comparison. Raises CommandFailure."""
    spec, plot = task.service, options["plot"]
    if spec is None:
        raise CommandFailure("--load is for services, and the file describes a job", exit_code=2)
    if plot is not None and plot.suffix.lower() not in _DRAWN:
        text = f"{plot}: expected a name that ends in .svg, .png or .pdf"
        raise CommandFailure(text, exit_code=2)
    try:
        speed = TokenSpeed(prompt_ms=options["prompt_ms"], answer_ms=options["answer_ms"])
        trace = read_requests(
            options["load"], RequestOptions(speed=speed, service_s=options["service_time"])
        )
        _check_tokens(spec, trace)
        speed = replace(speed, running_ms=options["running_ms"])
        if task.replica_groups:
            plan = _plan_groups(task, trace, speed, options)
        else:
            plan = _plan_replicas("", task, None, trace, speed, options)
        if plot is not None:
            from cavvy.capabilities.simulation.serving.comparison import plot_costs

            plot_costs(plan.loads, find_crossings(plan.loads), plot)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        text = f"plots need {error.name}, which is not installed"
        raise CommandFailure(text, extra_command("sim")) from error
    print_ways(plan, find_crossings(plan.loads), output)


def _plan_replicas(
    name: str,
    task: TaskSpec,
    role: ReplicaRole | None,
    trace: RequestTrace,
    speed: TokenSpeed,
    options: Mapping[str, Any],
) -> "ServicePlan":
    """Compare the ways to run equal replicas, which get all requests."""
    spec = task.service
    assert spec is not None
    prices = _find_prices(task, options)
    terms = _make_terms(spec, task.nodes, options, prices, role)
    loads = [compare_ways(trace, terms, each) for each in _list_factors(trace)]
    objectives: Sequence[ObjectiveCost] = ()
    if spec.slo.ttft is not None or spec.slo.token_gap is not None:
        if role is ReplicaRole.DECODE:  # other replicas compute the prompts meanwhile
            speed = replace(speed, prompt_ms=0.0, base_ms=0.0)
        setting = replace(terms.setting, speed=speed)
        objectives = compare_objectives(trace, terms.scaling, setting)
    return ServicePlan(
        name=name, most=spec.replicas.most, loads=loads, prices=prices, objectives=objectives
    )


def _plan_groups(
    task: TaskSpec, trace: RequestTrace, speed: TokenSpeed, options: Mapping[str, Any]
) -> "ServicePlan":
    """Compare the ways to run each group of replicas, and the whole service."""
    for option in ("managed_price", "serverless_price", "spot_capacity"):
        if options[option] is not None:
            name = f"--{option.replace('_', '-')}"
            raise CommandFailure(
                f"{name} does not apply: groups of replicas run on demand, and not on managed "
                "endpoints",
                f"omit {name}",
                exit_code=2,
            )
    groups, fixed_usd_hr = list[ServicePlan](), 0.0
    for each in task.replica_groups:
        alone = take_role(task, each)
        if each.role is ReplicaRole.ROUTER:
            rate = _usd(_find_prices(alone, options).demand, alone.nodes)
            fixed_usd_hr += rate * each.replicas.most
        else:
            groups.append(_plan_replicas(each.name, alone, each.role, trace, speed, options))
    with_goals = [each.objectives for each in groups if each.objectives]
    return ServicePlan(
        name="",
        most=sum(each.most for each in groups),
        loads=add_groups([each.loads for each in groups], fixed_usd_hr),
        prices=groups[0].prices,
        objectives=add_goals(with_goals, fixed_usd_hr),
        groups=tuple(groups),
        routers_usd_hr=fixed_usd_hr,
    )


def _check_tokens(spec: ServiceSpec, trace: RequestTrace) -> None:
    """Raise TraceError if the file has objectives for tokens, and the trace states none."""
    goals = [name for name in ("ttft", "token_gap") if getattr(spec.slo, name) is not None]
    if goals and not trace.tokens:
        raise TraceError(
            f"{trace.name}: the requests state no tokens, which `slo.{goals[0]}` needs; expected a "
            "CSV file with arrival_s, prompt_tokens and answer_tokens, or a trace of Azure, "
            "BurstGPT or Mooncake"
        )


def _find_prices(task: TaskSpec, options: Mapping[str, Any]) -> "WayPrices":
    """Return the stated prices, and the cheapest on-demand offer, spot offer and managed endpoint
    that fit a replica and have a price.
    """
    both = replace(task, resources=replace(task.resources, spot=SpotPolicy.AUTO))
    found = gather(both, anywhere=True, output_mib=None)
    paid = [each for each in found.offers if each.rate.micros_per_hour > 0]
    demand = [each for each in paid if each.purchase is Purchase.ON_DEMAND]
    spot = [each for each in paid if each.purchase is Purchase.SPOT]
    if not demand:
        raise CommandFailure(
            "no on-demand offer with a price fits a replica", "`cavvy plan FILE` gives the reasons"
        )
    endpoints = {each.name for each in registry.manifests() if each.only_services}
    managed = [each for each in demand if each.provider in endpoints]
    return WayPrices(
        demand=min(demand, key=_rate),
        spot=min(spot, key=_rate, default=None),
        managed=min(managed, key=_rate, default=None),
        spot_recorded=options["spot_capacity"] is not None,
        managed_usd_hr=options["managed_price"],
        serverless_usd_hr=options["serverless_price"],
    )


def _rate(offer: Offer) -> int:
    return offer.rate.micros_per_hour


def _usd(offer: Offer, nodes: int) -> float:
    """Return the price of a replica with this number of nodes."""
    return offer.rate.micros_per_hour * nodes / 1e6


def _make_terms(
    spec: ServiceSpec,
    nodes: int,
    options: Mapping[str, Any],
    prices: "WayPrices",
    role: ReplicaRole | None,
) -> ComparisonTerms:
    spot, managed_usd_hr = prices.spot, prices.managed_usd_hr
    if managed_usd_hr is None and prices.managed is not None and role is None:
        managed_usd_hr = _usd(prices.managed, nodes)
    scaling = make_terms(spec, role)
    setting = ServiceSetting(
        concurrency=spec.concurrency,
        cold_start_s=options["cold_start"],
        slo_wait_s=scaling.wait_s,
        most_replicas=spec.replicas.most,
        on_demand_usd_hr=_usd(prices.demand, nodes),
    )
    return ComparisonTerms(
        scaling=scaling,
        setting=setting,
        spot=[]
        if spot is None or role is not None
        else _list_spot(options["spot_capacity"], _usd(spot, nodes)),
        managed_usd_hr=managed_usd_hr,
        serverless_usd_hr=options["serverless_price"],
    )


def _list_spot(folder: Path | None, usd_hr: float) -> Sequence[ReplicaMarket]:
    if folder is None:
        return [
            ReplicaMarket(name=f"zone-{number}", region="", spot=True, usd_hr=usd_hr)
            for number in range(_ZONES)
        ]
    return read_spot_markets(folder, usd_hr)


def _list_factors(trace: RequestTrace) -> list[float]:
    count = len(trace.arrivals_s)
    return [each for each in _FACTORS if each <= 1 or each * count <= _MOST_REQUESTS]


_UNKNOWN = "the catalog has no price for it"
_NO_SPOT = "no spot offer fits"


class WayPrices(Struct, frozen=True, kw_only=True):
    """The prices of each way to run a service, from offers or from the user. `managed` is the offer
    of a configured provider of managed endpoints. `spot_recorded` is true if spot replicas were
    simulated with recorded spot capacity, so that some of them were lost.
    """

    demand: Offer
    spot: Offer | None
    managed: Offer | None
    spot_recorded: bool
    managed_usd_hr: float | None
    serverless_usd_hr: float | None


class ServicePlan(Struct, frozen=True, kw_only=True):
    """The compared ways to run a service, or the group `name` of its replicas, with at most `most`
    replicas. A service with `groups` pays `routers_usd_hr` for its routers at all times.
    """

    name: str
    most: int
    loads: "Sequence[LoadCosts]"
    prices: WayPrices
    objectives: "Sequence[ObjectiveCost]"
    groups: "tuple[ServicePlan, ...]" = ()
    routers_usd_hr: float = 0.0


_COLUMNS = (
    TableColumn("way"),
    TableColumn("usd_month", "$/MONTH", show=show_dollars),
    TableColumn("on_time_percent", "ON TIME", show=lambda value: f"{value:.1f}%"),
    TableColumn("wait_p99_s", "WAIT P99", show=lambda value: f"{value:.1f}s", drop=1),
    TableColumn("most", "MOST REPLICAS", drop=2),
    TableColumn("price", below=True),
    TableColumn("source"),
    TableColumn("as_of"),
)
_OF_PRICES = ("source", "as_of")  # a line below the table states them once
_OBJECTIVES = (
    TableColumn("ttft"),
    TableColumn("ttft_s", "REACHED", show=lambda value: f"{value:.2f}s"),
    TableColumn("token_gap", "TOKEN GAP"),
    TableColumn("gap_s", "REACHED", show=lambda value: f"{value:.3f}s"),
    TableColumn("late_percent", "LATE", show=lambda value: f"{value:.1f}%", drop=2),
    TableColumn("replicas", drop=1),
    TableColumn("limited_percent", "AT MAX", show=lambda value: f"{value:.0f}%", drop=1),
    TableColumn("replica_hours", "REPLICA-HOURS", show=lambda value: f"{value:.1f}", drop=3),
    TableColumn("usd_hr", "$/HOUR", show=show_dollars),
    TableColumn("usd_month", "$/MONTH", show=show_dollars),
)


def print_ways(
    plan: ServicePlan,
    crossings: "Sequence[WayCrossing]",
    output: str,
) -> None:
    """Print the cost of each way to run the service under the recorded load, and the loads at which
    the cheapest way changes; for a language model with objectives, also the cost of each objective.
    Groups of replicas come first, each with its own costs.
    """
    loads, prices, recorded = plan.loads, plan.prices, _find_recorded(plan)
    if output == "json":
        others = {
            "loads": [asdict(each) for each in loads],
            "crossings": [asdict(each) for each in crossings],
        }
        groups = [{"name": each.name, **_describe(each)} for each in plan.groups]
        json_out({**_describe(plan), **others, "groups": groups})
        return
    below = output == "table"
    priced = list[tuple[object, ...]]()
    for group in plan.groups if below else ():
        click.echo(f"group {group.name}:")
        priced += _print_tables(group, output)
        click.echo()
    if plan.groups and below:
        routers = plan.routers_usd_hr
        also = f", with {show_dollars(routers)} an hour for routers" if routers else ""
        click.echo(f"all groups{also}:")
    priced += _print_tables(plan, output)
    if not below:
        return
    dated = [f"{source}, {day}" for *_, source, day in priced if source and day]
    text_out(f"prices: {'; '.join(dict.fromkeys(dated))}")
    click.echo(f"for {recorded.per_day:,.0f} requests a day, and a month of 730.5 hours")
    for each in crossings:
        click.echo(
            f"{each.below} is the cheapest below {each.per_day:,.0f} requests a day, and "
            f"{each.above} above this number"
        )
    if not crossings:
        least, most = (f(each.per_day for each in loads) for f in (min, max))
        known = [each for each in recorded.costs if each.usd_month is not None]
        best = min(known, key=lambda each: each.usd_month or 0.0).way
        click.echo(f"{best} is the cheapest from {least:,.0f} to {most:,.0f} requests a day")
    for one in plan.groups or (plan,):
        _note_limits(one)
    if not plan.groups:
        _print_notes(prices)


def _find_recorded(plan: ServicePlan) -> "LoadCosts":
    return next(each for each in plan.loads if each.factor == 1)


def _describe(plan: ServicePlan) -> dict[str, object]:
    recorded = _find_recorded(plan)
    return {
        "requests_per_day": recorded.per_day,
        "ways": [
            {**dict(zip(_names(), _row(each, plan), strict=True)), "limited": each.limited}
            for each in recorded.costs
        ],
        "objectives": [_describe_objective(each) for each in plan.objectives],
    }


def _print_tables(plan: ServicePlan, output: str) -> Sequence[tuple[object, ...]]:
    """Print the ways, and as tables also the objectives. Return the rows of the ways."""
    below = output == "table"
    grouped = bool(plan.name or plan.groups)  # nothing else than on-demand replicas is compared
    costs = _find_recorded(plan).costs
    cells = [_row(each, plan) for each in costs if each.usd_month is not None or not grouped]
    columns = [replace(each, hidden=below and each.name in _OF_PRICES) for each in _COLUMNS]
    rows_out(columns, cells, output)
    if below and plan.objectives:
        click.echo()
        rows_out(_OBJECTIVES, [_objective_row(each) for each in plan.objectives], output)
    return cells


def _note_limits(plan: ServicePlan) -> None:
    """Say which requests are late because the service may have too few replicas, and which of the
    stated objectives no number of replicas meets.
    """
    who = f"group {plan.name}: " if plan.name else ""
    limited = [each.way for each in _find_recorded(plan).costs if each.limited and each.usd_month]
    if limited or any(each.limited for each in plan.objectives):
        where = f" ({', '.join(limited)})" if limited else ", see AT MAX"
        note_out(
            f"{who}with `replicas.max: {plan.most}`, more requests are late than with more "
            f"replicas{where}"
        )
    if plan.objectives:
        _note_missed(next(each for each in plan.objectives if each.factor == 1), who)


def _note_missed(stated: "ObjectiveCost", who: str) -> None:
    """Say which of the stated objectives no number of replicas meets."""
    pairs = (
        ("ttft", stated.ttft, stated.best_ttft_s),
        ("token_gap", stated.token_gap, stated.best_gap_s),
    )
    for name, goal, best_s in pairs:
        if goal is not None and best_s is not None and best_s > goal.limit_s:
            note_out(
                f"{who}no number of replicas meets {name}, {_say_goal(goal)}: the best is "
                f"{best_s:.3g}s, because of the speed of the model and the lengths of prompts"
            )


def _objective_row(each: "ObjectiveCost") -> tuple[object, ...]:
    least, mean, most = each.replicas
    return (
        _say_goal(each.ttft),
        None if each.ttft is None else each.ttft_s,
        _say_goal(each.token_gap),
        None if each.token_gap is None else each.gap_s,
        100 * each.late,
        f"{least} to {most}, mean {mean:.1f}",
        100 * each.limited,
        each.replica_hours,
        each.usd_hr,
        each.usd_month,
    )


def _say_goal(goal: "LatencyGoal | None") -> str | None:
    return None if goal is None else f"{100 * goal.share:g}% {goal.limit_s:.3g}s"


def _describe_objective(each: "ObjectiveCost") -> dict[str, object]:
    goals = {
        name: None if goal is None else {"share": goal.share, "limit_s": goal.limit_s}
        for name, goal in (("ttft", each.ttft), ("token_gap", each.token_gap))
    }
    return {**asdict(each), **goals, "usd_month": each.usd_month}


def _print_notes(prices: WayPrices) -> None:
    if prices.spot is not None and not prices.spot_recorded:
        note_out(
            "the comparison assumes that spot replicas are never lost; "
            "--spot-capacity reads records of spot capacity"
        )
    if prices.managed is not None and prices.managed_usd_hr is None:
        note_out(
            f"the price of {prices.managed.provider} was not compared with the cloud's bill; "
            "see docs/guides/managed-endpoints.md, or state your price with --managed-price"
        )
    if prices.serverless_usd_hr is not None:
        note_out(
            "these costs of serverless GPUs include working time only; providers also bill "
            "idle time"
        )


def _names() -> list[str]:
    return [each.name for each in _COLUMNS]


def _row(cost: "WayCost", plan: ServicePlan) -> tuple[object, ...]:
    on_time = None if cost.on_time is None else 100 * cost.on_time
    simulated = on_time, cost.wait_p99_s, cost.most
    if cost.usd_month is None:
        simulated = None, None, None
    return cost.way, cost.usd_month, *simulated, *_price(cost.way, plan)


def _price(way: ServingWay, plan: ServicePlan) -> tuple[str, str | None, object]:
    """Return the price as text, its source and its date."""
    if plan.groups:
        return "see the groups", None, None
    prices = plan.prices
    if way is ServingWay.MANAGED and prices.managed_usd_hr is None and prices.managed is not None:
        return _offered(prices.managed)
    if way is ServingWay.MANAGED:
        return _stated(prices.managed_usd_hr, "--managed-price")
    if way is ServingWay.SERVERLESS:
        return _stated(prices.serverless_usd_hr, "--serverless-price")
    if way is not ServingWay.SPOT_MIX:
        return _offered(prices.demand)
    return (_NO_SPOT, None, None) if prices.spot is None else _offered(prices.spot)


def _stated(usd_hr: float | None, option: str) -> tuple[str, str | None, object]:
    if usd_hr is None:
        return f"{_UNKNOWN}; add {option}", None, None
    return f"${usd_hr:g}/h", f"stated by {option}", None


def _offered(offer: Offer) -> tuple[str, str | None, object]:
    where = f"{offer.provider}/{offer.region} {offer.instance_type}"
    return f"{format_rate(offer.rate)} {where}", offer.source, offer.as_of
