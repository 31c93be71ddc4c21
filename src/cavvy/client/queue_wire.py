"""Request and response types of the queue routes, and client functions that call these routes."""

from urllib.parse import urlencode

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.wire import Answer


class LoanView(Answer, frozen=True, kw_only=True):
    """What one project holds of another project's quota, which this one does not use now. `project`
    is the other one. `accelerator` is the name that the quota counts; if it counts all GPUs, it is
    null. A loan of a quota in dollars has no GPUs.
    """

    project: str
    accelerator: str | None
    gpus: float
    micros_per_hour: int


class ShareView(Answer, frozen=True, kw_only=True):
    """Where a project stands in the queue; numbers include the projects below it.

    `weight` is its share among the projects with the same parent. `part` is the fraction of all use
    that the project should have by its weight, and `used_part` the fraction that it has.
    `used_gpu_hours` is its past use, which decays by half in `half_life_days`, and `debt_gpu_hours`
    what it has used beyond its part, or less than 0 if other projects have. `gpus` and `jobs` are
    in use now, `waiting_gpus` and `waiting_jobs` wait. `accelerators` are the GPUs of its nodes by
    product, and `micros_per_hour` is the price of the nodes. The quotas and limits are those of its
    policy. `lent` is what others hold of its quota, and `borrowed` what it holds of the quotas of
    others.
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
    debt_gpu_hours: float = 0.0
    accelerators: dict[str, float] = field(default_factory=dict)
    micros_per_hour: int = 0
    quota_accelerators: dict[str, float] = field(default_factory=dict)
    max_accelerators: dict[str, float] = field(default_factory=dict)
    quota_micros_per_hour: int | None = None
    max_micros_per_hour: int | None = None
    lent: list[LoanView] = field(default_factory=list)
    borrowed: list[LoanView] = field(default_factory=list)


class ShareReport(Answer, frozen=True, kw_only=True):
    """The projects that use or want something, sorted by name."""

    half_life_days: float
    projects: list[ShareView]


def read_shares(client: ApiClient, project: str | None = None) -> ShareReport:
    """Return where projects stand in the queue; with `project`, only this one."""
    query = f"?{urlencode({'project': project})}" if project else ""
    return client.ask(f"/v1/shares{query}", ShareReport)
