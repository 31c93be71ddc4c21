"""`cavvy simulate`: runs the production policies over recorded markets and queues, without a
server.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cavvy.capabilities.simulation import view
from cavvy.capabilities.simulation.serve import serve
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import (
    WholeRange,
    amount_option,
    count_option,
    positive_option,
)
from cavvy.cli.view.output import json_out, output_option
from cavvy.domain.values import Struct
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cavvy.capabilities.simulation.traces.packing import PackedList
    from cavvy.capabilities.simulation.traces.time_sharing import SharedResult
    from cavvy.capabilities.simulation.traces.trials import PolicyTrial, TrialResult

# File formats of matplotlib. If the name has no suffix, matplotlib writes a .png.
_DRAWN = (
    "",
    ".svg",
    ".svgz",
    ".png",
    ".pdf",
    ".jpg",
    ".jpeg",
    ".eps",
    ".ps",
    ".tif",
    ".tiff",
    ".webp",
)


_F = TypeVar("_F", bound="Callable[..., Any]")
_FILE = click.Path(dir_okay=False, path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


def _times_option(name: str, usual: str, text: str) -> "Callable[[_F], _F]":
    """Add an option with one or several lengths of time, of which every combination is run."""
    return click.option(name, multiple=True, default=(usual,), metavar="TIME,...", help=text)


_segments_option = click.option(
    "--segments", is_flag=True, help="Include every run with its segments in the JSON output."
)
_csv_option = click.option("--csv", "csv_file", type=_FILE, help="Write every run or job as CSV.")
_parquet_option = click.option(
    "--parquet", "parquet_file", type=_FILE, help="Write every run or job as Parquet."
)
_plot_option = click.option(
    "--plot", type=_FILE, help="Draw cost against slack (.svg, .png or .pdf)."
)
_processes_option = count_option(
    "--processes", show_default="all cores", help="Number of worker processes."
)
_gantt_option = click.option(
    "--gantt", type=_FILE, help="Draw the first runs over time (.svg, .png or .pdf)."
)


@click.group("simulate", cls=CommandGroup, invoke_without_command=True)
@click.option(
    "--scenario",
    metavar="FILE",
    type=_INPUT,
    help="A YAML file of markets, jobs and a fleet; the guide on simulations shows one.",
)
@_segments_option
@_csv_option
@_plot_option
@_gantt_option
@output_option
@click.pass_context
def command(context: click.Context, /, scenario: Path | None, **given: Any) -> None:
    """Simulate the production policies on recorded markets and queues, and show the resulting
    costs.

    The simulation launches no machines and costs no money. Pass a --scenario, or use one of the
    commands below.
    """
    if context.invoked_subcommand is not None:
        if scenario is not None:
            raise CommandFailure(
                "--scenario cannot be used with a command",
                f"omit `{context.invoked_subcommand}`",
                exit_code=2,
            )
        return
    if scenario is None:
        click.echo(context.get_help())
        return
    _run_scenario(scenario, **given)


def _run_scenario(
    path: Path,
    segments: bool,
    csv_file: Path | None,
    plot: Path | None,
    gantt: Path | None,
    output: str,
) -> None:
    from cavvy.capabilities.simulation.traces.fleet import run_fleet
    from cavvy.capabilities.simulation.traces.readers import TraceError
    from cavvy.capabilities.simulation.traces.scenario import read_scenario, run_scenario

    _check_targets((csv_file,), (plot, gantt))
    try:
        scenario = read_scenario(path)
        optimum = bool(scenario.jobs) and _has_numpy()
        keep = segments or gantt is not None
        results = list(run_scenario(scenario, keep_segments=keep, with_optimum=optimum))
        waited = (
            run_fleet(scenario.fleet.arrivals, scenario.fleet.pools)
            if scenario.fleet is not None
            else None
        )
        if results:
            view.write_files(results, csv_file, None)
            view.draw(results, plot, gantt)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    view.print_scenario(results, waited, output, segments=segments)


@command.command("spot")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    required=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="A trace (JSON with gap_seconds and the number of available instances per tick), or a "
    "folder of traces; repeatable.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME,...",
    default=("auto,uniform-progress,greedy",),
    help="The policies: auto, uniform-progress (short: up), greedy, on-demand (short: never) and "
    "spot-only (short: only).",
)
@_times_option("--work", "48h", "The job's work.")
@_times_option("--deadline", "52h", "Time to the deadline.")
@_times_option(
    "--overhead",
    "0.2h",
    "Time from a launch until the job has resumed; this time is billed, but no work is done.",
)
@count_option("--windows", default=20, help="Number of random start times for each market.")
@click.option("--seed", type=WholeRange(), default=0, help="Seed for the random start times.")
@click.option(
    "--together",
    is_flag=True,
    help="Simulate one run across the markets of all traces, instead of one run per trace.",
)
@positive_option("--on-demand", default=1.0, metavar="USD", help="On-demand price per hour.")
@positive_option(
    "--spot-ratio", default=0.3, help="Ratio of spot to on-demand price, for traces without prices."
)
@click.option(
    "--prices",
    type=_INPUT,
    help="A JSON object with each trace's name and its spot prices per tick in dollars per hour.",
)
@click.option(
    "--egress",
    type=_INPUT,
    help="A CSV file with transfer prices: from_region,to_region,price_usd_per_gb.",
)
@amount_option(
    "--checkpoint-gb",
    default=50.0,
    help="Size of the checkpoint that a move between regions transfers.",
)
@count_option("--nodes", default=1, help="Number of nodes of the job.")
@click.option(
    "--optimum/--no-optimum",
    default=True,
    help="Compare each run with the lowest possible cost (needs numpy).",
)
@_segments_option
@_csv_option
@_parquet_option
@_plot_option
@_gantt_option
@_processes_option
@output_option
def spot(**given: Any) -> None:
    """Run deadline policies over recorded spot markets, and compare each run with the lowest
    possible cost.

    If options have several values, such as --deadline 52h,60h, every combination is simulated. Each
    ratio is the total cost divided by the total optimum. `--segments -o json` lists every segment
    of each run; cost, deadline and optimum can be checked with these segments.
    """
    from cavvy.capabilities.simulation.traces.readers import TraceError

    options = _Options(**given)
    _check_targets((options.csv_file, options.parquet_file), (options.plot, options.gantt))
    try:
        results = _run(_trials(options), options.processes)
        view.write_files(results, options.csv_file, options.parquet_file)
        view.draw(results, options.plot, options.gantt)
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if options.output == "json":
        json_out(view.as_document(results, segments=options.segments))
    else:
        view.print_scores(results, options.output)


@command.command("fleet")
@click.option(
    "--jobs",
    metavar="FILE",
    type=_INPUT,
    help="CSV or Parquet with the columns arrival_s, duration_s, gpus and vc, one row per job, or "
    "the output of Slurm's `sacct --parsable2`.",
)
@click.option(
    "--pools",
    metavar="FILE",
    type=_INPUT,
    help="A CSV file with the columns `vc` and `node num`: the number of nodes in each virtual "
    "cluster.",
)
@count_option("--gpus-per-node", default=8, help="GPUs per node.")
@count_option(
    "--shared-gpus", help="Let all projects (column vc) share one pool with this many GPUs."
)
@amount_option(
    "--resume",
    default=60.0,
    metavar="SECONDS",
    help="Work that a job in a shared pool repeats after each preemption.",
)
@click.option(
    "--pods",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="CSV with the columns cpu_milli, memory_mib, num_gpu, gpu_milli and, optionally, "
    "gpu_spec, one row per job, or a folder of such files; repeatable. Jobs of several nodes have "
    "nodes and, as in a task's `topology`, same, prefer and slice.",
)
@click.option(
    "--nodes",
    metavar="FILE",
    type=_INPUT,
    help="CSV with the columns cpu_milli, memory_mib, gpu and model, one row per node. Other "
    "columns, such as rack, are labels.",
)
@click.option(
    "--published",
    metavar="FILE",
    type=_INPUT,
    help="CSV with the column `workload` and one column per policy: results to compare with.",
)
@count_option("--runs", default=3, help="Number of random orders of the pods.")
@click.option("--page", type=_FILE, help="Write tables and plots as an HTML page.")
@_processes_option
@_csv_option
@_parquet_option
@click.option(
    "--plot",
    type=_FILE,
    help="Draw used GPUs and waiting jobs over time.",
)
@output_option
def fleet(**given: Any) -> None:
    """Schedule recorded jobs with the code that schedules real jobs.

    With --jobs and --pools, show waiting times and GPU use. GPUs of a virtual cluster are allocated
    one by one, to the cluster's own jobs only. Jobs that need more GPUs than their cluster has are
    skipped and counted.

    With --shared-gpus, all clusters are projects that share one pool; the share of each is
    proportional to its nodes. Jobs may be preempted: they save a checkpoint and continue later.

    With --pods and --nodes, fill the nodes with jobs that never end and request 130 % of the GPUs
    in total, and show how many GPUs each policy allocates. The formats are those of Alibaba's trace
    cluster-trace-gpu-v2023 (https://github.com/alibaba/clusterdata).
    """
    from cavvy.capabilities.simulation.traces.readers import TraceError

    options = _FleetOptions(**given)
    _check_fleet(options)
    _check_targets((options.csv_file, options.parquet_file, options.page), (options.plot,))
    try:
        packed, published = _run_packing(options)
        if packed:
            view.print_packing(packed, published, options.output)
        shared: Sequence[SharedResult] = []
        if options.jobs is not None and options.pools is not None:
            if options.shared_gpus is None:
                _run_queue(options, options.jobs, options.pools)
            else:
                shared = _run_sharing(options, options.jobs, options.pools, options.shared_gpus)
                view.print_sharing(shared, options.output)
        if options.page is not None:
            from cavvy.capabilities.simulation.traces.plots import make_page
            from cavvy.cli.view.output_file import write_text

            write_text(options.page, make_page(packed, published, shared))
    except TraceError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    except ModuleNotFoundError as error:
        raise _missing(error) from error


class _FleetOptions(Struct, frozen=True, kw_only=True):
    """The options of `simulate fleet`."""

    jobs: Path | None
    pools: Path | None
    gpus_per_node: int
    shared_gpus: int | None
    resume: float
    pods: tuple[Path, ...]
    nodes: Path | None
    published: Path | None
    runs: int
    page: Path | None
    processes: int | None
    csv_file: Path | None
    parquet_file: Path | None
    plot: Path | None
    output: str


def _check_fleet(options: _FleetOptions) -> None:
    """Raises CommandFailure if an option lacks the other option that it needs."""
    for one, other, given, needed in (
        ("--jobs", "--pools", options.jobs, options.pools),
        ("--pools", "--jobs", options.pools, options.jobs),
        ("--pods", "--nodes", options.pods, options.nodes),
        ("--nodes", "--pods", options.nodes, options.pods),
        ("--published", "--pods", options.published, options.pods),
        ("--shared-gpus", "--jobs", options.shared_gpus, options.jobs),
        ("--page", "--pods or --shared-gpus", options.page, options.pods or options.shared_gpus),
    ):
        if given and not needed:
            raise CommandFailure(f"{one} needs {other}", exit_code=2)
    if options.jobs and options.pods and options.output in ("json", "csv"):
        raise CommandFailure(
            f"-o {options.output} shows one simulation: pass either --jobs or --pods", exit_code=2
        )
    if not options.jobs and not options.pods:
        raise CommandFailure(
            "expected jobs: pass --jobs and --pools, or --pods and --nodes", exit_code=2
        )


def _run_packing(
    options: _FleetOptions,
) -> "tuple[Sequence[PackedList], Mapping[str, Mapping[str, float]]]":
    """Return the results for each list of jobs, and the published results."""
    from cavvy.capabilities.simulation.traces.packing import (
        find_lists,
        pack_lists,
        read_labels,
        read_nodes,
        read_pods,
        read_published,
    )

    if options.nodes is None:
        return [], {}
    published = read_published(options.published) if options.published is not None else {}
    lists = {path.stem: read_pods(path) for path in find_lists(options.pods)}
    processes = options.processes or _count_cores()
    nodes, labels = read_nodes(options.nodes), read_labels(options.nodes)
    return pack_lists(lists, nodes, range(options.runs), processes, labels), published


def _run_sharing(
    options: _FleetOptions, jobs: Path, pools: Path, gpus: int
) -> "Sequence[SharedResult]":
    from cavvy.capabilities.simulation.traces.fleet import read_jobs, read_pools
    from cavvy.capabilities.simulation.traces.time_sharing import compare_sharing

    projects = read_pools(pools, options.gpus_per_node)
    return compare_sharing(read_jobs(jobs), projects, gpus, options.resume)


def _run_queue(options: _FleetOptions, jobs: Path, pools: Path) -> None:
    from cavvy.capabilities.simulation.traces.fleet import (
        QueueStay,
        read_jobs,
        read_pools,
        run_fleet,
    )

    stays: list[QueueStay] = []
    keep = stays.append if options.csv_file or options.parquet_file or options.plot else None
    held = read_pools(pools, options.gpus_per_node)
    outcome = run_fleet(read_jobs(jobs), held, keep)
    view.write_fleet(stays, options.csv_file, options.parquet_file)
    if options.plot is not None:
        from cavvy.capabilities.simulation.traces.plots import plot_fleet

        plot_fleet(stays, sum(held.values()), options.plot)
    view.print_fleet(outcome, options.output)


command.add_command(serve)


def _check_targets(files: "Iterable[Path | None]", drawings: "Iterable[Path | None]") -> None:
    """Check the names and folders of the output files before the simulation runs. Raises
    CommandFailure.
    """
    from cavvy.cli.view.output_file import check_output

    shown = [path for path in drawings if path is not None]
    for path in shown:
        if path.suffix.lower() not in _DRAWN:
            raise CommandFailure(
                f"{path}: expected a name that ends in .svg, .png or .pdf", exit_code=2
            )
    for path in (*(path for path in files if path is not None), *shown):
        if not path.parent.is_dir():
            raise CommandFailure(f"{path.parent}: no such folder", exit_code=2)
        check_output(path)


class _Options(Struct, frozen=True, kw_only=True):
    """The options of `simulate spot`."""

    traces: tuple[Path, ...]
    policies: tuple[str, ...]
    work: tuple[str, ...]
    deadline: tuple[str, ...]
    overhead: tuple[str, ...]
    windows: int
    seed: int
    together: bool
    on_demand: float
    spot_ratio: float
    prices: Path | None
    egress: Path | None
    checkpoint_gb: float
    nodes: int
    optimum: bool
    segments: bool
    csv_file: Path | None
    parquet_file: Path | None
    plot: Path | None
    gantt: Path | None
    processes: int | None
    output: str


def _trials(options: _Options) -> "list[PolicyTrial]":
    from cavvy.capabilities.simulation.traces.readers import list_traces
    from cavvy.capabilities.simulation.traces.trials import TraceMarkets, list_settings, plan_trials

    paths = [str(path) for path in list_traces(options.traces)]
    worlds = [
        TraceMarkets(
            paths=tuple(group),
            on_demand_usd_hr=options.on_demand,
            spot_ratio=options.spot_ratio,
            nodes=options.nodes,
            prices=str(options.prices) if options.prices else None,
            egress=str(options.egress) if options.egress else None,
            checkpoint_gb=options.checkpoint_gb,
        )
        for group in ([paths] if options.together else [[path] for path in paths])
    ]
    settings = list_settings(
        _lengths("--work", options.work),
        _lengths("--deadline", options.deadline),
        _lengths("--overhead", options.overhead),
    )
    return plan_trials(
        worlds,
        settings,
        _names(options.policies),
        windows=options.windows,
        seed=options.seed,
        keep_segments=options.segments or options.gantt is not None,
        with_optimum=options.optimum and _has_numpy(),
    )


def _has_numpy() -> bool:
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        note_out(f"the optimum is not computed, because numpy is missing ({extra_command('sim')})")
        return False
    return True


def _run(trials: "list[PolicyTrial]", processes: int | None) -> "list[TrialResult]":
    from rich.console import Console
    from rich.progress import Progress

    from cavvy.capabilities.simulation.traces.trials import run_trials

    console = Console(stderr=True)
    results: list[TrialResult] = []
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=len(trials))
        for found in run_trials(trials, min(processes or _count_cores(), len(trials))):
            results += found
            progress.advance(task)
    return results


def _count_cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lengths(option: str, texts: tuple[str, ...]) -> list[float]:
    from cavvy.domain.units import UnitError, parse_duration

    try:
        return [parse_duration(part).total_seconds() for text in texts for part in text.split(",")]
    except UnitError as error:
        raise CommandFailure(f"{option}: {error}", exit_code=2) from error


def _names(texts: tuple[str, ...]) -> list[str]:
    from cavvy.planner.spot.classic import ALIASES, POLICIES

    names = [part.strip() for text in texts for part in text.split(",")]
    for name in names:
        if name not in POLICIES and name not in ALIASES:
            raise CommandFailure(
                f"--policy: expected one of {', '.join(POLICIES)}, not {name!r}", exit_code=2
            )
    return list(dict.fromkeys(names))


def _missing(error: ModuleNotFoundError) -> CommandFailure:
    return CommandFailure(
        f"simulations need {error.name}, which is not installed", extra_command("sim")
    )
