"""`cavvy unserve`: ends a service."""

import time

import click

from cavvy.cli.reach.arguments import needless_yes_option, service_argument
from cavvy.cli.reach.session import project_option, session

_LOOK_AGAIN_S = 0.2
_QUIET_S = 5  # seconds of waiting before a message names the reason


@click.command("unserve")
@service_argument
@project_option
@click.option("--no-wait", is_flag=True, help="Do not wait until the replicas have ended.")
@needless_yes_option
def command(name: str, project: str, no_wait: bool) -> None:
    """End a service. The replicas finish their open requests and stop; requests that wait for a
    replica are answered with 404. The bill of the service is kept.
    """
    from cavvy.client import ApiError
    from cavvy.client.service_wire import end_service, find_service

    with session() as client:
        end_service(client, project, name)
        told = time.monotonic() + _QUIET_S
        while not no_wait:
            try:
                find_service(client, project, name)
            except ApiError as error:
                if error.code != "service-not-found":
                    raise
                break
            if time.monotonic() > told:
                click.echo(f"waiting until the requests of {name} are answered", err=True)
                told = float("inf")
            time.sleep(_LOOK_AGAIN_S)
    click.echo(f"service {name} {'ends' if no_wait else 'has ended'}")
