"""Response types of the route that shows the queue by project, and the client function for it."""

from urllib.parse import urlencode

from cavvy.client.client import ApiClient
from cavvy.client.wire import Answer


class ShareView(Answer, frozen=True, kw_only=True):
    """Where a project stands in the queue; numbers include the projects below it.

    `weight` is its share among the projects with the same parent. `part` is the fraction of all use
    that the project should have by its weight, and `used_part` the fraction that it has.
    `used_gpu_hours` is its past use, which decays by half in `half_life_days`. `gpus` and `jobs`
    are in use now, `waiting_gpus` and `waiting_jobs` wait. `quota_gpus` and `max_gpus` are those of
    its policy.
    """

    project: str
    parent: str | None
    weight: float
    part: float
    used_part: float
    used_gpu_hours: float
    gpus: float
    jobs: int
    waiting_gpus: float
    waiting_jobs: int
    quota_gpus: float | None
    max_gpus: float | None


class ShareReport(Answer, frozen=True, kw_only=True):
    """The projects that use or want something, sorted by name."""

    half_life_days: float
    projects: list[ShareView]


def read_shares(client: ApiClient, project: str | None = None) -> ShareReport:
    """Return where projects stand in the queue; with `project`, only this one."""
    query = f"?{urlencode({'project': project})}" if project else ""
    return client.ask(f"/v1/shares{query}", ShareReport)
