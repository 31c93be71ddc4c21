"""`cavvy plan SERVICE --load FILE`: compares ways to run a service, with catalog prices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cavvy.cli.task.available import gather
from cavvy.cli.view import service_ways
from cavvy.cli.view.failure import CommandFailure
from cavvy.control.decide.traffic import make_terms
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.packages import extra_command
from cavvy.providers import registry
from cavvy.sim.serving.comparison import (
    ComparisonTerms,
    compare_ways,
    find_crossings,
)
from cavvy.sim.serving.objectives import ObjectiveCost, compare_objectives
from cavvy.sim.serving.requests import RequestOptions, RequestTrace, TokenSpeed, read_requests
from cavvy.sim.serving.service import ReplicaMarket, ServiceSetting, read_spot_markets
from cavvy.sim.traces.readers import TraceError

if TYPE_CHECKING:
    from cavvy.cli.view.service_ways import WayPrices

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
        prices = _find_prices(task, options)
        terms = _make_terms(spec, task.nodes, options, prices)
        loads = [compare_ways(trace, terms, each) for each in _list_factors(trace)]
        objectives: Sequence[ObjectiveCost] = ()
        if spec.slo.ttft is not None or spec.slo.token_gap is not None:
            speed = replace(speed, running_ms=options["running_ms"])
            setting = replace(terms.setting, speed=speed)
            objectives = compare_objectives(trace, terms.scaling, setting)
        if plot is not None:
            from cavvy.sim.serving.plots import plot_costs

            plot_costs(loads, find_crossings(loads), plot)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        text = f"plots need {error.name}, which is not installed"
        raise CommandFailure(text, extra_command("sim")) from error
    service_ways.print_ways(loads, find_crossings(loads), prices, objectives, output)


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
) -> ComparisonTerms:
    spot, managed_usd_hr = prices.spot, prices.managed_usd_hr
    if managed_usd_hr is None and prices.managed is not None:
        managed_usd_hr = _usd(prices.managed, nodes)
    scaling = make_terms(spec)
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
        spot=[] if spot is None else _list_spot(options["spot_capacity"], _usd(spot, nodes)),
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
