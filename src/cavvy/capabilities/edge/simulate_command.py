"""`cavvy simulate edge`: rolls a model out to simulated devices."""

from collections.abc import Sequence
from typing import Any

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import NumberRange, amount_option, count_option, positive_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("edge")
@count_option("--devices", most=1_000_000, default=10_000, help="Devices of the rollout.")
@count_option("--sites", default=100, help="Sites, each with one link.")
@amount_option("--size-mib", default=20.0, help="What a device fetches.")
@positive_option(
    "--site-mib-per-s", default=12.0, help="Bandwidth of a site, which its devices share."
)
@click.option(
    "--cuts-per-day",
    type=NumberRange(min=0, max=1440),
    default=1.0,
    help="Power cuts of a device in a day.",
)
@click.option(
    "--offline",
    type=NumberRange(min=0, max=0.99),
    default=0.1,
    help="Share of time for which a device is away, two hours at a time.",
)
@click.option(
    "--errors", type=NumberRange(min=0, max=1), default=0.02, help="Share of requests that fail."
)
@click.option(
    "--worse", type=NumberRange(min=0, max=1), default=0.0, help="What the new version adds to it."
)
@click.option(
    "--refuses",
    type=NumberRange(min=0, max=1),
    default=0.0,
    help="Share of the devices on which the trial of the new version fails.",
)
@amount_option("--soak-s", default=600.0, help="Least time of a wave.")
@click.option(
    "--days", type=NumberRange(min=0, max=30), default=2.0, help="Longest simulated time."
)
@count_option("--runs", default=1, help="Runs, with seeds from --seed on.")
@count_option("--seed", least=0, default=0, help="Seed of the first run.")
@output_option
def command(runs: int, seed: int, output: str, **given: Any) -> None:
    """Roll a model out to simulated devices with the code that carries real rollouts on.

    Devices share the link of their site, lose their power, and go away. A bad model fails more
    requests (--worse 0.1), or its trials fail (--refuses 0.3). EXPOSED devices had answered
    requests by the new version when the rollout ended. 10,000 devices take some seconds, and
    100,000 some minutes.
    """
    from cavvy.capabilities.edge.simulation import EdgeScenario, simulate_rollout
    from cavvy.domain.values import asdict

    if given["errors"] + given["worse"] > 1:
        raise CommandFailure("--errors and --worse must be at most 1 together", exit_code=2)
    rows = []
    for number in range(seed, seed + runs):
        found = asdict(simulate_rollout(EdgeScenario(seed=number, **given)))
        rows.append({"seed": number, **found, "ended": found["phase"]})
    _print(rows, output)


def _print(rows: Sequence[dict[str, object]], output: str) -> None:
    """Print how simulated rollouts to devices at the edge ended."""
    columns = [
        TableColumn("seed"),
        TableColumn("ended"),
        TableColumn("minutes"),
        TableColumn("exposed"),
        TableColumn("serving"),
        TableColumn("refused"),
        TableColumn("power_cuts", "CUTS"),
        TableColumn("fetched_gib", "GIB", lambda gib: f"{gib:.1f}"),
        TableColumn("reason", wrap=True),
    ]
    rows_out(columns, rows, output)
