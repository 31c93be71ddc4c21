"""Request and response types of the routes of queued calls, and client functions that call them."""

from collections.abc import Mapping
from datetime import datetime

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


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
