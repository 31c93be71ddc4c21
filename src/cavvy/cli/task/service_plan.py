"""`cavvy plan SERVICE --load FILE`: compares ways to run a service, with catalog prices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cavvy.cli.task.available import gather
from cavvy.cli.view import service_ways
from cavvy.cli.view.failure import CommandFailure
from cavvy.control.decide.traffic import make_terms
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ReplicaRole, ServiceSpec
from cavvy.domain.tasks import SpotPolicy, TaskSpec, take_role
from cavvy.domain.values import replace
from cavvy.packages import extra_command
from cavvy.providers import registry
from cavvy.sim.serving.comparison import (
    ComparisonTerms,
    add_groups,
    compare_ways,
    find_crossings,
)
from cavvy.sim.serving.objectives import ObjectiveCost, compare_objectives
from cavvy.sim.serving.objectives import add_groups as add_goals
from cavvy.sim.serving.requests import RequestOptions, RequestTrace, TokenSpeed, read_requests
from cavvy.sim.serving.service import ReplicaMarket, ServiceSetting, read_spot_markets
from cavvy.sim.traces.readers import TraceError

if TYPE_CHECKING:
    from cavvy.cli.view.service_ways import ServicePlan, WayPrices

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
            from cavvy.sim.serving.comparison import plot_costs

            plot_costs(plan.loads, find_crossings(plan.loads), plot)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        text = f"plots need {error.name}, which is not installed"
        raise CommandFailure(text, extra_command("sim")) from error
    service_ways.print_ways(plan, find_crossings(plan.loads), output)


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
    return service_ways.ServicePlan(
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
    groups, fixed_usd_hr = list[service_ways.ServicePlan](), 0.0
    for each in task.replica_groups:
        alone = take_role(task, each)
        if each.role is ReplicaRole.ROUTER:
            rate = _usd(_find_prices(alone, options).demand, alone.nodes)
            fixed_usd_hr += rate * each.replicas.most
        else:
            groups.append(_plan_replicas(each.name, alone, each.role, trace, speed, options))
    with_goals = [each.objectives for each in groups if each.objectives]
    return service_ways.ServicePlan(
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
    return service_ways.WayPrices(
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
