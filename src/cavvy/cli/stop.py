"""`cavvy stop`, `rm` and `nodes drill`: stop jobs, remove ended jobs with their events, logs and
checkpoints, and rehearse failures such as a preemption.
"""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs, job_argument, needless_yes_option
from cavvy.cli.reach.arrays import follow_array
from cavvy.cli.reach.names import find_array, find_named, with_running
from cavvy.cli.reach.services import wait_for_end
from cavvy.cli.reach.session import list_jobs, named, project_option, session
from cavvy.cli.view.failure import CommandFailure, confirm, note_out
from cavvy.cli.view.formatting import ENDED, UNFINISHED, show_size
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import WholeRange, count_option, read_length

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobDetail


@click.command("stop")
@click.argument("names", nargs=-1, shell_complete=complete_jobs)
@project_option
@click.option("--all", "everything", is_flag=True, help="Stop all unfinished jobs of the project.")
@click.option("--user", default="", help="With --all: only the jobs of this user.")
@click.option("--wait/--no-wait", default=True, help="Wait until the jobs have ended.")
@needless_yes_option
def command(names: tuple[str, ...], project: str, everything: bool, user: str, wait: bool) -> None:
    """Stop jobs, all jobs of an array, or a service. Each job gets its grace period to save its
    work; then its nodes are released.

    A service ends after its pending requests are answered. If only one of its replicas is stopped,
    it starts a new one when it needs one.
    """
    if bool(names) == everything:
        raise CommandFailure(
            "expected either names of jobs or --all", "`cavvy ps` lists jobs", exit_code=2
        )
    if user and not everything:
        raise CommandFailure("--user needs --all", f"`cavvy ps --user {user}` lists the jobs", 2)
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService, end_service
    from cavvy.client.wire import JobDetail

    services: list[str] = []
    theirs: set[str] = set()
    with session() as client:
        if everything:
            rows = list_jobs(client, project, UNFINISHED, arrays=True, user=user)[0]
            ids = [row.id for row in rows if not row.members]
            arrays = [row.id for row in rows if row.members and not row.service]
            theirs = {row.service for row in rows}
        else:
            found = _find_all(client, project, names)
            ids = [each.id for each in found if isinstance(each, JobDetail)]
            arrays = [each.array.id for each in found if isinstance(each, ArrayDetail)]
            services = [each.name for each in found if isinstance(each, NamedService)]
        for service in services:
            end_service(client, project, service)
        for array_id in arrays:
            _stop_array(client, project, array_id, wait=wait)
        # Each job is stopped by its ID. If a request with a name were sent again, it could stop the
        # machine's next session.
        for job_id in ids:
            job = client.stop(project, job_id)
            if job.phase in ENDED:
                click.echo(f"{job.name}: {job.phase}, {job.reason}")
            elif wait:
                _wait(client, project, job.id)
            else:
                click.echo(f"{job.name}: stopping")
        for service in services:
            if wait:
                wait_for_end(client, project, service)
            click.echo(f"service {service} {'has ended' if wait else 'ends'}")
        if not (ids or arrays or services):
            whose = f" of {user}" if user else ""
            click.echo(f"project {project} has no unfinished jobs{whose}")
        _tell_services(client, project, None if everything else ids, theirs if user else None)


def _find_all(
    client: "ApiClient", project: str, names: tuple[str, ...]
) -> "list[JobDetail | ArrayDetail | NamedService]":
    """Return what the names mean. Raises CommandFailure, before anything is stopped."""
    from cavvy.client import ApiError

    found = []
    for name in names:
        try:
            found.append(find_named(client, project, name, newest=True))
        except (ApiError, CommandFailure) as error:
            if len(names) == 1:
                raise
            hint = f"; {error.hint}" if error.hint else ""
            raise CommandFailure(
                f"{error}: none of the {len(names)} is stopped", f"leave {name} out{hint}"
            ) from error
    return found


def _tell_services(
    client: "ApiClient",
    project: str,
    stopped: "list[str] | None",
    theirs: "set[str] | None" = None,
) -> None:
    """Say that services go on, and how to end them: the services whose replicas are among the
    `stopped` jobs, or all services of the project if `stopped` is None; with `theirs`, only these.
    """
    from cavvy.client import ApiError
    from cavvy.client.service_wire import list_named_services

    try:
        services = [each for each in list_named_services(client, project) if each.state != "ending"]
    except ApiError:  # the jobs are stopped, and the user may lack the right to see services
        return
    for each in services:
        if theirs is not None and each.name not in theirs:
            continue
        if stopped is None or {replica.job for replica in each.replicas} & set(stopped):
            ends = f"`cavvy stop {named(project, each.name)}` ends the service"
            note_out(
                f"service {each.name} goes on, and starts a new replica when it needs one; {ends}"
            )


def _stop_array(client: "ApiClient", project: str, array_id: str, *, wait: bool) -> None:
    from cavvy.client.array_wire import stop_array

    array = stop_array(client, project, array_id)
    if wait:
        array = follow_array(client, project, array_id).array
    click.echo(f"{array.name}: {array.reason}")


def _wait(client: "ApiClient", project: str, job_id: str) -> None:
    for _ in client.follow(project, job_id):
        pass
    job = client.job(project, job_id)
    click.echo(f"{job.name}: {job.phase}, {job.reason}")


_SHOWN = 20  # names in a question


@click.command("rm")
@click.argument("names", nargs=-1, shell_complete=complete_jobs)
@project_option
@click.option("--ended", is_flag=True, help="Remove all ended jobs of the project.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def rm_command(names: tuple[str, ...], project: str, ended: bool, yes: bool) -> None:
    """Remove ended jobs with their events, logs and checkpoints.

    The bills of removed jobs are kept; `cavvy cost` shows them. Jobs that have not ended are not
    removed. An array is removed as a whole, when all its jobs have ended.
    """
    if bool(names) == ended:
        raise CommandFailure("expected either names of jobs or --ended", "`cavvy ps` lists jobs", 2)
    with session() as client:
        if ended:
            rows = list_jobs(client, project, ENDED, arrays=True)[0]
            found = {row.name: sum(row.members.values()) for row in rows}
        else:
            found = dict(_find_ended(client, project, name) for name in names)
        if found and not yes:
            several = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            shown = [
                f"the {count:,} jobs of {name}" if count else name for name, count in found.items()
            ]
            confirm(f"remove {', '.join(shown[:_SHOWN])}{several}, with logs and checkpoints?")
        for name, count in found.items():
            _remove(client, project, name, is_array=bool(count), skip_busy=ended)
        if not found:
            click.echo(f"project {project} has no ended jobs")


def _find_ended(client: "ApiClient", project: str, name: str) -> tuple[str, int]:
    """Return the name of the ended job or array with this name or ID, and the number of the array's
    jobs or 0. Raises CommandFailure.
    """
    from cavvy.client import ApiError

    try:
        job = client.job(project, name)
    except ApiError as error:
        hint = f"`cavvy stop {named(project, name)}` ends it, and its replicas can be removed then"
        array = find_array(client, project, name, error, hint)
        if any(each.phase not in ENDED for each in array.jobs):
            hint = f"`cavvy stop {name}` stops all its jobs"
            message = f"{name} has jobs that have not ended ({array.array.reason})"
            raise CommandFailure(f"{message}, so it is not removed", hint) from None
        return array.array.name, len(array.jobs)
    if job.phase not in ENDED:
        hint = f"`cavvy stop {job.name}` stops the job"
        raise CommandFailure(f"{job.name} is {job.phase}, so it is not removed", hint)
    return job.name, 0


def _remove(
    client: "ApiClient", project: str, name: str, *, is_array: bool, skip_busy: bool
) -> None:
    """Remove a job or an array. If its nodes are not released yet, raises CommandFailure or, with
    `skip_busy`, only prints a message.
    """
    from cavvy.client import ApiError
    from cavvy.client.array_wire import remove_array

    try:
        removed = remove_array(client, project, name) if is_array else client.remove(project, name)
    except ApiError as error:
        if not skip_busy or error.code != "job-not-ended":
            raise
        click.echo(f"{name} is not removed: its nodes are not released yet", err=True)
        return
    size = f", with {show_size(removed.freed_bytes)} of checkpoints" if removed.freed_bytes else ""
    click.echo(f"{name} is removed{size}")
    if removed.kept:
        click.echo(f"some files of {name} could not be deleted: {removed.kept}", err=True)


@click.group("drill", cls=CommandGroup)
def drill_command() -> None:
    """Rehearse failures on your own jobs to check that the jobs survive them."""


@drill_command.command("preempt")
@job_argument
@project_option
@click.option(
    "--notice",
    default="30s",
    help="Time between the notice and the removal of the nodes.",
)
def preempt(name: str, project: str, notice: str) -> None:
    """Give a running job a preemption notice and then reclaim its nodes, as a spot market would."""
    from cavvy.domain.units import format_duration

    length = read_length(notice, "--notice")
    with session() as client:
        notice_s = length.total_seconds()
        job = with_running(
            client, project, name, lambda job: client.drill_preempt(project, job, notice_s=notice_s)
        )
    click.echo(f"{job.name}: the job's nodes will be reclaimed in {format_duration(length)}")
    click.echo(f"watch it resume: cavvy logs -f {named(project, job.name)}")


@drill_command.command("lose-node")
@job_argument
@project_option
@count_option("--rank", least=0, help="The rank that loses its node; by default the last one.")
@click.option("--notice", default="0s", help="Time between the notice and the loss.")
def lose_node(name: str, project: str, rank: int | None, notice: str) -> None:
    """Take one node of a running job on several nodes away, and see what the job does. By default,
    the other nodes are kept, and wait until the lost node is replaced."""
    length = read_length(notice, "--notice")
    with session() as client:

        def lose(job: str) -> tuple[str, int]:
            tries = client.job(project, job).attempts
            last = max((each.rank for each in tries[-1].nodes), default=0) if tries else 0
            lost = last if rank is None else rank
            seconds = length.total_seconds()
            return client.drill_preempt(project, job, notice_s=seconds, rank=lost).name, lost

        job, lost = with_running(client, project, name, lose)
    click.echo(f"{job}: rank {lost} loses its node")
    click.echo(f"watch what follows: cavvy events -f {named(project, job)}")


@click.command("resize")
@job_argument
@click.argument("nodes", type=WholeRange(1))
@project_option
def resize_command(name: str, nodes: int, project: str) -> None:
    """Change the number of nodes of an elastic job, whose `nodes` are a range such as 2..16. A
    running job saves a checkpoint, and starts again from it on NODES nodes, or on fewer if no more
    are free."""
    with session() as client:
        job = with_running(client, project, name, lambda job: client.resize(project, job, nodes))
    click.echo(f"{job.name}: at most {nodes} node{'' if nodes == 1 else 's'}")
    click.echo(f"watch it: cavvy events -f {named(project, job.name)}")
