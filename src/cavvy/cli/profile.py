"""`cavvy profile`: shows where a training script's time and money go, and what to fix."""

import os
from time import monotonic

import click

from cavvy.cli.reach.arguments import explain_relative_import, script_argument
from cavvy.cli.reach.session import ended_by_signals
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import NumberRange, count_option, positive_option
from cavvy.packages import extra_command

PRICE = "CAVVY_PRICE_USD_HR"
PATIENCE_S = 10.0  # extra seconds for more rounds if the windows are short


script_arguments = click.argument(
    "arguments", nargs=-1, metavar="[ARGUMENTS...]", type=click.UNPROCESSED
)
ranks_option = count_option("--ranks", default=1, help="Number of processes on this machine.")
price_option = click.option(
    "--price",
    type=NumberRange(min=0),
    help=f"Price of all devices in dollars per hour.  [default: ${PRICE}]",
)


limit_option = positive_option(
    "--time-limit",
    "limit_min",
    metavar="MINUTES",
    default=15.0,
    show_default=True,
    help="Stop measuring after this time.",
)


@click.command(
    "profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@script_argument()
@script_arguments
@ranks_option
@price_option
@limit_option
@count_option(
    "--steps", least=2, default=13, help="Number of training steps in each measured window."
)
@count_option("--rounds", least=2, default=5, help="Number of times that each window is measured.")
@click.option(
    "--trace",
    metavar="FILE.json",
    type=click.Path(dir_okay=False),
    help="Write a trace for Perfetto.",
)
def command(
    script: str,
    arguments: tuple[str, ...],
    ranks: int,
    price: float | None,
    limit_min: float,
    steps: int,
    rounds: int,
    trace: str | None,
) -> None:
    """Measure a training script and show where its time and money go, with the measurements as
    evidence and with suggested fixes.

    The script trains on this machine for a few hundred steps; checkpoints of cavvy.train are not
    changed. A script without cavvy.train runs for up to 110 steps or about 30 seconds, without a
    trace. If the script saves files with torch.save or open(), existing files are not overwritten.
    Native code, such as safetensors, can overwrite existing files. For TensorBoard, write the trace
    as NAME.pt.trace.json into a log directory.

    \b
      cavvy profile train.py --epochs 3
      cavvy profile --price 2.99 --trace step.pt.trace.json train.py
      cavvy profile -m package.train --epochs 3
    """
    need_torch()
    from cavvy.tuning.diagnose import Diagnoser
    from cavvy.tuning.plain import judge_plain
    from cavvy.tuning.session import ScriptError, TuningSession
    from cavvy.tuning.text import describe

    click.echo(f"measuring {script}: a few hundred steps, or about a minute", err=True)
    try:
        until = monotonic() + limit_min * 60
        with (
            ended_by_signals(),
            TuningSession(script, arguments, ranks=ranks, until=until) as session,
        ):
            path = os.path.abspath(trace) if trace else ""
            if session.is_plain:
                found, trace = judge_plain(session.reports), None
            else:
                found = Diagnoser(
                    session,
                    steps=steps,
                    rounds=rounds,
                    trace=path,
                    patience_s=PATIENCE_S,
                    # Half of the time is reserved for windows after these rounds.
                    limit_s=(until - monotonic()) / 2,
                ).diagnose()
    except ScriptError as error:
        raise CommandFailure(
            f"{script} could not be measured: {error}",
            explain_relative_import("profile", str(error)),
        ) from error
    price = price if price is not None else find_price()
    click.echo(describe(found, price if found.facts["samples"] else None))
    if trace:
        click.echo(f"wrote {trace}: open it at ui.perfetto.dev", err=True)


def need_torch() -> None:
    """Check that PyTorch is installed. Raises CommandFailure if PyTorch is missing. The package
    Grain is not required, because plain loops and scripts with their data in memory do not use it.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        hint = f"install torch and the script's own imports: `{extra_command('train')}`"
        raise CommandFailure("torch is not installed for the Python that runs cavvy", hint)


def find_price() -> float | None:
    """Return the price of the job's nodes in dollars per hour, from an environment variable that
    Cavvy sets, or None if the variable is not set.
    """
    try:
        return float(os.environ[PRICE])
    except (KeyError, ValueError):
        return None
