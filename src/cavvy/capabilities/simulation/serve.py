"""`cavvy simulate serve`: replays recorded requests against a simulated service, with the
production autoscaler and with the rules of other systems.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.capabilities.simulation.view import print_serving
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import (
    NumberRange,
    WholeRange,
    amount_option,
    count_option,
    positive_option,
)
from cavvy.cli.view.output import output_option
from cavvy.domain.values import Struct
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.capabilities.simulation.serving.requests import RequestTrace
    from cavvy.capabilities.simulation.serving.run import ServingScore
    from cavvy.capabilities.simulation.serving.service import ReplicaMarket, ServiceSetting
    from cavvy.domain.services import ServiceSpec

_OWN = "cavvy"
_MOST_REPLICAS = 1000
_FILE = click.Path(dir_okay=False, path_type=Path)


class _ServeOptions(Struct, frozen=True, kw_only=True):
    trace: Path
    rules: tuple[str, ...]
    concurrency: int
    cold_start: float
    wait: float
    on_time: tuple[float, ...]
    availability: float | None
    service_time: float
    prompt_ms: float
    answer_ms: float
    spot: Path | None
    on_demand: float
    spot_price: float
    warm: bool
    seed: int
    plot: Path | None
    replicas_plot: Path | None
    output: str


@click.command("serve")
@click.option(
    "--trace",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests: CSV with arrival_s and service_s, or a trace of Azure, BurstGPT, GenTD26 or "
    "Mooncake, also compressed.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="NAME,...",
    default=("cavvy,knative,keda,ray-serve,skyserve,dstack,aibrix",),
    help="The rules to compare; each rule except cavvy uses the defaults of its original system.",
)
@count_option(
    "--concurrency", default=4, help="Number of requests that a replica processes at the same time."
)
@positive_option(
    "--cold-start",
    default=60.0,
    metavar="SECONDS",
    help="Time from the request for a replica until it is ready.",
)
@positive_option(
    "--wait",
    default=10.0,
    metavar="SECONDS",
    help="A request is on time if it waits at most this long.",
)
@click.option(
    "--on-time",
    type=NumberRange(min=0, max=1, min_open=True, max_open=True),
    multiple=True,
    default=(0.95,),
    metavar="SHARE",
    help="The share of requests that the rule cavvy aims to answer on time. If the option is "
    "repeated, the rule is simulated once for each share.",
)
@click.option(
    "--availability",
    type=NumberRange(min=0, max=1, min_open=True, max_open=True),
    metavar="SHARE",
    help="The share that the service states as `slo.availability`. It determines how many spare "
    "and on-demand replicas the rule cavvy adds to the capacity of --spot. Default: 0.995.",
)
@positive_option(
    "--service-time",
    default=23.0,
    metavar="SECONDS",
    help="Mean service time, for traces that state only a rate.",
)
@amount_option(
    "--prompt-ms",
    default=0.2,
    help="Service time per token of the prompt.",
)
@amount_option(
    "--answer-ms",
    default=25.0,
    help="Service time per token of the answer.",
)
@click.option(
    "--spot",
    metavar="FOLDER",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded spot capacity of several zones. The rules for spot (skyserve, cavvy) use this "
    "capacity, with faults and with on-demand as a fallback.",
)
@positive_option("--on-demand", default=3.0, metavar="USD", help="On-demand price per hour.")
@positive_option("--spot-price", default=1.0, metavar="USD", help="Spot price per hour.")
@click.option(
    "--warm/--cold",
    default=True,
    help="Start with as many replicas as the load of the first five minutes needs, or, with "
    "--cold, without replicas.",
)
@click.option(
    "--seed", type=WholeRange(), default=0, help="Seed of the random durations of cold starts."
)
@click.option(
    "--plot", type=_FILE, help="Draw late requests against replica-hours (.svg, .png or .pdf)."
)
@click.option(
    "--replicas-plot", type=_FILE, help="Draw the replicas over time (.svg, .png or .pdf)."
)
@output_option
def serve(**given: Any) -> None:
    """Replay recorded requests against a simulated service, and show the cost and the waiting times
    of each scaling rule.

    `cavvy` is the autoscaler that runs real services; the other rules are simplified
    re-implementations of the rules of other systems.
    """
    from cavvy.capabilities.simulation.traces.readers import TraceError

    options = _ServeOptions(**given)
    try:
        scores, bound = _run(options)
        if options.plot is not None or options.replicas_plot is not None:
            from cavvy.capabilities.simulation.serving.comparison import plot_replicas, plot_scores

            if options.plot is not None:
                plot_scores(scores, bound, options.plot)
            if options.replicas_plot is not None:
                plot_replicas(scores, options.replicas_plot)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        raise CommandFailure(
            f"plots need {error.name}, which is not installed", extra_command("sim")
        ) from error
    print_serving(scores, bound, options.output)


def _run(options: _ServeOptions) -> "tuple[list[ServingScore], float]":
    from cavvy.capabilities.simulation.serving import need_serving

    need_serving("`cavvy simulate serve`")
    from cavvy.capabilities.simulation.serving.comparison import bound_replica_hours
    from cavvy.capabilities.simulation.serving.requests import (
        RequestOptions,
        TokenSpeed,
        read_requests,
    )
    from cavvy.capabilities.simulation.serving.service import ServiceSetting

    speed = TokenSpeed(prompt_ms=options.prompt_ms, answer_ms=options.answer_ms)
    trace = read_requests(
        options.trace,
        RequestOptions(speed=speed, service_s=options.service_time, seed=options.seed),
    )
    setting = ServiceSetting(
        concurrency=options.concurrency,
        cold_start_s=options.cold_start,
        slo_wait_s=options.wait,
        on_demand_usd_hr=options.on_demand,
        spot_usd_hr=options.spot_price,
        seed=options.seed,
    )
    markets = _list_markets(options, setting)
    scores: list[ServingScore] = []
    for name in _list_rules(options.rules):
        scores += _run_rule(name, trace, setting, markets, options)
    return scores, bound_replica_hours(trace, setting)


def _run_rule(
    name: str,
    trace: "RequestTrace",
    setting: "ServiceSetting",
    markets: "Sequence[ReplicaMarket]",
    options: _ServeOptions,
) -> "list[ServingScore]":
    from cavvy.capabilities.serving.decide.traffic import SCALED_EVERY, make_terms
    from cavvy.capabilities.simulation.serving.rules import RULES
    from cavvy.capabilities.simulation.serving.run import (
        AutoscalerController,
        RuleController,
        run_service,
    )
    from cavvy.domain.values import replace

    if name != _OWN:
        service_s = trace.work_s / len(trace.services_s)
        hedge = name == "skyserve" and options.spot is not None
        rule = RuleController(RULES[name], service_s, hedge)
        return [run_service(name, trace, setting, rule, markets, warm=options.warm)]
    scores = []
    for on_time in options.on_time:
        # as in production, the autoscaler learns the lengths of cold starts and requests itself
        terms = replace(make_terms(_make_service(options)), on_time=on_time)
        label = name if len(options.on_time) == 1 else f"{name} {on_time:g}"
        own = AutoscalerController(terms, round(SCALED_EVERY.total_seconds()))
        scores.append(run_service(label, trace, setting, own, markets, warm=options.warm))
    return scores


def _make_service(options: _ServeOptions) -> "ServiceSpec":
    """Return the simulated service as its users would describe it."""
    from cavvy.domain.services import ReplicaCount, ReplicaTarget, ServiceLevel, ServiceSpec

    return ServiceSpec(
        concurrency=options.concurrency,
        replicas=ReplicaCount(most=_MOST_REPLICAS, target=ReplicaTarget(value=options.wait)),
        slo=ServiceLevel(availability=options.availability),
    )


def _list_markets(options: _ServeOptions, setting: "ServiceSetting") -> "Sequence[ReplicaMarket]":
    from cavvy.capabilities.simulation.serving.run import on_demand_market
    from cavvy.capabilities.simulation.serving.service import read_spot_markets

    if options.spot is None:
        return [on_demand_market(setting)]
    return [on_demand_market(setting), *read_spot_markets(options.spot, setting.spot_usd_hr)]


def _list_rules(texts: tuple[str, ...]) -> list[str]:
    from cavvy.capabilities.simulation.serving.rules import RULES

    names = [part.strip() for text in texts for part in text.split(",")]
    for name in names:
        if name != _OWN and name not in RULES:
            raise CommandFailure(
                f"--rule: expected one of {', '.join((_OWN, *RULES))}, not {name!r}", exit_code=2
            )
    return list(dict.fromkeys(names))
