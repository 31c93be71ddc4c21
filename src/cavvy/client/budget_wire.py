"""Request and response types of the budget routes, and client functions that call these routes."""

from datetime import datetime

from msgspec import field
from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


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
    client.call("PUT", _path(name), encode(ask))


def delete_budget(client: ApiClient, name: str) -> None:
    client.call("DELETE", _path(name))


def request_amount(client: ApiClient, project: str, name: str, ask: BudgetRequestAsk) -> None:
    """Request a new amount for a budget of the project. For a budget without a project, the caller
    must be permitted to see the costs of all projects.
    """
    path = f"{project_path(project)}/budgets/{segment('budget', name)}/request"
    client.call("POST", path, encode(ask))


def approve_request(client: ApiClient, name: str, ask: BudgetApprovalAsk) -> None:
    """Approve the requested amount. Raises ApiError, for example if another amount is pending."""
    client.call("POST", f"{_path(name)}/approve", encode(ask))


def _path(name: str) -> str:
    return f"/v1/budgets/{segment('budget', name)}"
