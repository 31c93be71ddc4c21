"""`cavvy pool`: manages elastic pools of nodes."""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import pool_argument
from cavvy.cli.reach.session import any_project_option, call_server, named, project_option, session
from cavvy.cli.task.load import yes_option
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, confirm, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, json_option, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from cavvy.client.pool_wire import PoolView


@click.group("pool", cls=CommandGroup)
def command() -> None:
    """Share nodes among the jobs of a project. A pool adds nodes while jobs wait for it, up to its
    maximum, and removes nodes that have been idle for a while.

    `cavvy run --pool NAME` runs a job in a pool. Idle nodes are billed, to the project of the pool.
    """


@command.command("apply")
@click.argument("file", type=click.Path())
@project_option
@yes_option
def apply(file: str, project: str, yes: bool) -> None:
    """Create the pool that FILE describes, or change the pool of this name.

    The keys of the file are name, min, max, idle, spot_share, hours, image, labels, resources, join
    and secrets. Pools of SkyPilot and fleets of dstack are read, too. Running jobs continue; jobs
    that wait and idle nodes follow the new file.
    """
    from cavvy.cli.task.submission import ask_consent
    from cavvy.client.pool_wire import PoolAsk, apply_pool
    from cavvy.spec import SpecError, read_file

    try:
        text = read_file(Path(file))
    except SpecError as error:
        raise CommandFailure(str(error.problems[0]), exit_code=2) from error
    with session() as client:
        pool = ask_consent(
            yes,
            lambda consent: apply_pool(
                client,
                project,
                PoolAsk(text=text, path=file, user=getpass.getuser(), consent=consent),
            ),
            "add --yes to agree; `resources: {max_price: …}` limits the price of a node",
        )
    if pool.join:
        click.echo(f"pool {pool.name} has {_say_size(pool)}, which another cluster orders")
    else:
        click.echo(f"pool {pool.name} has {_say_size(pool)}; idle nodes stay {_say_idle(pool)}")
        click.echo(f"run a job in it: cavvy run --pool {pool.name} FILE")
    if pool.problem:
        note_out(f"the pool can have no nodes now: {pool.problem}")


@command.command("list")
@any_project_option
@output_option
def list_all(project: str | None, output: str) -> None:
    """List pools with their nodes, jobs and costs."""
    from cavvy.client.pool_wire import list_pools

    rows = call_server(list_pools, project)
    columns = [
        TableColumn("name"),
        TableColumn("project", hidden=len({row.project for row in rows}) < 2),
        TableColumn("state"),
        TableColumn("nodes"),
        TableColumn("idle", drop=3),
        TableColumn("min", drop=4),
        TableColumn("max"),
        TableColumn("running_jobs", "RUNNING", drop=2),
        TableColumn("waiting_jobs", "WAITING"),
        TableColumn("rate_micros_per_hour", "PRICE"),
        TableColumn("spent_micros", "COST", drop=1),
        TableColumn("problem", hidden=True),
    ]
    rows_out(columns, rows, output, empty="no pools yet; create one with `cavvy pool apply FILE`")


@command.command("show")
@pool_argument
@project_option
@json_option
def show(name: str, project: str, output: str) -> None:
    """Show one pool: its limits, nodes, jobs and costs."""
    from cavvy.client.pool_wire import read_pool

    pool = call_server(read_pool, project, name)
    if output == "json":
        from msgspec.structs import asdict

        from cavvy.cli.view.output import json_out

        json_out(asdict(pool))
        return
    from cavvy.domain.units import HourlyRate, format_rate

    opens = f", opens {formatting.show_time(pool.opens_at)}" if pool.opens_at else ""
    pairs_out(
        [
            ("pool", pool.name),
            ("project", pool.project),
            ("state", f"{pool.state}{opens}"),
            ("size", _say_size(pool)),
            ("nodes", _say_nodes(pool)),
            ("jobs", f"{pool.running_jobs} running, {pool.waiting_jobs} waiting"),
            ("idle nodes stay", _say_idle(pool)),
            ("spot", f"at most {pool.spot_share:.0%}"),
            ("hours", pool.hours or "always"),
            ("price now", format_rate(HourlyRate(pool.rate_micros_per_hour))),
            ("problem", pool.problem or "-"),
        ]
    )


@command.command("rm")
@pool_argument
@project_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def remove(name: str, project: str, yes: bool) -> None:
    """Remove a pool without unfinished jobs. Its idle nodes are removed, too."""
    from cavvy.client.pool_wire import delete_pool, read_pool

    with session() as client:
        pool = read_pool(client, project, name)
        if pool.nodes and not yes:
            confirm(f"remove pool {name} and its {_say_nodes(pool)}?")
        delete_pool(client, project, name)
    click.echo(f"pool {named(project, name)} is removed")


def _say_size(pool: "PoolView") -> str:
    from cavvy.domain.units import format_count

    return f"{pool.min} to {format_count(pool.max, 'node')}"


def _say_nodes(pool: "PoolView") -> str:
    parts = [(pool.idle, "idle"), (pool.starting, "starting"), (pool.leaving, "leaving")]
    told = ", ".join(f"{count} {what}" for count, what in parts if count)
    return f"{pool.nodes}{f' ({told})' if told else ''}"


def _say_idle(pool: "PoolView") -> str:
    from datetime import timedelta

    from cavvy.domain.units import format_duration

    return format_duration(timedelta(seconds=pool.idle_s))
