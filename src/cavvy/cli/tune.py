"""`cavvy tune`: tries changes to a training script's plan, and keeps a change if the script runs
significantly faster.
"""

import json
import shlex
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from cavvy.cli.profile import (
    find_price,
    limit_option,
    need_torch,
    price_option,
    ranks_option,
    script_arguments,
)
from cavvy.cli.reach.arguments import explain_relative_import, list_words, script_argument
from cavvy.cli.reach.session import ended_by_signals
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from cavvy.tuning.tune import PlanTuner


@click.command(
    "tune", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@script_argument()
@script_arguments
@ranks_option
@price_option
@limit_option
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
def command(
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
    need_torch()
    from cavvy.tuning.session import ScriptError
    from cavvy.tuning.text import describe_change, describe_trial, make_page
    from cavvy.tuning.tune import PlanTuner

    price = price if price is not None else find_price()
    click.echo(
        f"measuring {script}: {pairs} pairs of windows of {steps} steps for each change", err=True
    )
    try:
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
    except ScriptError as error:
        raise CommandFailure(
            f"{script} could not be measured: {error}",
            explain_relative_import("tune", str(error)),
        ) from error
    if report:
        Path(report).write_text(make_page(script, tuner.trials, tuner.facts, price))
    click.echo(_summarize(tuner))
    click.echo(_apply(tuner, out, shlex.join(["python", *list_words(script), *arguments])))


def _apply(tuner: "PlanTuner", out: str, command: str) -> str:
    """Write the plan to the file `out`. Returns a text that explains how to use the plan or, for a
    plain loop, which lines of the script to change.
    """
    from cavvy.tuning.text import describe_script_changes

    if tuner.is_plain:
        return describe_script_changes(tuner.plan, tuner.facts)
    Path(out).write_text(json.dumps(tuner.plan, indent=1))
    return f"wrote {out}; to use it: CAVVY_TRAIN_PLAN={shlex.quote(out)} {command}"


def _summarize(tuner: "PlanTuner") -> str:
    if not tuner.trials and not tuner.is_over:
        return "no applicable change keeps results bit-identical; see --numerics"
    gain = "no change brought a significant gain"
    if tuner.is_faster:
        gain = f"{tuner.before_s / tuner.after_s:.2f} times as fast"
    return gain + ("; the time limit ended the trials" if tuner.is_over else "")
