"""`cavvy tune`: tries changes of a training script's plan and keeps what helps beyond noise."""

import json
import shlex
from pathlib import Path

import click

from cavvy.cli.profile import PRICE, find_price, need_torch
from cavvy.cli.view.failure import CommandFailure


@click.command(
    "tune", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("script", metavar="TRAIN.PY", type=click.Path(dir_okay=False, exists=True))
@click.argument("arguments", nargs=-1, metavar="[ARGUMENTS...]", type=click.UNPROCESSED)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes on this machine.",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    help=f"Dollars an hour, of all devices.  [default: ${PRICE}]",
)
@click.option(
    "--numerics",
    is_flag=True,
    help="Also what changes results: compile, bf16, fp8, micro-batch, ...",
)
@click.option(
    "--pairs",
    type=click.IntRange(min=3),
    default=6,
    show_default=True,
    help="Of windows, for each change.",
)
@click.option(
    "--steps", type=click.IntRange(min=2), default=10, show_default=True, help="Of each window."
)
@click.option(
    "--plan",
    "out",
    metavar="FILE",
    default="plan.json",
    show_default=True,
    help="Where the plan goes.",
)
@click.option(
    "--report",
    metavar="FILE.html",
    type=click.Path(dir_okay=False),
    help="Write a page of what was tried.",
)
def command(
    script: str,
    arguments: tuple[str, ...],
    ranks: int,
    price: float | None,
    numerics: bool,
    pairs: int,
    steps: int,
    out: str,
    report: str | None,
) -> None:
    """Try changes of a script's plan one by one, each beside the best so far, and write the plan
    that won.

    Two copies of the script train here in turns, a window of steps each, so that both need to fit
    into memory. A change stays if it is faster beyond noise. Only those are tried that leave
    results the same to the last bit, unless --numerics is given. Start the script with
    CAVVY_TRAIN_PLAN=plan.json to use what was found.

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
            begun=lambda change: click.echo(f"trying    {describe_change(change)}", err=True),
        )
        for trial in tuner.run():
            click.echo(describe_trial(trial, tuner.facts, price))
    except ScriptError as error:
        raise CommandFailure(f"{script} could not be measured: {error}") from error
    Path(out).write_text(json.dumps(tuner.plan, indent=1))
    if report:
        Path(report).write_text(make_page(script, tuner.trials, tuner.facts, price))
    gain = (
        f"{tuner.before_s / tuner.after_s:.2f} times as fast"
        if tuner.is_faster
        else "nothing helped beyond noise"
    )
    if not tuner.trials:
        gain = "nothing to try here that leaves results the same to the last bit: see --numerics"
    command = shlex.join(["python", script, *arguments])
    click.echo(
        f"{gain}\nwrote {out}; to train by it: CAVVY_TRAIN_PLAN={shlex.quote(out)} {command}"
    )
