"""`cavvy plan FILE --load REQUESTS`: the way of `cavvy plan` that compares ways to run a service on
recorded requests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.task.modes import CommandMode
from cavvy.cli.view.numbers import amount_option, positive_option

if TYPE_CHECKING:
    from cavvy.domain.tasks import TaskSpec

_LOAD_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LOAD_OPTIONS = (
    click.option(
        "--load",
        metavar="FILE",
        type=_LOAD_FILE,
        help="Recorded requests of a service, with which the command compares ways to run the "
        "service. The file is CSV with the columns start_s and requests, CSV with the columns "
        "arrival_s and service_s, or a trace as for `cavvy simulate serve`.",
    ),
    positive_option(
        "--service-time",
        default=1.0,
        metavar="SECONDS",
        help="With --load: the mean service time of a request, if the file states none.",
    ),
    amount_option(
        "--prompt-ms",
        default=0.2,
        help="With --load: the time of each token of a prompt, if the file states tokens.",
    ),
    positive_option(
        "--answer-ms", default=25.0, help="With --load: the time between two tokens of an answer."
    ),
    amount_option(
        "--running-ms",
        default=0.3,
        help="With --load and an objective such as `slo.ttft`: how much longer the time between "
        "two tokens is for each running request. `cavvy services show` states the measured times "
        "of a service.",
    ),
    positive_option(
        "--cold-start",
        default=60.0,
        metavar="SECONDS",
        help="With --load: the time from the request for a replica until it is ready.",
    ),
    click.option(
        "--spot-capacity",
        metavar="FOLDER",
        type=click.Path(exists=True, path_type=Path),
        help="With --load: recorded spot capacity of several zones; without it, the "
        "comparison assumes that spot capacity is never lost.",
    ),
    positive_option(
        "--managed-price",
        metavar="USD",
        help="With --load: the price per hour of a replica of a managed endpoint. The default is "
        "the price of the cheapest managed-endpoint offer of your providers.",
    ),
    positive_option(
        "--serverless-price",
        metavar="USD",
        help="With --load: the price per hour of a serverless GPU while it works.",
    ),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --load: plot the costs per month against the load (.svg, .png or .pdf).",
    ),
)


def _run(task: "TaskSpec", options: Mapping[str, Any], output: str) -> None:
    from cavvy.capabilities.simulation.serving import need_serving

    need_serving("--load")
    from cavvy.capabilities.simulation.ways import show_ways

    show_ways(task, options, output)


LOAD = CommandMode(
    option="--load",
    title="A service on recorded requests",
    text="With --load, the command compares ways to run a service on recorded requests.",
    options=_LOAD_OPTIONS,
    run=_run,
)
