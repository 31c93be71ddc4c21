"""Request and response types of the routes for policies and budgets, and client functions that call
these routes.
"""

from datetime import datetime

from msgspec import UNSET, UnsetType, field
from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


class UserLimitsAsk(Ask, frozen=True, kw_only=True):
    """The most GPUs, running jobs and waiting jobs of one user, GPUs by their names, and
    micro-dollars an hour. Null and absent names leave the limit that the policy has for each user.
    """

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: dict[str, float] = field(default_factory=dict)
    micros_per_hour: int | None = None


class UserLimitsView(Answer, frozen=True, kw_only=True):
    """The limits of one user, which replace those of each user."""

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: dict[str, float] = field(default_factory=dict)
    micros_per_hour: int | None = None


class PolicyAsk(Ask, frozen=True, kw_only=True):
    """The resources that the jobs of a project may use. Empty lists and null permit everything;
    fields that the request does not contain keep their values. `max_rate_micros_per_hour` is the
    highest price of one node. `signed_by` contains public keys in PEM form; each image must be
    signed with one of these keys. `keep_jobs_days` is how long ended jobs are kept, 0 for forever;
    with null, a parent project or the server decides. `share` is the
    project's weight in the queue among the projects with the same parent, 1 if null. Up to
    `quota_gpus` GPUs, the project's jobs go first. `max_gpus` is the most GPUs that its jobs hold
    at the same time; `user_gpus` and `user_jobs` are the most GPUs and running jobs of each user,
    and `user_waiting` is the most of each user's jobs that wait. The fields with `accelerators` are
    the same for the GPUs of one name, such as `{"H100": 8}`, and those with `micros_per_hour` for
    the price of all nodes together in micro-dollars an hour. `users` are limits of users by their
    names, instead of those of each user.
    """

    providers: list[str] | UnsetType = UNSET
    regions: list[str] | UnsetType = UNSET
    accelerators: list[str] | UnsetType = UNSET
    max_rate_micros_per_hour: int | UnsetType | None = UNSET
    images: list[str] | UnsetType = UNSET
    image_digests: bool | UnsetType = UNSET
    signed_by: list[str] | UnsetType = UNSET
    keep_jobs_days: int | UnsetType | None = UNSET
    share: float | UnsetType | None = UNSET
    quota_gpus: float | UnsetType | None = UNSET
    max_gpus: float | UnsetType | None = UNSET
    user_gpus: float | UnsetType | None = UNSET
    user_jobs: int | UnsetType | None = UNSET
    user_waiting: int | UnsetType | None = UNSET
    quota_accelerators: dict[str, float] | UnsetType = UNSET
    max_accelerators: dict[str, float] | UnsetType = UNSET
    user_accelerators: dict[str, float] | UnsetType = UNSET
    quota_micros_per_hour: int | UnsetType | None = UNSET
    max_micros_per_hour: int | UnsetType | None = UNSET
    user_micros_per_hour: int | UnsetType | None = UNSET
    users: dict[str, UserLimitsAsk] | UnsetType = UNSET


class ProjectPolicyView(Answer, frozen=True, kw_only=True):
    """A policy and its project. An empty `project` means the installation."""

    project: str
    providers: list[str]
    regions: list[str]
    accelerators: list[str]
    max_rate_micros_per_hour: int | None
    images: list[str]
    image_digests: bool
    signed_by: list[str] = field(default_factory=list)
    keep_jobs_days: int | None = None
    share: float | None = None
    quota_gpus: float | None = None
    max_gpus: float | None = None
    user_gpus: float | None = None
    user_jobs: int | None = None
    user_waiting: int | None = None
    quota_accelerators: dict[str, float] = field(default_factory=dict)
    max_accelerators: dict[str, float] = field(default_factory=dict)
    user_accelerators: dict[str, float] = field(default_factory=dict)
    quota_micros_per_hour: int | None = None
    max_micros_per_hour: int | None = None
    user_micros_per_hour: int | None = None
    users: dict[str, UserLimitsView] = field(default_factory=dict)


def list_policies(client: ApiClient, project: str | None) -> list[ProjectPolicyView]:
    """Return the policies that apply to the jobs of a project, with the project's own policy last.
    If `project` is None, return the policy of the installation.
    """
    return client.ask(_path(project), list[ProjectPolicyView])


def put_policy(
    client: ApiClient, project: str | None, ask: PolicyAsk, *, accept_exceeded: bool = False
) -> str:
    """Change the policy of a project or, if `project` is None, of the installation. Raises
    ApiError, with the code `policy-exceeded` if a quota or limit would be lowered below what is in
    use. With `accept_exceeded`, the policy is changed all the same, and the message is returned.
    """
    try:
        client.call("PUT", _path(project), encode(ask))
    except ApiError as error:
        if error.code != "policy-exceeded" or not accept_exceeded:
            raise
        client.call("PUT", f"{_path(project)}?accept_exceeded=true", encode(ask))
        return error.message
    return ""


def delete_policy(client: ApiClient, project: str | None) -> None:
    client.call("DELETE", _path(project))


def _path(project: str | None) -> str:
    return "/v1/policy" if project is None else f"{project_path(project)}/policy"


class BudgetAsk(Ask, frozen=True, kw_only=True):
    """A budget for each month. The budget covers the jobs that match all of `project`, `user`,
    `tag` and `service`; an empty text matches every job. `tag` is NAME=VALUE. Percentages refer to
    the month's amount; if a percentage is null, its action is never taken.
    """

    limit_micros: int
    project: str = ""
    user: str = ""
    tag: str = ""
    service: str = ""
    alerts: list[int] = field(default_factory=lambda: [50, 80, 100])
    soft_percent: int | None = 100
    hard_percent: int | None = None
    carry_over: bool = False
    webhook: str = ""


class BudgetRequestAsk(Ask, frozen=True, kw_only=True):
    """Requests a new amount for a budget."""

    limit_micros: int
    reason: str = ""


class BudgetApprovalAsk(Ask, frozen=True, kw_only=True):
    """Approves the pending request, if the requested amount is `limit_micros`."""

    limit_micros: int


class BudgetRequestView(Answer, frozen=True, kw_only=True):
    """A pending request to change the amount of a budget."""

    limit_micros: int
    reason: str
    account: str
    at: datetime


class BudgetView(Answer, frozen=True, kw_only=True):
    """A budget, with its spending and forecast in the current month. `month_limit_micros` includes
    the unspent amount of the last month, if it is carried over. The forecast is for the end of the
    month, with an interval of about 80 %. The forecast's values are null during the first two days
    of spending.
    """

    name: str
    project: str
    user: str
    tag: str
    limit_micros: int
    month_limit_micros: int
    spent_micros: int
    expected_micros: int | None
    low_micros: int | None
    high_micros: int | None
    alerts: list[int]
    soft_percent: int | None
    hard_percent: int | None
    carry_over: bool
    request: BudgetRequestView | None
    service: str = ""


def list_budgets(client: ApiClient) -> list[BudgetView]:
    return client.ask("/v1/budgets", list[BudgetView])


def put_budget(client: ApiClient, name: str, ask: BudgetAsk) -> None:
    """Set a budget. Raises ApiError."""
    client.call("PUT", _budget_path(name), encode(ask))


def delete_budget(client: ApiClient, name: str) -> None:
    client.call("DELETE", _budget_path(name))


def request_amount(client: ApiClient, project: str, name: str, ask: BudgetRequestAsk) -> None:
    """Request a new amount for a budget of the project. For a budget without a project, the caller
    must be permitted to see the costs of all projects.
    """
    path = f"{project_path(project)}/budgets/{segment('budget', name)}/request"
    client.call("POST", path, encode(ask))


def approve_request(client: ApiClient, name: str, ask: BudgetApprovalAsk) -> None:
    """Approve the requested amount. Raises ApiError, for example if another amount is pending."""
    client.call("POST", f"{_budget_path(name)}/approve", encode(ask))


def _budget_path(name: str) -> str:
    return f"/v1/budgets/{segment('budget', name)}"
