"""Services in the commands of jobs: the logs of their replicas, waiting until they are ready or
have ended, and what the capability that runs them does for these commands.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import click

from cavvy.cli.reach.arrays import LogGroup
from cavvy.cli.reach.session import named
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED
from cavvy.frame.discover import load_all

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobDetail
    from cavvy.task_files import ReadOptions

_Found = TypeVar("_Found", bound="NamedService")
_LOOK_AGAIN_S = 0.2
_START_S = 60.0  # maximum seconds until a gateway has started, also after a restart of the server
_QUIET_S = 5  # seconds of waiting before a message names the reason


class ServiceCommands(Protocol):
    """What commands of jobs ask of the capability that runs services, since task files describe
    services, too.
    """

    def serve_file(
        self,
        file: str,
        options: "ReadOptions",
        params: dict[str, str],
        *,
        yes: bool,
        project: str | None,
        name: str | None,
        output: str,
    ) -> None:
        """Start the service of a file and print its URL. Raises CommandFailure."""
        ...

    def show_service(self, found: "NamedService", output: str) -> None:
        """Show a service, as `cavvy services show` does."""
        ...


def find_service_commands() -> ServiceCommands:
    """Return what a capability does for services. Raises CommandFailure if none does."""
    for _, make in load_all(lambda each: (each.service_commands,) if each.service_commands else ()):
        return cast(ServiceCommands, make())
    raise CommandFailure(
        "this installation has no capability that runs services",
        "`cavvy --commands` names what is left out, with the reason",
    )


class ReplicaLogs:
    """The replicas of a service, as their logs are read. Jobs that have ended are asked once."""

    def __init__(self, client: "ApiClient", found: "NamedService") -> None:
        self._client, self._project, self._name = client, found.project, found.name
        self._found: NamedService | None = found
        self._jobs: dict[str, JobDetail] = {}

    def look(self) -> LogGroup:
        from cavvy.client import ApiError

        known = self._jobs
        replicas = () if self._found is None else self._found.replicas
        for job_id in [*known, *(each.job for each in replicas if each.job not in known)]:
            if job_id and (job_id not in known or known[job_id].phase not in ENDED):
                try:
                    known[job_id] = self._client.job(self._project, job_id)
                except ApiError as error:
                    if error.code != "job-not-found":
                        raise
        return LogGroup(self._name, self._tell(), list(known.values()), self._found is None)

    def look_again(self) -> LogGroup:
        from cavvy.client import ApiError
        from cavvy.client.service_wire import find_named_service

        try:
            self._found = find_named_service(self._client, self._project, self._name)
        except ApiError as error:
            if error.code != "service-not-found":
                raise
            self._found = None
        return self.look()

    def _tell(self) -> str:
        found = self._found
        return "has ended" if found is None else f"{found.ready} replicas ready of {found.target}"


def wait_for_replicas(
    client: "ApiClient", project: str, name: str, until: float | None = None
) -> None:
    """Wait until as many replicas of a service are ready as it wants, and say how many are. Raises
    CommandFailure at the time `until`."""
    from cavvy.client.service_wire import find_named_service

    told = ""
    while (found := find_named_service(client, project, name)).ready < found.target:
        state = f"{found.ready} of {found.target} replicas ready"
        state += f"; {found.problem}" if found.problem else ""
        if state != told:
            told = state
            click.echo(f"{name}: {told}", err=True)
        if until is not None and time.monotonic() >= until:
            hint = f"the service continues; `cavvy status {named(project, name)}` shows its state"
            raise CommandFailure(f"{name} is not ready: {told}", hint, exit_code=124)
        time.sleep(_LOOK_AGAIN_S)
    click.echo(f"{name}: {found.ready} of {found.target} replicas ready")


def wait_for_end(client: "ApiClient", project: str, name: str, until: float | None = None) -> None:
    """Wait until a service no longer exists. Raises CommandFailure at the time `until`."""
    from cavvy.client import ApiError
    from cavvy.client.service_wire import find_named_service

    told = time.monotonic() + _QUIET_S
    while True:
        try:
            found = find_named_service(client, project, name)
        except ApiError as error:
            if error.code != "service-not-found":
                raise
            return
        if until is not None and time.monotonic() >= until:
            hint = f"the service continues; `cavvy stop {named(project, name)}` ends it"
            raise CommandFailure(f"service {name} has not ended", hint, exit_code=124)
        if time.monotonic() > told:
            ends = found.state == "ending"
            doing = "its requests are answered" if ends else "`cavvy stop` ends it"
            click.echo(f"{name}: waiting until {doing}", err=True)
            told = float("inf")
        time.sleep(_LOOK_AGAIN_S)


def await_url(
    client: "ApiClient",
    project: str,
    name: str,
    find: "Callable[[ApiClient, str, str], _Found]",
) -> "_Found":
    """Wait until the gateway of the service listens, and return the service, as `find` reads it.
    Raises CommandFailure with the reason if the gateway does not start.
    """
    until = time.monotonic() + _START_S
    while True:
        found = find(client, project, name)
        if found.url:
            return found
        if found.unreachable:
            text = f"service {name} cannot be reached: {found.unreachable}"
            raise CommandFailure(text, "after a change of the settings, run `cavvy server restart`")
        if time.monotonic() > until:
            text = f"the gateway of service {name} has not started"
            raise CommandFailure(text, "see `cavvy server logs`")
        time.sleep(_LOOK_AGAIN_S)
