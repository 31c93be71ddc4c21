"""The options of `cavvy plan` that compare ways to run a service on recorded requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cavvy.cli.view.numbers import NumberRange, positive_option

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        "--load",
        metavar="FILE",
        type=_FILE,
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
    click.option(
        "--prompt-ms",
        type=NumberRange(min=0),
        default=0.2,
        help="With --load: the time of each token of a prompt, if the file states tokens.",
    ),
    positive_option(
        "--answer-ms", default=25.0, help="With --load: the time between two tokens of an answer."
    ),
    click.option(
        "--running-ms",
        type=NumberRange(min=0),
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


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
