"""Request and response types of the queue routes, and client functions that call these routes."""

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import urlencode

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


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


class QueuedCallAsk(Ask, frozen=True, kw_only=True):
    """A call to add to the queue of a service. If a call with the same ID exists, no call is added.
    `body` is in base64.
    """

    id: str = ""
    method: str = "POST"
    path: str = "/"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class QueuedCallView(Answer, frozen=True, kw_only=True):
    """A queued call. `status` and `answer_headers` are the status and the headers of the call's
    result. If `running` is set, the gateway is processing the waiting call now. `running` is false
    if a server other than the answering server sends the calls.
    """

    id: str
    state: str
    running: bool = False
    method: str
    path: str
    source: str
    object: str = ""
    user: str
    submitted_at: datetime
    due_at: datetime
    tries: int
    problem: str
    status: int | None
    answer_headers: Mapping[str, str]
    ended_at: datetime | None
    expires_at: datetime | None


class QueuedResultView(Answer, frozen=True, kw_only=True):
    """A queued call with the body of its result, in base64."""

    call: QueuedCallView
    body: bytes


class CallQueueView(Answer, frozen=True, kw_only=True):
    """Calls of a queue, sorted by ID, and the number of calls in each state."""

    calls: list[QueuedCallView]
    counts: Mapping[str, int]


class DeliveryView(Answer, frozen=True, kw_only=True):
    """The answer to a webhook's request. `calls` is the number of calls that the request caused,
    and `new` is the number without the calls that the server already had.
    """

    calls: int
    new: int


class CallCount(Answer, frozen=True, kw_only=True):
    calls: int


def submit_call(
    client: ApiClient, project: str, service: str, ask: QueuedCallAsk
) -> QueuedCallView:
    """Add a call to the queue of a service. Raises ApiError `service-not-found`, `key-reused`,
    `queue-full`."""
    # With an ID, the server recognizes a repeated request.
    return client.ask(_path(project, service), QueuedCallView, ask, retry=bool(ask.id))


def list_calls(
    client: ApiClient, project: str, service: str, *, state: str = "", after: str = "", limit: int
) -> CallQueueView:
    """Return queued calls to a service, sorted by ID."""
    query = f"limit={limit}"
    query += f"&state={state}" if state else ""
    query += f"&after={after}" if after else ""
    path = f"{_path(project, service)}?{query}"
    return client.ask(path, CallQueueView)


def find_call(client: ApiClient, project: str, service: str, call_id: str) -> QueuedResultView:
    """Return a call with its result. Raises ApiError `call-not-found`."""
    path = f"{_path(project, service)}/{segment('call', call_id)}"
    return client.ask(path, QueuedResultView)


def retry_calls(client: ApiClient, project: str, service: str, call_id: str | None) -> int:
    """Send one dead call, or all dead calls, again. Raises ApiError `call-not-found`."""
    path = f"{_path(project, service)}/retry"
    if call_id is not None:
        path = f"{_path(project, service)}/{segment('call', call_id)}/retry"
    return client.ask(path, CallCount, method="POST", retry=False).calls


def purge_calls(client: ApiClient, project: str, service: str, state: str) -> int:
    """Delete the calls in one state."""
    path = f"{_path(project, service)}?state={state}"
    return client.ask(path, CallCount, method="DELETE", retry=False).calls


def _path(project: str, service: str) -> str:
    return f"{project_path(project)}/services/{segment('service', service)}/calls"
