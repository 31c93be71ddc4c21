"""Request and response types of the routes for deployed apps, and client functions that call these
routes.
"""

from datetime import datetime

from msgspec import Raw
from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


class DeployedFunction(Ask, frozen=True, kw_only=True):
    """A function of a deployed app."""

    name: str
    generator: bool = False


class AppPartAsk(Ask, frozen=True, kw_only=True):
    """The job of some functions of an app: what submits it (`text`, `origin`, `snapshot`), and
    where its callers meet it on the machine that deployed it (`meet`). `consent` is that of who
    deployed it to the costs of the jobs that the same account submits.
    """

    text: str
    origin: Raw
    snapshot: str
    meet: str
    functions: list[DeployedFunction]
    consent: bool = False


class AppAsk(Ask, frozen=True, kw_only=True):
    """A new revision of an app, which replaces the one before."""

    revision: str
    parts: list[AppPartAsk]
    user: str = ""


class AppPart(Answer, frozen=True, kw_only=True):
    """The job of some functions of an app. `job` is the ID of the newest one, or ""."""

    part: int
    revision: str
    text: str
    origin: Raw
    snapshot: str
    meet: str
    functions: list[DeployedFunction]
    consent: bool
    job: str
    user: str
    updated_at: datetime


class DeployedApp(Answer, frozen=True, kw_only=True):
    """A deployed app."""

    name: str
    parts: list[AppPart]


class NextJobAsk(Ask, frozen=True, kw_only=True):
    """Asks for the ID of a job to submit, since the job `ended` runs no more. `revision` is that of
    what will be submitted.
    """

    part: int
    revision: str
    ended: str


class NextJob(Answer, frozen=True, kw_only=True):
    """The ID of the job: all who ask at the same time get the same."""

    job: str


def list_apps(client: ApiClient, project: str) -> list[DeployedApp]:
    return client.ask(f"{project_path(project)}/apps", list[DeployedApp])


def read_app(client: ApiClient, project: str, name: str) -> DeployedApp:
    """Raises ApiError `app-not-found`."""
    return client.ask(_path(project, name), DeployedApp)


def put_app(client: ApiClient, project: str, name: str, ask: AppAsk) -> None:
    client.call("PUT", _path(project, name), encode(ask))


def delete_app(client: ApiClient, project: str, name: str) -> None:
    """Raises ApiError `app-not-found`."""
    client.call("DELETE", _path(project, name), retry=False)


def claim_job(client: ApiClient, project: str, name: str, ask: NextJobAsk) -> str:
    """Return the ID of the next job. Raises ApiError `app-not-found`, `app-changed`."""
    return client.ask(f"{_path(project, name)}/claim", NextJob, ask).job


def _path(project: str, name: str) -> str:
    return f"{project_path(project)}/apps/{segment('app', name)}"
