"""Services in the commands of jobs: finding a service by its name, the logs of its replicas, and
its end.
"""

import time
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arrays import LogGroup
from cavvy.cli.view.formatting import ENDED

if TYPE_CHECKING:
    from cavvy.client import ApiClient, ApiError
    from cavvy.client.service_wire import ServedView
    from cavvy.client.wire import JobDetail

_LOOK_AGAIN_S = 0.2
_QUIET_S = 5  # seconds of waiting before a message names the reason


def service_instead(
    client: "ApiClient", project: str, name: str, error: "ApiError"
) -> "ServedView":
    """Return the service with this name if `error` says that there is no such job; otherwise raise
    the error. The names of services have no dot.
    """
    from cavvy.client import ApiError
    from cavvy.client.service_wire import find_service

    if error.code != "job-not-found" or "." in name:
        raise error
    try:
        return find_service(client, project, name)
    except ApiError as other:
        if other.status not in (403, 404):
            raise
        raise error from None


class ReplicaLogs:
    """The replicas of a service, as their logs are read. Jobs that have ended are asked once."""

    def __init__(self, client: "ApiClient", found: "ServedView") -> None:
        self._client, self._project, self._name = client, found.project, found.name
        self._found: ServedView | None = found
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
        from cavvy.client.service_wire import find_service

        try:
            self._found = find_service(self._client, self._project, self._name)
        except ApiError as error:
            if error.code != "service-not-found":
                raise
            self._found = None
        return self.look()

    def _tell(self) -> str:
        found = self._found
        return "has ended" if found is None else f"{found.ready} replicas ready of {found.target}"


def wait_for_end(client: "ApiClient", project: str, name: str) -> None:
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
