"""`cavvy profile` and `cavvy tune`: show where a training script's time and money go, and try
changes to its plan, of which those stay that make the script significantly faster.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from cavvy.capabilities.estimates.script_argument import (
    explain_relative_import,
    list_words,
    script_argument,
)
from cavvy.cli.reach.session import ended_by_signals
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import amount_option, count_option, positive_option
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from cavvy.capabilities.tuning.tune import PlanTuner


PRICE = "CAVVY_PRICE_USD_HR"
PATIENCE_S = 10.0  # extra seconds for more rounds if the windows are short


_OPTIONS = (
    script_argument(),
    click.argument("arguments", nargs=-1, metavar="[ARGUMENTS...]", type=click.UNPROCESSED),
    count_option("--ranks", default=1, help="Number of processes on this machine."),
    amount_option(
        "--price", help=f"Price of all devices in dollars per hour.  [default: ${PRICE}]"
    ),
    positive_option(
        "--time-limit",
        "limit_min",
        metavar="MINUTES",
        default=15.0,
        show_default=True,
        help="Stop measuring after this time.",
    ),
)


def _script_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the script, its arguments and how it is measured to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    "profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@_script_options
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
    _need_torch()
    from cavvy.capabilities.tuning.diagnose import Diagnoser
    from cavvy.capabilities.tuning.findings import judge_plain
    from cavvy.capabilities.tuning.session import TuningSession
    from cavvy.capabilities.tuning.text import describe

    click.echo(f"measuring {script}: a few hundred steps, or about a minute", err=True)
    until = monotonic() + limit_min * 60
    with (
        _script_failures("profile", script),
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
    price = price if price is not None else _find_price()
    click.echo(describe(found, price if found.facts["samples"] else None))
    if trace:
        click.echo(f"wrote {trace}: open it at ui.perfetto.dev", err=True)


@contextmanager
def _script_failures(command: str, script: str) -> Iterator[None]:
    """Turn the errors of a measured script into a CommandFailure."""
    from cavvy.capabilities.tuning.session import ScriptError

    try:
        yield
    except ScriptError as error:
        raise CommandFailure(
            f"{script} could not be measured: {error}", explain_relative_import(command, str(error))
        ) from error


def _need_torch() -> None:
    """Check that PyTorch is installed. Raises CommandFailure if PyTorch is missing. The package
    Grain is not required, because plain loops and scripts with their data in memory do not use it.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        hint = f"install torch and the script's own imports: `{extra_command('train')}`"
        raise CommandFailure("torch is not installed for the Python that runs cavvy", hint)


def _find_price() -> float | None:
    """Return the price of the job's nodes in dollars per hour, from an environment variable that
    Cavvy sets, or None if the variable is not set.
    """
    try:
        return float(os.environ[PRICE])
    except (KeyError, ValueError):
        return None


@click.command(
    "tune", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@_script_options
@click.option(
    "--numerics",
    is_flag=True,
    help="Also try changes that alter results: compile, bf16, fp8, micro-batch, ...",
)
@count_option(
    "--pairs",
    least=3,
    default=6,
    help="Number of pairs of windows for each change. A pair is a window without the change and a "
    "window with it.",
)
@count_option(
    "--steps", least=2, default=10, help="Number of training steps in each measured window."
)
@click.option(
    "--plan",
    "out",
    metavar="FILE",
    default="plan.json",
    help="The file for the plan.",
)
@click.option(
    "--report",
    metavar="FILE.html",
    type=click.Path(dir_okay=False),
    help="Write a report of all trials.",
)
def tune_command(
    script: str,
    arguments: tuple[str, ...],
    ranks: int,
    price: float | None,
    limit_min: float,
    numerics: bool,
    pairs: int,
    steps: int,
    out: str,
    report: str | None,
) -> None:
    """Try changes to a script's plan one by one, compare each change with the best plan so far, and
    write the best plan.

    Two copies of the script train on this machine and take turns after each window of steps. The
    memory must be large enough for both copies of the script. A change is kept if its gain exceeds
    the measurement noise. Without --numerics, only changes with bit-identical results are tried. To
    use the plan, run the script with CAVVY_TRAIN_PLAN=plan.json. For a script without cavvy.train,
    the command writes no plan but shows which lines of the script to change.

    \b
      cavvy tune train.py --epochs 3
      cavvy tune --numerics --report tuned.html train.py
    """
    _need_torch()
    from cavvy.capabilities.tuning.text import describe_change, describe_trial, make_page
    from cavvy.capabilities.tuning.tune import PlanTuner
    from cavvy.cli.view.output_file import write_text

    price = price if price is not None else _find_price()
    click.echo(
        f"measuring {script}: {pairs} pairs of windows of {steps} steps for each change", err=True
    )
    with _script_failures("tune", script):
        tuner = PlanTuner(
            script,
            arguments,
            ranks=ranks,
            pairs=pairs,
            steps=steps,
            numerics=numerics,
            until=monotonic() + limit_min * 60,
            begun=lambda change: click.echo(f"trying    {describe_change(change)}", err=True),
        )
        with ended_by_signals():
            for trial in tuner.run():
                click.echo(describe_trial(trial, tuner.facts, price))
    if report:
        write_text(Path(report), make_page(script, tuner.trials, tuner.facts, price))
    click.echo(_summarize(tuner))
    click.echo(_apply(tuner, out, shlex.join(["python", *list_words(script), *arguments])))


def _apply(tuner: "PlanTuner", out: str, command: str) -> str:
    """Write the plan to the file `out`. Returns a text that explains how to use the plan or, for a
    plain loop, which lines of the script to change.
    """
    from cavvy.capabilities.tuning.text import describe_script_changes
    from cavvy.cli.view.output_file import write_text

    if tuner.is_plain:
        return describe_script_changes(tuner.plan, tuner.facts)
    write_text(Path(out), json.dumps(tuner.plan, indent=1))
    return f"wrote {out}; to use it: CAVVY_TRAIN_PLAN={shlex.quote(out)} {command}"


def _summarize(tuner: "PlanTuner") -> str:
    if not tuner.trials and not tuner.is_over:
        return "no applicable change keeps results bit-identical; see --numerics"
    gain = "no change brought a significant gain"
    if tuner.is_faster:
        gain = f"{tuner.before_s / tuner.after_s:.2f} times as fast"
    return gain + ("; the time limit ended the trials" if tuner.is_over else "")
