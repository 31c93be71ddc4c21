"""`cavvy bench`: runs the user's script for a minute on each chosen accelerator and saves the
measured rates in the task's work profile, or times the kernels of accelerators.
"""

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.reach.arguments import complete_gpus, providers_option
from cavvy.cli.reach.session import named, session, task_project
from cavvy.cli.task.load import param_option, read_params, read_task, yes_option
from cavvy.cli.task.place_runs import (
    START_S,
    read_machine,
    read_rate,
    stop_measured,
    watch_reports,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import NumberRange
from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import JobDetail
    from cavvy.task_files import LoadedTask


@click.command("bench")
@click.argument("file", metavar="[TASK.YAML]", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--kernels",
    is_flag=True,
    help="Time kernels instead of a task: on this machine, or on each --gpu and --provider.",
)
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    shell_complete=complete_gpus,
    multiple=True,
    help="Accelerators to try, such as H100:1; repeatable.",
)
@providers_option
@click.option(
    "--seconds",
    type=NumberRange(min=1),
    default=60,
    help="How long to measure each accelerator.",
)
@click.option(
    "--save",
    metavar="WORK.JSON",
    type=click.Path(dir_okay=False),
    help="The file for the measured rates.  [default: `work.profile` of the task, or the device's "
    "file in Cavvy's folder]",
)
@yes_option
@param_option
@output_option
def command(
    file: str | None,
    kernels: bool,
    gpus: tuple[str, ...],
    providers: tuple[str, ...],
    seconds: float,
    save: str | None,
    yes: bool,
    param: tuple[str, ...],
    output: str,
) -> None:
    """Run the task's own script for a minute on each accelerator, and save the reported samples per
    second. If --provider is given several times, each of these providers is measured.

    The script must report its progress. A script with `cavvy.train` reports its progress
    automatically; any other program can print a line `CAVVY_PROGRESS {"done": 1280}`. The rates are
    saved in the task's `work.profile`, once for the provider's machine type and once for the
    accelerator. `cavvy plan` ranks offers by the saved rates: by the rate of the machine type if
    there is one, otherwise by the rate of the accelerator. Rates of accelerators that were not
    tried are estimated from the measured rates.

    With --kernels, about sixty kernels (matrix products, convolutions, attention and others) are
    timed in less than two minutes, and saved as a device profile. `cavvy estimate` then corrects
    its formulas by the measured times. No task is needed.

    \b
      cavvy bench task.yaml --gpu H100:1 --gpu L40S:1
      cavvy bench --kernels
      cavvy bench --kernels --gpu H100:1 --provider lambda
    """

    if kernels:
        if file:
            raise click.UsageError("--kernels measures no task: omit TASK.YAML")
        _bench_kernels(gpus, providers, save, yes, output)
        return
    if not file:
        raise click.UsageError("Missing argument 'TASK.YAML'.")
    params = read_params(param)
    loaded = read_task(file, params)
    target = Path(save) if save else _find_profile(loaded)
    found = list[MachineRun]()
    with session() as client:
        try:
            for gpu, provider in product(gpus or (None,), providers or (None,)):
                text = make_text(loaded.text, gpu, (provider,) if provider else (), seconds)
                found.append(_measure(client, loaded, text, file, params, seconds, yes))
                keep(target, found)  # Save after each run, because a later run may fail.
        finally:
            if found:
                _runs_out(found, output)
    silent = [run.job for run in found if run.rate is None]
    if silent:
        there = named(task_project(None, loaded.task), silent[0])
        hint = f"`cavvy logs {there}` shows the job's output"
        raise CommandFailure("some accelerators or providers reported no progress", hint)


def _find_profile(loaded: "LoadedTask") -> Path:
    work = loaded.task.work
    if work is None or not work.profile:
        raise CommandFailure(
            "the task does not say where to save the measured rates",
            "set `profile: work.json` under `work` in the task file, or use --save",
        )
    return loaded.folder / work.profile


def _bench_kernels(
    gpus: tuple[str, ...], providers: tuple[str, ...], save: str | None, yes: bool, output: str
) -> None:
    """Measure the kernels of this machine's accelerator, or of each accelerator and provider."""
    from cavvy.capabilities.estimates import kernel_bench

    if not gpus and not providers:
        found = [kernel_bench.measure_here()]
        click.echo(f"wrote {kernel_bench.keep(found[0], save)}", err=True)
        kernel_bench.show(found, output)
        return
    wanted = list(product(gpus or (None,), providers or (None,)))
    if save and len(wanted) > 1:
        raise click.UsageError("--save holds one device profile: name one accelerator")
    found = []
    with session() as client:
        for gpu, provider in wanted:
            found.append(kernel_bench.measure_job(client, gpu, provider, yes))
            click.echo(f"wrote {kernel_bench.keep(found[-1], save)}", err=True)
    kernel_bench.show(found, output)


class MachineRun(Struct, frozen=True, kw_only=True):
    """The measured rate of one node in samples per second, or None if the job reported too little
    progress. `key` and `machine` are the node's two keys in `work.rates`: `machine` has the form
    "PROVIDER/INSTANCE-TYPE:COUNT" (see `read_machine`). `usd_hr` is the node's price.
    """

    key: str
    machine: str
    rate: float | None
    usd_hr: float | None
    job: str

    @property
    def usd_per_1000(self) -> float | None:
        """The price of 1,000 samples in dollars."""
        if not self.rate or self.usd_hr is None:
            return None
        return self.usd_hr / 3600 / self.rate * 1000


def _runs_out(runs: list[MachineRun], output: str) -> None:
    columns = (
        TableColumn("key", "NODE"),
        TableColumn("machine", drop=2),
        TableColumn("samples_per_s", "SAMPLES/S", lambda rate: f"{rate:,.1f}"),
        TableColumn("usd_hr", "USD/H", lambda usd: f"{usd:,.{2 if usd >= 0.1 else 4}f}", drop=1),
        TableColumn("usd_per_1000", "USD/1,000", lambda usd: f"{usd:.4g}"),
        TableColumn("job"),
    )
    rows = [[run.key, run.machine, run.rate, run.usd_hr, run.usd_per_1000, run.job] for run in runs]
    rows_out(columns, rows, output)
    if output == "table" and len(runs) > 1:
        click.echo()
        for line in draw_bars([(f"{run.machine} {run.key}", run.usd_per_1000) for run in runs]):
            click.echo(line)


def draw_bars(prices: list[tuple[str, float | None]], width: int = 40) -> list[str]:
    """Return a plot of dollars per 1,000 samples as lines of text, sorted by price. Names without a
    price come last and have no bar.
    """
    known = [price for _, price in prices if price is not None]
    most, wide = max(known, default=0.0), max(len(name) for name, _ in prices)
    ordered = sorted(prices, key=lambda pair: (pair[1] is None, pair[1] or 0.0))
    lines = ["USD per 1,000 samples"]
    for name, price in ordered:
        if price is None:
            lines.append(f"{name:{wide}}  unknown")
        else:
            bar = "#" * max(1, round(width * price / most)) if most else ""
            lines.append(f"{name:{wide}}  {price:<10.4g}{bar}".rstrip())
    return lines


def make_text(text: str, gpu: str | None, providers: tuple[str, ...], seconds: float) -> str:
    """Return the text of the task file, changed so that it uses these accelerators and providers
    and ends after a time limit. Raises CommandFailure if the file has the format of another tool.
    """
    from cavvy.sdk.values import write_text
    from cavvy.spec.tree import read_table

    data = read_table(text)
    if data is None or "run" not in data:
        raise CommandFailure(
            "only Cavvy task files can be benchmarked",
            "`cavvy validate FILE` shows which tool a file belongs to",
        )
    resources: dict[str, Any] = dict(data.get("resources") or {})
    if gpu:
        resources["gpu"] = gpu
    if providers:
        resources["providers"] = list(providers)
    limits: dict[str, Any] = dict(data.get("limits") or {})
    limits["duration"] = f"{round(seconds + START_S)}s"
    changed: dict[str, Any] = {
        **data,
        "resources": resources,
        "limits": limits,
        "name": f"bench-{data.get('name', 'task')}"[:50],
    }
    for gone in (
        "outputs",
        "checkpoint",
        "webhooks",
    ):  # A benchmark uploads nothing and does not resume.
        changed.pop(gone, None)
    return write_text(changed)


def keep(path: Path, runs: list[MachineRun]) -> None:
    """Write measured rates into a work profile, and keep all other contents of the profile. If
    several measured machines have the same key, the rate of the slowest machine is written.
    """
    from cavvy.cli.task.profiles import read_file
    from cavvy.cli.view.output_file import write_text

    data: dict[str, Any] = read_file(path) if path.exists() else {"format": "cavvy-work-profile/1"}
    rates: dict[str, float] = {}
    machines: dict[str, float] = {}
    for run in runs:
        if run.rate:
            rates[run.key] = min(run.rate, rates.get(run.key, run.rate))
            machines[run.machine] = run.rate
    data["measured"] = {**data.get("measured", {}), **rates}
    data["machines"] = {**data.get("machines", {}), **machines}
    write_text(path, json.dumps(data) + "\n")


def _measure(
    client: "ApiClient",
    loaded: "LoadedTask",
    text: str,
    file: str,
    params: dict[str, str],
    seconds: float,
    yes: bool,
) -> MachineRun:
    from cavvy.cli.task.submission import make_origin, submit

    project = task_project(None, loaded.task)
    origin = make_origin(client, project, loaded, text)
    job = submit(
        client, text, path=file, params=params, project=project, origin=origin, consent=yes
    )
    click.echo(f"{job.name}: waiting for its first progress report", err=True)
    try:
        seen, last = watch_reports(client, project, job.name, seconds)
    finally:
        stop_measured(client, project, job.name, "measured by cavvy bench")
    machine, usd_hr = read_machine(last)
    rate = read_rate(seen, seconds)
    if rate is not None:
        rate /= max(1, len(last.attempts[-1].nodes))
    return MachineRun(
        key=node_key(last) or "-", machine=machine, rate=rate, usd_hr=usd_hr, job=job.name
    )


def node_key(job: "JobDetail") -> str | None:
    """Return the key in `work.rates` for the kind of node that the job runs on."""
    from msgspec.json import decode

    from cavvy.domain.tasks import TaskSpec

    if not job.attempts:
        return None
    offer = decode(job.attempts[-1].offer)
    task = decode(job.task, type=TaskSpec)
    shared = bool(offer.get("shared"))
    if not offer.get("accelerator") or not task.resources.uses_accelerators(shared):
        return "cpu"
    count = offer["accelerator_count"]
    if shared:
        count = max(1, min(need.count_min for need in task.resources.accelerators))
    size = offer.get("accelerator_memory_mib")
    return f"{offer['accelerator']}{f'-{size // 1024}GB' if size else ''}:{count}"
