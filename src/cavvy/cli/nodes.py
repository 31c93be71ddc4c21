"""`cavvy nodes` and `cavvy nodes reservations`: list nodes that run or are billed now, maintain own
hosts, and reserve them and their GPUs for projects.
"""

import getpass
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from cavvy.cli.down import nothing_runs
from cavvy.cli.reach.arguments import complete_hosts
from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, any_project_option, call_server, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup, NameArgument
from cavvy.cli.view.numbers import count_option, read_length
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.maintenance_wire import HolderView, HostView, ReservationView


_LOOK_S = 2.0  # seconds between two requests while a command waits
_NO_HOSTS = (
    "this server has no own hosts: enable this machine or SSH hosts in the settings, or add a "
    "machine with `cavvy nodes join`"
)
_hosts_argument = click.argument(
    "names",
    metavar="NODE...",
    nargs=-1,
    required=True,
    cls=NameArgument,
    listing="`cavvy nodes hosts` lists own hosts",
    shell_complete=complete_hosts,
)
_reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why; shown to those who wait for the node."
)


@click.group("nodes", cls=CommandGroup, invoke_without_command=True)
@any_project_option
@output_option
@click.pass_context
def command(context: click.Context, project: str | None, output: str) -> None:
    """List nodes that run or are billed now, of all providers.

    `cordon`, `drain`, `hosts`, `uncordon`, `who` and `reservations` are for own hosts: this
    machine, SSH hosts and machines that joined.
    """
    if context.invoked_subcommand is not None:
        return
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("project", drop=3),
        TableColumn("job"),
        TableColumn("attempt", "TRY", drop=6),
        TableColumn("rank", drop=9),
        TableColumn("phase", drop=10),
        TableColumn("rank_phase", "AGENT", drop=5),
        TableColumn("placement", drop=2),
        TableColumn("devices", show=lambda ids: ",".join(ids) or "-", drop=1, cut=True),
        TableColumn("rate_micros_per_hour", "RATE"),
        TableColumn("since", show=formatting.show_ago, drop=7),
        TableColumn("kept_until", "KEPT UNTIL", formatting.show_clock, drop=8),
        TableColumn("heard_at", "HEARD", formatting.show_ago, drop=4),
        TableColumn("gang", hidden=True),
        TableColumn("job_id", hidden=True),
    ]
    with session() as client:
        rows = client.nodes(project)
        machines = client.joined() if output == "table" else []
    rows_out(columns, rows, output, empty=nothing_runs(project))
    if machines:
        click.echo(f"joined: {', '.join(f'{each.name} ({each.state})' for each in machines)}")


@command.command("hosts")
@output_option
def hosts(output: str) -> None:
    """List own hosts with their states.

    A cordoned host gets no new work. A host that is draining is left by its work, and is drained
    once it is empty.
    """
    from cavvy.cli.view import formatting
    from cavvy.client.maintenance_wire import list_hosts

    with session() as client:
        found = list_hosts(client)
    columns = [
        TableColumn("name", "NODE"),
        TableColumn("state"),
        TableColumn("gpus", "GPUS", drop=3),
        TableColumn("free_gpus", "FREE", drop=4),
        TableColumn("jobs"),
        TableColumn("drain_by", "EMPTY BY", formatting.show_clock, drop=2),
        TableColumn("why", wrap=True),
        TableColumn("since", hidden=True),
    ]
    rows = [
        {
            "name": each.name,
            "state": each.state,
            "gpus": len(each.devices),
            "free_gpus": len(_list_free(each)),
            "jobs": len({holder.job_id or holder.since for holder in each.holders}),
            "drain_by": each.drain_by,
            "why": "; ".join(
                [*filter(None, [each.why]), *(f"{gpu}: {why}" for gpu, why in each.sick.items())]
            ),
            "since": each.since,
        }
        for each in found
    ]
    rows_out(columns, rows, output, empty=_NO_HOSTS)


@command.command("who")
@click.argument("names", metavar="[NODE]...", nargs=-1, shell_complete=complete_hosts)
@output_option
def who(names: tuple[str, ...], output: str) -> None:
    """Show who holds which GPUs of own hosts, and until when.

    UNTIL is when the job's time limit ends it or its nodes are taken, or else an estimate from
    earlier jobs like it. In a task, `limits: {duration: 8h}` sets a limit. GPUs are counted from 0,
    in the order of the host; JSON has their IDs.
    """
    from cavvy.cli.view import formatting
    from cavvy.client.maintenance_wire import list_hosts

    with session() as client:
        found = list_hosts(client)
    if names:
        found = [_pick(found, name) for name in names]
    columns = [
        TableColumn("node"),
        TableColumn("gpus", "GPU", show=lambda numbers: str(numbers) or "-"),
        TableColumn("cpus", show=lambda cpus: f"{cpus:g}", drop=5),
        TableColumn("job"),
        TableColumn("user", drop=3),
        TableColumn("project", drop=2),
        TableColumn("since", show=formatting.show_ago, drop=4),
        TableColumn("until", show=formatting.show_clock),
        TableColumn("until_from", "BY", drop=1),
        TableColumn("reservation", wrap=True, drop=6),
        TableColumn("devices", hidden=True),
        TableColumn("memory_mib", hidden=True),
    ]
    rows_out(columns, [row for each in found for row in _list_rows(each)], output, empty=_NO_HOSTS)


@command.command("cordon")
@_hosts_argument
@_reason_option
@count_option(
    "--gpu",
    "gpus",
    least=0,
    metavar="N",
    multiple=True,
    help="Close only this GPU of the host, counted from 0 as by `who`; repeat for several.",
)
def cordon(names: tuple[str, ...], reason: str, gpus: tuple[int, ...]) -> None:
    """Place no new work on own hosts. Running work goes on.

    With --gpu, only these GPUs get no new work, and jobs with checkpoints leave them.
    """
    from cavvy.client.maintenance_wire import CordonAsk, cordon_host

    with session() as client:
        for name in names:
            ask = CordonAsk(node=name, reason=reason, user=getpass.getuser(), gpus=gpus)
            host = cordon_host(client, ask)
            what = f"{host.name} is cordoned"
            if gpus:
                what = f"GPU {', '.join(map(str, gpus))} of {host.name} gets no new work"
            click.echo(f"{what}; {_say_jobs(host)}")
    click.echo(f"take new work again: cavvy nodes uncordon {' '.join(names)}")


@command.command("uncordon")
@_hosts_argument
def uncordon(names: tuple[str, ...]) -> None:
    """Place work on own hosts again. Work that was told to leave leaves."""
    from cavvy.client.maintenance_wire import UncordonAsk, uncordon_host

    with session() as client:
        for name in names:
            host = uncordon_host(client, UncordonAsk(node=name))
            why = f": {host.why}" if host.why else ""
            click.echo(f"{host.name} is {host.state}{why}")


@command.command("drain")
@_hosts_argument
@click.option(
    "--within",
    default="30m",
    show_default=True,
    metavar="TIME",
    help="The time within which the nodes are to be empty.",
)
@_reason_option
@click.option("--wait", "waits", is_flag=True, help="Wait until the nodes are empty.")
def drain(names: tuple[str, ...], within: str, reason: str, waits: bool) -> None:
    """Cordon own hosts, and let their work leave.

    Jobs with checkpoints save one at once and go on elsewhere. Other jobs may end by themselves.
    Those that still run near the end of the time get their grace period, and start again elsewhere;
    this counts as no retry.
    """
    from cavvy.client.maintenance_wire import DrainAsk, drain_host

    within_s = read_length(within, "--within").total_seconds()
    with session(patience_s=FOLLOW_PATIENCE_S) as client:
        found = []
        for name in names:
            ask = DrainAsk(node=name, reason=reason, user=getpass.getuser(), within_s=within_s)
            found.append(drain_host(client, ask))
        for host in found:
            click.echo(_say_drain(host))
            for line in _list_leaving(host):
                click.echo(f"  {line}")
        if waits:
            _wait(client, [each.name for each in found])
        elif any(each.holders for each in found):
            click.echo("watch it: cavvy nodes hosts")


def _wait(client: "ApiClient", names: Sequence[str]) -> None:
    """Wait until these hosts are empty, and say what changes."""
    from cavvy.client.maintenance_wire import list_hosts

    told: dict[str, object] = {}
    left = list(names)
    while left:
        hosts = {each.name: each for each in list_hosts(client)}
        for name in list(left):
            host = hosts.get(name)
            if host is None or host.state not in ("draining", "drained"):
                state = "gone" if host is None else host.state
                raise CommandFailure(f"{name} is no longer drained: it is {state}")
            jobs = [each.job_id for each in host.holders]
            if told.setdefault(name, jobs) != jobs or not jobs:
                click.echo(_say_drain(host))
                told[name] = jobs
            if not jobs:
                left.remove(name)
        if left:
            time.sleep(_LOOK_S)


def _say_drain(host: "HostView") -> str:
    from cavvy.cli.view import formatting

    if not host.holders or host.drain_by is None:
        return f"{host.name} is drained: no work is on it"
    return (
        f"{host.name} is to be empty by {formatting.show_clock(host.drain_by)}; {_say_jobs(host)}"
    )


def _say_jobs(host: "HostView") -> str:
    from cavvy.domain.units import format_count

    jobs = {each.job_id or str(each.since) for each in host.holders}
    return f"{format_count(len(jobs), 'job')} on it" if jobs else "no work is on it"


def _list_leaving(host: "HostView") -> Iterator[str]:
    """Yield what happens to each job on a host that is drained."""
    from cavvy.cli.view import formatting
    from cavvy.domain.units import format_duration

    for each in host.holders:
        if each.rank:
            continue
        name = each.job or "a job of another project"
        if each.until_from == "notice" and each.until is not None:
            yield f"{name} leaves by {formatting.show_clock(each.until)}"
        elif each.lost_s:
            cost = f" ({formatting.show_money(each.lost_micros)})" if each.lost_micros else ""
            lost = format_duration(timedelta(seconds=each.lost_s))
            yield f"{name} saves no checkpoints: if it left now, {lost}{cost} of work would be lost"
        else:
            yield f"{name} leaves, and loses no work"


def _pick(hosts: "Sequence[HostView]", name: str) -> "HostView":
    for host in hosts:
        if name in (host.name, host.name.partition("/")[2]):
            return host
    from cavvy.spec.problems import listed

    known = [host.name for host in hosts]
    hint = f"expected {listed(known, 'or')}" if known else _NO_HOSTS
    raise CommandFailure(f"there is no node {name}", hint)


def _list_free(host: "HostView") -> list[str]:
    held = {device for each in host.holders for device in each.devices}
    return [each for each in host.devices if each not in held and each not in host.sick]


def _list_rows(host: "HostView") -> Iterator[dict[str, object]]:
    """Yield a row for each holder, and one for the GPUs that are free."""
    numbers = {device: at for at, device in enumerate(host.devices)}
    for each in host.holders:
        yield {
            "node": host.name,
            "gpus": _say_gpus(each, numbers),
            "job": each.job or "(another project)",
            "user": each.user,
            "project": each.project,
            "since": each.since,
            "until": each.until,
            "until_from": each.until_from,
            "reservation": _say_reserved(host, each.devices),
            "devices": each.devices,
            "cpus": each.cpus,
            "memory_mib": each.memory_mib,
        }
    free = _list_free(host)
    if free or not host.holders:
        yield {
            "node": host.name,
            "gpus": ",".join(str(numbers[each]) for each in free),
            "job": "free" if host.state == "ready" else host.state,
            "user": "",
            "project": "",
            "since": host.since,
            "until": None,
            "until_from": "",
            "reservation": _say_reserved(host, free),
            "devices": free,
            "cpus": host.cpus - sum(each.cpus for each in host.holders),
            "memory_mib": host.memory_mib - sum(each.memory_mib for each in host.holders),
        }


def _say_reserved(host: "HostView", devices: Sequence[str]) -> str:
    from cavvy.cli.view import formatting

    told = []
    for each in host.reservations:
        mine = [part for part in each.parts if part.host == host.name]
        if any(not part.devices or {*part.devices} & {*devices} for part in mine):
            begin, end = (
                formatting.show_minute(each.begins_at),
                formatting.show_minute(each.ends_at),
            )
            told.append(f"{each.project or 'another project'} {begin} to {end}")
    return "; ".join(told)


def _say_gpus(holder: "HolderView", numbers: dict[str, int]) -> str:
    told = ",".join(str(numbers.get(each, each)) for each in holder.devices)
    return f"{told} ({holder.part:.0%})" if holder.part < 1 else told


@click.group("reservations", cls=CommandGroup)
def reservations_command() -> None:
    """Reserve own hosts or GPUs for a project and a time.

    From the begin to the end, only jobs of the project, and of the projects below it, run there.
    Before the begin, other jobs start there only if their time limit (`limits: {duration: 2h}`)
    ends before it.
    """


@reservations_command.command("add")
@click.option("-p", "--project", required=True, help="The project for which to reserve.")
@click.option("--user", default="", help="Reserve only for this user of the project.")
@click.option(
    "--nodes",
    default="",
    metavar="NODE,NODE",
    help="The hosts to reserve.",
    shell_complete=complete_hosts,
)
@count_option("--gpus", metavar="N", help="Reserve N GPUs of any host.")
@click.option("--from", "begin", default="now", metavar="TIME", help="The begin, in local time.")
@click.option("--for", "length", required=True, metavar="TIME", help="The length, such as 4h.")
@click.option("--name", default="", help="The name; the default is the project with a number.")
@click.option("--reason", default="", metavar="TEXT", help="Why.")
@click.option("--drain", is_flag=True, help="Let work leave that may still run there at the begin.")
def add_reserved(
    project: str,
    user: str,
    nodes: str,
    gpus: int | None,
    begin: str,
    length: str,
    name: str,
    reason: str,
    drain: bool,
) -> None:
    """Reserve hosts (--nodes) or a number of GPUs (--gpus).

    If other work may still run there at the begin, the reservation is refused, unless --drain lets
    this work leave: it gets its notice before the begin, saves a checkpoint, and goes on elsewhere.
    """
    from cavvy.client.maintenance_wire import ReservationAsk, add_reservation

    hosts = [each.strip() for each in nodes.split(",") if each.strip()]
    if bool(hosts) == (gpus is not None):
        raise CommandFailure("give --nodes or --gpus, and not both", exit_code=2)
    ask = ReservationAsk(
        project=project,
        user=user,
        name=name,
        nodes=hosts,
        gpus=gpus or 0,
        begins_at=_read_begin(begin),
        length_s=read_length(length, "--for").total_seconds(),
        reason=reason,
        made_by=getpass.getuser(),
        moves=drain,
    )
    made = call_server(add_reservation, ask)
    click.echo(f"reservation {made.name}: {_say_parts(made)} for project {made.project}")
    click.echo(
        f"from {formatting.show_time(made.begins_at)} to {formatting.show_time(made.ends_at)}"
    )


@reservations_command.command("list")
@any_project_option
@output_option
def list_reserved(project: str | None, output: str) -> None:
    """List reservations that have not ended."""
    from cavvy.client.maintenance_wire import list_reservations

    found = call_server(list_reservations, project)
    now = datetime.now(UTC)
    rows = [
        {
            "name": each.name,
            "state": "active" if each.begins_at <= now else "planned",
            "project": each.project,
            "user": each.user,
            "what": _say_parts(each),
            "begins_at": each.begins_at,
            "ends_at": each.ends_at,
            "made_by": each.made_by,
            "reason": each.reason,
        }
        for each in found
    ]
    columns = [
        TableColumn("name"),
        TableColumn("state", drop=2),
        TableColumn("project"),
        TableColumn("user", drop=3),
        TableColumn("what", wrap=True),
        TableColumn("begins_at", "FROM", formatting.show_time),
        TableColumn("ends_at", "TO", formatting.show_time),
        TableColumn("made_by", "BY", drop=4),
        TableColumn("reason", drop=1, cut=True),
    ]
    rows_out(columns, rows, output, empty="no reservations; `cavvy nodes reservations add` adds")


@reservations_command.command("rm")
@click.argument("name", cls=NameArgument, listing="`cavvy nodes reservations list` lists them")
def remove_reserved(name: str) -> None:
    """Give what is reserved back."""
    from cavvy.client.maintenance_wire import delete_reservation

    call_server(delete_reservation, name)
    click.echo(f"reservation {name} is removed")


def _read_begin(text: str) -> datetime:
    if text == "now":
        return datetime.now(UTC)
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise CommandFailure(
            f"--from {text}: expected a local date and time such as 2026-12-01T08:00, or now",
            exit_code=2,
        ) from error


def _say_parts(found: "ReservationView") -> str:
    from cavvy.domain.units import format_count

    return ", ".join(
        f"{format_count(len(part.devices), 'GPU')} of {part.host}" if part.devices else part.host
        for part in found.parts
    )
