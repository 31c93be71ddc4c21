"""`cavvy run`: submits a task, follows its log and exits with its exit code."""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import detach_option, named, session, task_project
from cavvy.cli.task.load import param_option, read_params, read_tasks, yes_option
from cavvy.cli.task.options import add_array, list_files, task_options
from cavvy.cli.task.programs import ProgramCommand
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.output import json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.cli.task.submission import GraphFile
    from cavvy.client import ApiClient
    from cavvy.client.wire import MachineView, Submitted
    from cavvy.task_files import LoadedTask, ReadOptions


class RunCommand(ProgramCommand):
    several = True


@click.command("run", cls=RunCommand)
@task_options
@param_option
@click.option(
    "--array",
    metavar="INDICES",
    help="Run a job for each index, such as 0-99, 0-99:5 or 1,3,7-9.",
)
@click.option(
    "--sweep",
    multiple=True,
    metavar="NAME=VALUES",
    help="Run a job for each value, such as lr=0.1,0.01 or seed=0..4; repeatable, for each "
    "combination.",
)
@click.option(
    "--parallel",
    metavar="COUNT",
    help="How many jobs run at the same time; the default is all.",
)
@click.option(
    "--trials",
    metavar="COUNT",
    help="Run only so many jobs of the sweep; `best` of the file chooses their values from the "
    "results so far.",
)
@detach_option
@yes_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@click.option("--name", default=None, help="The job's name; the default is the name in the file.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check and show the task and its offers; submit nothing.",
)
@json_option
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    array: str | None,
    sweep: tuple[str, ...],
    parallel: str | None,
    trials: str | None,
    detach: bool,
    yes: bool,
    project: str | None,
    name: str | None,
    dry_run: bool,
    output: str,
) -> None:
    """Run a task on the best configured offer, follow it, and exit with its exit code.

    The task is a file, - for standard input, or the command after --. Options override values in
    the file. A command after a file replaces the file's `run`. Ctrl-C leaves the job running and
    shows how to follow it again. If the file describes a service, the command offers to start the
    service, as `cavvy serve` does; without a terminal, it exits with 2.

    Several files, such as jobs/*.yaml, are submitted together: all of them or none.
    """
    if output == "json" and not detach:
        raise click.UsageError("-o json needs --detach: without it, the output is the job's log")
    params = read_params(param)
    options = add_array(options, array, sweep, parallel, trials)
    if files := list_files():
        if name is not None:
            raise click.UsageError("--name is for one file; set `name` in the files")
        from cavvy.cli.task.several_files import run_files

        run_files(
            files, params, options, project, yes=yes, dry_run=dry_run, detach=detach, output=output
        )
        return
    try:
        loaded, *others = read_tasks(file, params, options, tells=True)
    except CommandFailure:
        if dry_run or not _chooses_service(file, params, options):
            raise
        from cavvy.cli.reach.services import find_service_commands

        find_service_commands().serve_file(
            file, options, params, yes=yes, project=project, name=name, output=output
        )
        return
    project = task_project(project, loaded.task)
    with session() as client:
        if others:
            graph = _make_graph([loaded, *others], file, params, project, name)
            _run_graph(client, graph, output, yes=yes, dry_run=dry_run, detach=detach)
        elif dry_run:
            _show(client, loaded, file, params, project, name)
        else:
            from cavvy.cli.task.submission import submit_loaded

            job = submit_loaded(client, loaded, file, params, project, name, yes)
            _follow_job(client, job, loaded.task.machine, output, detach=detach)


def _follow_job(
    client: "ApiClient", job: "Submitted", machine: str | None, output: str, *, detach: bool
) -> None:
    """Print that a job or an array was submitted and, unless `detach` is set, follow it."""
    from cavvy.cli.reach.follow import follow, leave_running

    if job.members is not None:
        _follow_array(client, job, output, detach=detach)
        return
    if detach:
        _print(client, job, output)
        if machine is not None and output != "json":
            click.echo(say_machine(client.machine(job.project, machine)))
        return
    with leave_running(job.project, job.name):
        click.echo(f"{job.name} ({job.id}) submitted to project {job.project}", err=True)
        if machine is not None:
            click.echo(say_machine(client.machine(job.project, machine)), err=True)
        follow(client, job.project, job.name)


def _follow_array(client: "ApiClient", job: "Submitted", output: str, *, detach: bool) -> None:
    """Print that an array was submitted and, unless `detach` is set, wait for its jobs."""
    from cavvy.cli.reach.arrays import follow_to_end
    from cavvy.domain.units import format_count

    if detach and output == "json":
        _print(client, job, output)
        return
    there = named(job.project, job.name)
    jobs = format_count(job.members or 0, "job")
    click.echo(f"{job.name} ({job.id}): {jobs} submitted", err=not detach)
    if detach:
        click.echo(f"list its jobs: cavvy ps {there}    stop it: cavvy stop {there}")
        return
    follow_to_end(client, job)


def _make_graph(
    tasks: "Sequence[LoadedTask]",
    file: str,
    params: dict[str, str],
    project: str,
    name: str | None,
) -> "GraphFile":
    from cavvy.cli.task.submission import GraphFile

    if name is not None:
        raise click.UsageError("--name is for a file with one task; set `name` in the file")
    return GraphFile(tasks=tasks, file=file, params=params, project=project)


def _run_graph(
    client: "ApiClient", graph: "GraphFile", output: str, *, yes: bool, dry_run: bool, detach: bool
) -> None:
    """Submit the tasks of a file and, unless `detach` is set, wait for their jobs. With `dry_run`,
    only show them."""
    from cavvy.cli.reach.follow import leave_running
    from cavvy.cli.reach.waiting import wait_for_all
    from cavvy.cli.task.submission import submit_graph

    if dry_run:
        _show_graph(client, graph)
        return
    jobs = submit_graph(client, graph, yes=yes)
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out([{"id": job.id, "name": job.name, "project": job.project} for job in jobs])
        return
    names = " ".join(job.name for job in jobs)
    click.echo(f"{len(jobs)} tasks submitted to project {graph.project}: {names}", err=not detach)
    if detach:
        click.echo(f"wait for them: cavvy wait {named(graph.project, names)}")
        return
    with leave_running(graph.project, names, "wait"):
        sys.exit(wait_for_all(client, graph.project, [job.id for job in jobs], graph=True))


def _show_graph(client: "ApiClient", graph: "GraphFile") -> None:
    """Print the tasks that would be submitted, and their offers. Raises CommandFailure or ApiError
    if the submission would be refused.
    """
    from cavvy.cli.plan import show_plan
    from cavvy.cli.task.profiles import with_rates
    from cavvy.cli.task.submission import check_graph, freeze_files
    from cavvy.cli.view.output import pairs_out
    from cavvy.domain.values import replace
    from cavvy.spec.describe import describe_task

    for each in graph.tasks:
        own = each.source.task or each.task
        task = replace(each.task, project=graph.project, setup=own.setup, run=own.run)
        pairs_out(describe_task(task))
        freeze_files(each)
        show_plan(with_rates(each.task, each.folder), graph.file)
        click.echo()
    if price := check_graph(client, graph):
        note_out(f"`cavvy run` asks for your consent first: {price}")


def _chooses_service(file: str, params: dict[str, str], options: "ReadOptions") -> bool:
    """If the file describes a service, ask on a terminal whether to start the service. Returns the
    answer.
    """
    from cavvy.cli.task.submission import may_ask
    from cavvy.domain.values import replace
    from cavvy.spec import SpecError
    from cavvy.task_files import load_task

    if not may_ask():
        return False
    try:
        load_task(file, params, options=replace(options, serves=True))
    except SpecError:
        return False
    return click.confirm(f"{file} describes a service, not a job. Start the service?", err=True)


def say_machine(machine: "MachineView") -> str:
    """Return one line with the machine's state and price."""
    from cavvy.cli.view.formatting import show_seconds
    from cavvy.domain.units import HourlyRate, format_rate

    kept = f"kept for {show_seconds(machine.keep_s)} without work"
    if machine.rate_micros_per_hour is None:
        return f"machine {machine.name}: will get new nodes, {kept}"
    price = format_rate(HourlyRate(machine.rate_micros_per_hour))
    behind = f", {machine.waiting} jobs waiting" if machine.waiting > 1 else ""
    return f"machine {machine.name}: {machine.placement}, {price}, {kept}{behind}"


def _show(
    client: "ApiClient",
    loaded: "LoadedTask",
    file: str,
    params: dict[str, str],
    project: str,
    name: str | None,
) -> None:
    """Print the task that would be submitted, with notes about its file, and the offers of the
    configured providers. Raises CommandFailure or ApiError if the submission would be refused.
    """
    from cavvy.cli.plan import show_plan
    from cavvy.cli.task.problems import ask_server
    from cavvy.cli.task.profiles import with_rates
    from cavvy.cli.task.submission import freeze_files
    from cavvy.cli.view.output import pairs_out
    from cavvy.client import ApiError
    from cavvy.domain.values import replace
    from cavvy.spec.describe import describe_task

    for note in loaded.source.notes:
        note_out(note)
    task = replace(loaded.task, name=name or loaded.task.name, project=project)
    # The task's own commands, without the lines that define another tool's variables.
    own = loaded.source.task or task
    pairs_out(describe_task(replace(task, setup=own.setup, run=own.run)))
    freeze_files(loaded)
    refusal = None
    try:
        price = ask_server(client, loaded, file, params, project, name).consent_needed
    except ApiError as error:
        if error.code != "no-offer":
            raise
        refusal, price = error, ""  # the plan shows the offers that nearly fit
    show_plan(with_rates(task, loaded.folder), file)
    if refusal is not None:
        raise refusal
    if price:
        note_out(f"`cavvy run` asks for your consent first: {price}")


def _print(client: "ApiClient", job: "Submitted", output: str) -> None:
    if output == "json":
        from cavvy.cli.view.output import json_out

        document = {"id": job.id, "name": job.name, "project": job.project, "phase": job.phase}
        json_out(document | ({} if job.members is None else {"members": job.members}))
        return
    from cavvy.cli.reach.waiting import find_wait

    why = find_wait(client, job.project, job.id)
    click.echo(f"{job.name} ({job.id}): {job.phase}{why and f', {why}'}")
    there = named(job.project, job.name)
    click.echo(f"follow it: cavvy logs -f {there}    stop it: cavvy stop {there}")
