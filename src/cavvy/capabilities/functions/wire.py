"""Request and response types of the routes for deployed apps, and client functions that call these
routes.
"""

from datetime import datetime

from msgspec import UNSET, Raw, UnsetType, field
from msgspec.json import encode

from cavvy.client.answers import read_answer
from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask

# for which a request waits for the result of a function, in seconds
CALL_WAIT_S = 60.0


class DeployedFunction(Ask, frozen=True, kw_only=True):
    """A function of a deployed app."""

    name: str
    generator: bool = False
    # whether calls with the same arguments are one call
    once: bool = False
    schedule: str = ""
    priority: int = 0
    # of each limit, the parameters that are its key, or parts of them
    limits: tuple[tuple[str, ...], ...] = ()
    # the JSON schemas of the arguments, as an object by name, and of the result
    arguments: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET


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


class AppReplaced(Answer, frozen=True, kw_only=True):
    """The jobs of the revision that a new one has replaced."""

    replaced: list[str]


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


class CallAsk(Ask, frozen=True, kw_only=True):
    """A call that the server keeps until it has a result. `body` has the arguments: a pickle, or,
    with `json`, an object with the list `args` and the object `kwargs`; the result is written
    likewise. Another call of the function with the `key` of this one is this one. `priority`
    replaces that of the function, and `limits` are the keys of the function's limits. Calls of a
    user with the same `turn` are one caller, who takes turns with others.
    """

    function: str
    body: bytes
    json: bool = False
    key: str = ""
    priority: int | None = None
    limits: tuple[str, ...] = ()
    turn: str = ""


class CallsAsk(Ask, frozen=True, kw_only=True):
    """Calls to keep. `consent` agrees to the costs of a job that these calls start."""

    calls: list[CallAsk]
    consent: bool = False
    user: str = ""


class CallTaken(Answer, frozen=True, kw_only=True):
    """The ID of a call. `created` is False if a call with its key existed."""

    id: str
    created: bool


class CallEnd(Answer, frozen=True, kw_only=True):
    """How a call ended. Of one that failed: the `kind` of failure, a name of `cavvy` such as
    CallTimeout, or `error` for an exception of the function, with its type, text and traceback.
    `ran_s` is how long it ran.
    """

    kind: str = ""
    type: str = ""
    text: str = ""
    trace: str = ""
    ran_s: float | None = None


class CallSummary(Answer, frozen=True, kw_only=True):
    """A call: `state` is waiting, done, failed or cancelled. `why` says what a call waits for that
    has no result. `job` is where it ran, and `cost_micros` its part of that job's bill so far: null
    while there is none.
    """

    id: str
    function: str
    state: str
    user: str
    end: CallEnd
    created_at: datetime
    ended_at: datetime | None
    why: str = ""
    job: str = ""
    cost_micros: int | None = None


class CallResult(Answer, frozen=True, kw_only=True):
    """A call that has ended. `result` is a pickle or, with `json`, JSON: the result, or the
    exception as a pickle."""

    id: str
    function: str
    state: str
    json: bool
    end: CallEnd
    result: bytes
    cost_micros: int | None = None


class CallsReadAsk(Ask, frozen=True, kw_only=True):
    """Asks for the results of these calls: of those that have ended, or of the first one that ends
    within `wait_s` seconds.
    """

    ids: list[str]
    wait_s: float = 0.0


class CallsRead(Answer, frozen=True, kw_only=True):
    """Calls that have ended, not all of them if the results are long, and the IDs of those that do
    not exist."""

    ended: list[CallResult]
    missing: list[str]
    # what some of the calls without a result wait for
    waiting: dict[str, str] = field(default_factory=dict)


class JobCosts(Answer, frozen=True, kw_only=True):
    """How the bill of a job of an app is divided so far, in micro-dollars: among the calls that the
    server keeps (`calls` of them), among others, and the time in which no call ran: the start, idle
    time and the end."""

    job: str
    calls: int
    bill_micros: int
    kept_micros: int
    others_micros: int
    idle_micros: int


class FunctionView(Answer, frozen=True, kw_only=True):
    """A function, and the JSON schemas of its arguments (an object) and its result."""

    app: str
    function: str
    generator: bool
    arguments: Raw
    result: Raw


class FunctionAnswer(Answer, frozen=True, kw_only=True):
    """What a function has answered: its result as JSON. While `state` is waiting, there is none:
    ask for the call.
    """

    call: str
    state: str
    result: Raw
    end: CallEnd = CallEnd()


def list_apps(client: ApiClient, project: str) -> list[DeployedApp]:
    return client.ask(f"{project_path(project)}/apps", list[DeployedApp])


def read_app(client: ApiClient, project: str, name: str) -> DeployedApp:
    """Raises ApiError `app-not-found`."""
    return client.ask(_path(project, name), DeployedApp)


def put_app(client: ApiClient, project: str, name: str, ask: AppAsk) -> AppReplaced:
    return read_answer(client.call("PUT", _path(project, name), encode(ask)), AppReplaced)


def delete_app(client: ApiClient, project: str, name: str) -> None:
    """Raises ApiError `app-not-found`."""
    client.call("DELETE", _path(project, name), retry=False)


def claim_job(client: ApiClient, project: str, name: str, ask: NextJobAsk) -> str:
    """Return the ID of the next job. Raises ApiError `app-not-found`, `app-changed`."""
    return client.ask(f"{_path(project, name)}/claim", NextJob, ask).job


def add_calls(client: ApiClient, project: str, app: str, ask: CallsAsk) -> list[CallTaken]:
    """Raises ApiError `app-not-found`, `invalid-request`."""
    return client.ask(f"{_path(project, app)}/calls", list[CallTaken], ask)


def read_calls(client: ApiClient, project: str, app: str, ask: CallsReadAsk) -> CallsRead:
    path = f"{_path(project, app)}/calls/read"
    return client.ask(path, CallsRead, ask, wait_s=ask.wait_s)


def list_calls(
    client: ApiClient, project: str, app: str, *, traces: bool = True, limit: int | None = None
) -> list[CallSummary]:
    asked = query(traces=None if traces else "false", limit=limit)
    return client.ask(f"{_path(project, app)}/calls{asked}", list[CallSummary])


def list_costs(client: ApiClient, project: str, app: str) -> list[JobCosts]:
    """Raises ApiError `app-not-found`."""
    return client.ask(f"{_path(project, app)}/costs", list[JobCosts])


def cancel_call(client: ApiClient, project: str, app: str, call: str) -> None:
    """Raises ApiError `function-call-not-found`."""
    client.call("DELETE", f"{_path(project, app)}/calls/{segment('call', call)}", retry=False)


def call_function(
    client: ApiClient,
    project: str,
    app: str,
    function: str,
    arguments: bytes,
    key: str = "",
    wait_s: float = CALL_WAIT_S,
) -> FunctionAnswer:
    """Raises ApiError `app-not-found`, `function-not-found`, `invalid-arguments`."""
    headers = {"Idempotency-Key": key} if key else {}
    path = f"{_path(project, app)}/functions/{segment('function', function)}"
    path += query(wait_s=wait_s)
    answer = client.call("POST", path, arguments, headers, wait_s=wait_s, retry=bool(key))
    return read_answer(answer, FunctionAnswer)


def read_function(client: ApiClient, project: str, app: str, function: str) -> FunctionView:
    """Raises ApiError `app-not-found`, `function-not-found`."""
    path = f"{_path(project, app)}/functions/{segment('function', function)}"
    return client.ask(path, FunctionView)


def _path(project: str, name: str) -> str:
    return f"{project_path(project)}/apps/{segment('app', name)}"
