"""`cavvy estimate`: estimates memory, step time, duration and cost of a training run on every
accelerator, without renting an accelerator.
"""

import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cavvy.capabilities.estimates.script_argument import script_argument
from cavvy.cli.reach.arguments import complete_gpus
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option, positive_option
from cavvy.cli.view.output import TableColumn, json_out, output_option, rows_out, text_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.domain.offers import Offer
    from cavvy.planner.device_rates import DeviceRates
    from cavvy.planner.estimate.profile import StepSettings, WorkProfile
    from cavvy.planner.estimate.table import DeviceEstimate

_ROWS = 25
_ASSUMED = 5  # maximum number of assumptions of a trace that are listed below a table


class _Command(click.Command):
    """A command whose usage errors explain that options of the script go after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = "Options of the script go after `--`: cavvy estimate train.py -- --epochs 3."
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from error


def _say_model(name: str) -> str:
    from cavvy.cli.task.profiles import say_model

    return say_model(name)


@click.command("estimate", cls=_Command)
@script_argument(required=False, explain=_say_model)
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS...]")
@click.option(
    "--model",
    metavar="NAME",
    help="A model with a built-in profile, such as gpt2 or resnet50; `list` lists all models.",
)
@click.option(
    "--profile",
    "file",
    metavar="WORK.JSON",
    type=click.Path(dir_okay=False),
    help="A saved work profile.",
)
@count_option("--batch", help="Samples in a micro-batch on one accelerator.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16", "fp16", "fp8"]),
    help="Precision of matrix products.",
)
@click.option("--compile", "compiled", is_flag=True, help="Assume torch.compile.")
@click.option("--channels-last", is_flag=True, help="Assume images in channels-last memory format.")
@click.option(
    "--optimizer", metavar="NAME", help="adamw, sgd, momentum, lion, adafactor, adamw8bit, ..."
)
@click.option(
    "--attention",
    type=click.Choice(["flash", "math"]),
    default="flash",
    help="How attention is computed: by a fused kernel, or with the scores stored in memory.",
)
@click.option("--checkpointing", is_flag=True, help="Activation checkpointing (with --model only).")
@count_option("--accumulate", help="Micro-batches per step.  [default: from the trace, or 1]")
@count_option("--gpus", default=1, help="Accelerators per node.")
@count_option("--nodes", default=1, help="Nodes that work together.")
@click.option(
    "--fsdp",
    is_flag=True,
    help="Shard parameters, gradients and optimizer state across the accelerators of all nodes.",
)
@positive_option(
    "--samples",
    help="Number of samples in the whole run, to also estimate the run's duration and cost.",
)
@click.option(
    "--gpu",
    "only",
    metavar="NAME[:SIZE][:N]",
    shell_complete=complete_gpus,
    help="Show only this accelerator, family or vendor; SIZE is its memory, N the number per node.",
)
@click.option(
    "--save",
    metavar="WORK.JSON",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the work profile to this file, which a task can name as `work.profile`.",
)
@count_option(
    "--limit", least=0, help=f"The number of rows, 0 for all.  [default: {_ROWS} in tables]"
)
@output_option
def command(script: str | None, arguments: tuple[str, ...], output: str, **given: Any) -> None:
    """Estimate memory, step time and cost of a training run on every accelerator.

    The script runs on fake tensors, which store no data, up to its first optimizer step. No
    accelerator, no training data and little memory are needed.

    \b
      cavvy estimate train.py --samples 5e6
      cavvy estimate -m package.train -- --epochs 3
      cavvy estimate --model gpt2 --batch 8 --precision bf16 --compile
      cavvy estimate --model llama-8b --gpus 8 --fsdp --checkpointing --gpu H100
    """
    from cavvy.planner.estimate.profile import OPTIMIZERS, StepSettings

    if given["optimizer"] and given["optimizer"].lower() not in OPTIMIZERS:
        raise CommandFailure(
            f"unknown optimizer {given['optimizer']!r}",
            f"known: {', '.join(OPTIMIZERS)}",
            exit_code=2,
        )
    if given["model"] == "list":
        from cavvy.cli.task.model_names import say_size
        from cavvy.cli.task.profiles import model_parameters

        columns = [TableColumn("model"), TableColumn("parameters", show=say_size)]
        rows_out(columns, list(model_parameters().items()), output)
        return
    _read_gpu(given)
    data, profile = _find(script, list(arguments), given)
    run = StepSettings(
        batch=given["batch"],
        precision=given["precision"],
        optimizer=given["optimizer"],
        compile=given["compiled"],
        channels_last=given["channels_last"],
        math_attention=given["attention"] == "math",
        accumulate=given["accumulate"] or (data or {}).get("run", {}).get("accumulate", 1),
        accelerators=given["gpus"],
        nodes=given["nodes"],
        shard=given["fsdp"],
    )
    if given["save"]:
        _save(given["save"], data, run)
    _show(profile, run, given, output)


def _read_gpu(given: dict[str, Any]) -> None:
    """Split a value of `--gpu`, such as H100:8, A100:80GB or A100:80GB:8, into its parts, and store
    them in `given`.
    """
    from cavvy.domain.units import UnitError, is_whole, parse_memory_mib

    name, *parts = (given["only"] or "").split(":")
    if parts and is_whole(parts[-1]) and int(parts[-1]):
        count = int(parts.pop())
        source = click.get_current_context().get_parameter_source("gpus")
        if source is not ParameterSource.DEFAULT and given["gpus"] != count:
            raise click.UsageError(
                f"--gpus {given['gpus']} and --gpu {given['only']} state different numbers of "
                "accelerators per node: expected one of them (a memory size has a unit: H100:80GB)"
            )
        given["gpus"] = count
    size = ":".join(parts)
    try:
        if is_whole(size):
            raise UnitError("a memory size needs a unit, such as GB")
        given["memory_mib"] = parse_memory_mib(size) if parts else None
    except UnitError as error:
        hint = "expected NAME, NAME:COUNT or NAME:SIZE:COUNT, such as H100:8 or A100:80GB:8"
        raise click.UsageError(f"--gpu {given['only']}: {hint}") from error
    given["only"] = name


def _find(
    script: str | None, arguments: list[str], given: dict[str, Any]
) -> "tuple[dict[str, Any] | None, WorkProfile]":
    from cavvy.cli.task import profiles

    if sum(1 for each in (script, given["model"], given["file"]) if each) != 1:
        raise click.UsageError("expected one of TRAIN.PY, --model NAME and --profile WORK.JSON")
    if given["model"]:
        return None, profiles.find_model(
            given["model"], given["precision"] or "bf16", given["checkpointing"]
        )
    if given["checkpointing"]:
        raise click.UsageError(
            "--checkpointing needs --model; a script's trace shows whether the "
            "script uses checkpointing"
        )
    if given["file"]:
        data = profiles.read_file(given["file"])
    else:
        from cavvy.capabilities.estimates.traced import trace

        data = trace(str(script), arguments)
    return data, profiles.read(data, str(given["file"] or script))


def _save(path: str, data: dict[str, Any] | None, run: "StepSettings") -> None:
    import json
    from pathlib import Path

    from cavvy.cli.view.output_file import write_text
    from cavvy.domain.values import asdict

    if data is None:
        raise click.UsageError("--save needs a script; the profiles of --model are built in")
    kept = {
        key: value for key, value in asdict(run).items() if key not in ("accelerators", "nodes")
    }
    write_text(Path(path), json.dumps({**data, "run": kept}))
    click.echo(f"wrote {path}; refer to it as `work.profile` in a task", err=True)


def _show(profile: "WorkProfile", run: "StepSettings", given: dict[str, Any], output: str) -> None:
    from cavvy.cli.task.profiles import measured_devices
    from cavvy.planner.estimate.table import estimate_on

    prices, measured = _cheapest(given["gpus"]), measured_devices()
    found = [
        _row(estimate_on(profile, device, run, measured), prices, given["samples"], run.nodes)
        for device in _list_devices(given["only"], given["memory_mib"])
    ]
    found.sort(
        key=lambda row: (
            not row["fits"],
            row["usd_per_1000"] is None,
            row["usd_per_1000"] or row["step_ms"],
        )
    )
    if output == "json":
        batch = run.batch or profile.batch
        about = {"profile": profile.name, "batch": batch, "sample": profile.sample or None}
        about |= {"assumed": profile.assumed}
        json_out({**about, "estimates": found})
        return
    is_table = output == "table"
    limit = given["limit"] if given["limit"] is not None else _ROWS if is_table else 0
    unsaid = ("time_s", "usd") if is_table and not given["samples"] else ()
    heads = [head for head in _COLUMNS if head.name not in unsaid]
    rows_out(heads, found[: limit or None], output, _title(profile, run))
    if is_table:
        _notes(found, bool(limit) and len(found) > limit, profile, run)


def _list_devices(only: str | None, memory_mib: int | None) -> "list[DeviceRates]":
    """Return the accelerators that match `--gpu`. Raises CommandFailure if no accelerator
    matches."""
    from cavvy.catalog.accelerators import names_matching, suggest
    from cavvy.planner.estimate.table import list_devices

    wanted = names_matching(only) if only else None
    exact = (
        wanted is not None and len(wanted) == 1
    )  # If `--gpu` is a family or vendor, accelerators with more memory match, too.
    devices = [
        each
        for each in list_devices()
        if (wanted is None or each.name in wanted)
        and (
            not memory_mib
            or (each.memory_mib == memory_mib if exact else each.memory_mib >= memory_mib)
        )
    ]
    if not devices:
        close = suggest(only or "")
        named = f"did you mean {close}?" if close and close != only else ""
        hint = named or "omit --gpu to list all accelerators"
        raise CommandFailure(f"no known accelerator matches {only!r}", hint, exit_code=2)
    return devices


def _title(profile: "WorkProfile", run: "StepSettings") -> str:
    batch, precision = run.batch or profile.batch, run.precision or profile.precision
    each = f" x {profile.sample}" if profile.sample else ""
    title = f"{profile.name}: batch {batch}{each}, {precision}"
    title += f", {run.optimizer or profile.optimizer}"
    title += f", {profile.parameters / 1e6:,.1f} M parameters"
    if run.devices > 1:
        nodes = f" on {run.nodes} nodes" if run.nodes > 1 else ""
        state = "sharded" if run.shard else "replicated"
        title += f", {run.accelerators} per node{nodes}, {state} state"
    return title


def _notes(
    found: "Sequence[dict[str, Any]]", cut: bool, profile: "WorkProfile", run: "StepSettings"
) -> None:
    assumed = profile.assumed
    small = sum(1 for row in found if not row["fits"])
    more = "; --limit 0 shows all" if cut else ""
    kinds = "1 accelerator" if len(found) == 1 else f"{len(found)} accelerators"
    lack = f"of which {small} {'does' if small == 1 else 'do'} not have enough memory"
    enough = "which has enough memory" if len(found) == 1 else "all with enough memory"
    notes = [
        f"{kinds}, {lack if small else enough}{more}.",
        "NEED includes a margin for fragmentation and the driver. "
        f"{_describe_error(found, profile, run)} `cavvy bench` measures the speed.",
    ]
    if profile.sample:
        notes.append(
            f"Each sample is a {profile.sample}; the estimate of a script uses its own samples."
        )
    notes += [
        f"assumed: {each}, because a trace contains no data values" for each in assumed[:_ASSUMED]
    ]
    if len(assumed) > _ASSUMED:
        notes.append(f"{len(assumed) - _ASSUMED} more assumptions; -o json lists all")
    for each in notes:
        text_out(each, sys.stderr)


def _describe_error(
    found: "Sequence[dict[str, Any]]", profile: "WorkProfile", run: "StepSettings"
) -> str:
    """Return a sentence on the range of the measured times of such steps."""
    from cavvy.planner.estimate.table import STEPS_MEASURED_ON, list_unmeasured

    most = max(row["step_ms_high"] / row["step_ms"] for row in found)
    least = min(row["step_ms_high"] / row["step_ms"] for row in found)
    much = f"{least - 1:.0%}" if most - least < 0.01 else f"{least - 1:.0%} to {most - 1:.0%}"
    unmeasured = " and ".join(list_unmeasured(profile, run))
    if unmeasured:
        return (
            f"Step times of {unmeasured} were not measured; they are assumed to exceed the "
            f"estimate by at most {much} in nine of ten cases."
        )
    said = (
        f"Nine of ten measured steps took at most {much} longer than estimated, depending on the "
        "accelerator and on the step's kernels."
    )
    if all(row["accelerator"] in STEPS_MEASURED_ON for row in found):
        return said
    names = ", ".join(STEPS_MEASURED_ON)
    return f"{said} Steps were measured on {names}; for others, this is assumed."


def _cheapest(count: int) -> "dict[tuple[str, int], Offer]":
    """Return the cheapest on-demand offer with at least `count` accelerators, by accelerator name
    and memory.
    """
    from cavvy.domain.offers import Purchase
    from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, SpotPolicy
    from cavvy.store.snapshot.layout import SnapshotError
    from cavvy.store.snapshot.reader import find_offers

    best: dict[tuple[str, int], Offer] = {}
    accelerators = (AcceleratorNeed(count_min=count, count_max=max(count, 64)),)
    try:
        offers = find_offers(ResourceSpec(accelerators=accelerators, spot=SpotPolicy.NEVER))
    except SnapshotError as error:
        raise CommandFailure(str(error)) from error
    for offer in offers:
        if (
            offer.accelerator is None
            or offer.accelerator_count < count
            or offer.purchase is not Purchase.ON_DEMAND
        ):
            continue
        key = (offer.accelerator, offer.accelerator_memory_mib)
        if key not in best or offer.rate.micros_per_hour < best[key].rate.micros_per_hour:
            best[key] = offer
    return best


def _row(
    on: "DeviceEstimate",
    prices: "dict[tuple[str, int], Offer]",
    samples: float | None,
    nodes: int,
) -> dict[str, Any]:
    """Return the values of a row, which are those of all nodes together."""
    offer = prices.get((on.device.name, on.device.memory_mib))
    price, rate = float(offer.rate.usd) * nodes if offer else None, on.step.samples_per_s * nodes
    lasts = samples / rate if samples else None
    thousand = None if price is None else price / 3600 / rate * 1000
    return {
        "accelerator": on.device.name,
        "memory_mib": on.device.memory_mib,
        "fits": on.fits,
        "peak_mib": round(on.memory.peak),
        "needed_mib": round(on.memory.needed),
        "step_ms": round(on.step.total * 1e3, 3),
        "step_ms_low": round(on.step.total * 1e3 / on.spread, 3),
        "step_ms_high": round(on.step.total * 1e3 * on.spread, 3),
        "samples_per_s": round(rate, 2),
        "mfu": round(on.step.mfu, 4),
        "usd_hr": price,
        "offer": f"{offer.provider} {offer.instance_type}" if offer else None,
        "usd_per_1000": thousand,
        "time_s": lasts,
        "usd": lasts / 3600 * price if lasts and price is not None and on.fits else None,
    }


def _gib(mib: float) -> str:
    return f"{mib / 1024:.1f}"


def _usd(value: float) -> str:
    from cavvy.domain.units import format_price

    return format_price(value)


def _per_thousand(usd: float) -> str:
    return f"{usd:.4f}" if usd >= 0.01 else _usd(usd).replace("$", "")


def _length(seconds: float) -> str:
    from datetime import timedelta

    from cavvy.domain.units import format_duration

    return format_duration(timedelta(seconds=round(seconds)))


_COLUMNS = (
    TableColumn("accelerator"),
    TableColumn("memory_mib", "GIB", lambda mib: f"{mib // 1024}", drop=7),
    TableColumn("fits", "FITS"),
    TableColumn("peak_mib", "PEAK", _gib, drop=3),
    TableColumn("needed_mib", "NEED", _gib, drop=4),
    TableColumn("step_ms", "STEP MS", lambda ms: f"{ms:,.1f}"),
    TableColumn("samples_per_s", "SAMPLES/S", lambda rate: f"{rate:,.1f}", drop=5),
    TableColumn("mfu", "MFU", lambda share: f"{share:.0%}", drop=2),
    TableColumn("usd_hr", "$/H", lambda usd: _usd(usd).removeprefix("$"), drop=6),
    TableColumn("usd_per_1000", "$/1000", _per_thousand),
    TableColumn("time_s", "TIME", _length),
    TableColumn("usd", "COST", _usd),
    TableColumn("offer", "CHEAPEST", drop=1),
)
