"""Request and response types of the routes for sandboxes, and client functions that call them."""

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

from cavvy.client.client import ApiClient
from cavvy.client.paths import query
from cavvy.client.wire import Answer, Ask

MOST_REPORT = 4 << 20  # bytes
_Time = Annotated[float, Meta(ge=0, le=1e11)]
_Name = Annotated[str, Meta(max_length=200)]


class SandboxReport(Ask, frozen=True, kw_only=True):
    """What a host tells of a sandbox. Times are in seconds since 1970; `ended_s` is None while it
    runs. `user` is who made it, as the program that did so says.
    """

    name: Annotated[str, Meta(pattern="^[0-9a-f]{1,32}$")]
    title: _Name
    user: _Name
    state: Literal["running", "ended"]
    why: _Name
    began_s: _Time
    until_s: _Time
    ended_s: _Time | None
    cpu: Annotated[float, Meta(ge=0, le=1e6)]
    memory_mib: Annotated[int, Meta(ge=0, le=1 << 40)]
    network: bool | Annotated[list[_Name], Meta(max_length=100)]


class SandboxesAsk(Ask, frozen=True, kw_only=True):
    """Tells of sandboxes that were made or have ended."""

    sandboxes: Annotated[list[SandboxReport], Meta(max_length=2000)]
    # of what the job's agent sends for every question
    name: str = ""


class SandboxView(Answer, frozen=True, kw_only=True):
    """A sandbox. `state` is running or ended; `why` says why it ended. `job` is its host, and
    `image` the software that the host was given."""

    id: str
    project: str
    job: str
    title: str
    user: str
    state: str
    why: str
    began_at: datetime
    until_at: datetime
    ended_at: datetime | None
    cpu: float
    memory_mib: int
    network: bool | list[str]
    image: str


def list_sandboxes(client: ApiClient, project: str | None = None) -> list[SandboxView]:
    """Return the sandboxes of a project, or of all projects: those that run, and those that ended
    within a day."""
    return client.ask(f"/v1/sandboxes{query(project=project)}", list[SandboxView])
