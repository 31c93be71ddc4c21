"""`cavvy serve` and `cavvy stop`: start a service or deploy a new revision of it, and end
services.
"""

import getpass
import sys
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.serving.reach import complete_services
from cavvy.cli.reach.arguments import needless_yes_option
from cavvy.cli.reach.interrupts import held_interrupt, leave_if
from cavvy.cli.reach.services import wait_for_end
from cavvy.cli.reach.session import project_option, session, task_project
from cavvy.cli.task.load import param_option, read_params, read_task, yes_option
from cavvy.cli.task.option_groups import GroupedCommand
from cavvy.cli.task.options import task_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import json_option

if TYPE_CHECKING:
    from cavvy.capabilities.serving.wire import ServedView
    from cavvy.task_files import ReadOptions


@click.command("serve", cls=GroupedCommand)
@task_options
@param_option
@yes_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@click.option(
    "--name", default=None, help="The service's name; the default is the name in the file."
)
@json_option
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    yes: bool,
    project: str | None,
    name: str | None,
    output: str,
) -> None:
    """Start a service and print its URL. The file is a task with a section `service`; the service's
    program listens on the port in the variable PORT. Options override values in the file.

    You can send requests immediately: they wait until a replica is ready. If the service exists,
    each replica of the new revision replaces an old replica once the new replica is ready.
    """
    given = read_params(param)
    serve_file(file, options, given, yes=yes, project=project, name=name, output=output)


# What `spec.support.object_to_service` refuses: given, it says so, and the help offers none of it.
for _each in command.params:
    if isinstance(_each, click.Option):
        _each.hidden = _each.opts[0] in ("--after", "--group", "--machine", "--pool", "--deadline")


def serve_file(
    file: str,
    options: "ReadOptions",
    params: dict[str, str],
    *,
    yes: bool,
    project: str | None,
    name: str | None,
    output: str,
) -> None:
    """Start the service of a file and print its URL."""
    from cavvy.capabilities.serving.wire import find_service
    from cavvy.cli.reach.follow import leave_running
    from cavvy.cli.reach.services import await_url
    from cavvy.cli.task.submission import ask_consent, make_origin
    from cavvy.client.service_wire import put_service
    from cavvy.domain.values import replace

    loaded = read_task(file, params, replace(options, serves=True), tells=True)
    project, name = task_project(project, loaded.task), name or loaded.task.name
    with session() as client:
        origin = make_origin(client, project, loaded, loaded.text)

        def ask_server(consent: bool) -> None:
            with held_interrupt() as interrupted:
                put_service(
                    client,
                    loaded.text,
                    project=project,
                    name=name,
                    path=file,
                    params=params,
                    origin=origin,
                    user=getpass.getuser(),
                    consent=consent,
                )
            leave_if(interrupted(), project, [name])

        ask_consent(
            yes or (loaded.task.limits.budget is not None and not sys.stdin.isatty()),
            ask_server,
        )
        with leave_running(project, name):
            found = await_url(client, project, name, find_service)
    _show(found, output)


def _show(found: "ServedView", output: str) -> None:
    from cavvy.capabilities.serving.reach import list_advice
    from cavvy.capabilities.serving.services_command import describe_webhook
    from cavvy.cli.view.output import json_out

    name, project = found.name, found.project
    if output == "json":
        json_out({"name": name, "project": project, "url": found.url, "revision": found.revision})
        return
    click.echo(f"service {name} is at {found.url}/ (revision {found.revision})")
    click.echo("\n".join(list_advice(found)))
    for hook in found.webhooks:
        click.echo(f"webhook {hook.name}: {describe_webhook(hook)}")


@click.command("unserve")
@click.argument("names", nargs=-1, shell_complete=complete_services)
@project_option
@click.option("--all", "everything", is_flag=True, help="End all services of the project.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the replicas have ended.")
@needless_yes_option
def unserve_command(names: tuple[str, ...], project: str, everything: bool, no_wait: bool) -> None:
    """End services. The replicas finish their open requests and stop; requests that wait for a
    replica are answered with 404. The bills of the services are kept.
    """
    from cavvy.capabilities.serving.wire import find_service, list_services
    from cavvy.client.service_wire import end_service

    if bool(names) == everything:
        raise CommandFailure(
            "expected either names of services or --all",
            "`cavvy services` lists services",
            exit_code=2,
        )
    with session() as client:
        if everything:
            names = tuple(each.name for each in list_services(client, project))
        names = tuple(dict.fromkeys(names))
        for name in names:  # end no service if one of the names is wrong
            find_service(client, project, name)
        for name in names:
            end_service(client, project, name)
        for name in names:
            if not no_wait:
                wait_for_end(client, project, name)
            click.echo(f"service {name} {'ends' if no_wait else 'has ended'}")
        if not names:
            click.echo(f"project {project} has no services")
