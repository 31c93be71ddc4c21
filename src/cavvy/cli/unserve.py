"""`cavvy unserve`: ends services."""

import time
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_services, needless_yes_option
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_LOOK_AGAIN_S = 0.2
_QUIET_S = 5  # seconds of waiting before a message names the reason


@click.command("unserve")
@click.argument("names", nargs=-1, shell_complete=complete_services)
@project_option
@click.option("--all", "everything", is_flag=True, help="End all services of the project.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the replicas have ended.")
@needless_yes_option
def command(names: tuple[str, ...], project: str, everything: bool, no_wait: bool) -> None:
    """End services. The replicas finish their open requests and stop; requests that wait for a
    replica are answered with 404. The bills of the services are kept.
    """
    from cavvy.client.service_wire import end_service, find_service, list_services

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
                _wait(client, project, name)
            click.echo(f"service {name} {'ends' if no_wait else 'has ended'}")
        if not names:
            click.echo(f"project {project} has no services")


def _wait(client: "ApiClient", project: str, name: str) -> None:
    """Wait until a service no longer exists."""
    from cavvy.client import ApiError
    from cavvy.client.service_wire import find_service

    told = time.monotonic() + _QUIET_S
    while True:
        try:
            find_service(client, project, name)
        except ApiError as error:
            if error.code != "service-not-found":
                raise
            return
        if time.monotonic() > told:
            click.echo(f"waiting until the requests of {name} are answered", err=True)
            told = float("inf")
        time.sleep(_LOOK_AGAIN_S)
