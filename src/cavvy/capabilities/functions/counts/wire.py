"""Request and response types of the routes that tell how the functions of apps are called, and
client functions that call these routes.
"""

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask

MOST_REPORT = 4 << 20  # bytes
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
_Name = Annotated[str, Meta(max_length=200)]
_Bucket = Annotated[str, Meta(pattern="^[0-9]{1,3}$")]
_Buckets = Annotated[dict[_Bucket, _Count], Meta(max_length=256)]


class BriefCall(Struct, frozen=True, kw_only=True):
    """A call that has ended, which the control plane did not keep. Times are in seconds, `ended_s`
    since 1970; `took_s` is the time from its arrival to its result.
    """

    state: Literal["done", "failed"]
    ended_s: _Time
    ran_s: _Time
    took_s: _Time
    type: _Name = ""
    text: Annotated[str, Meta(max_length=2000)] = ""


class DirectCall(BriefCall, frozen=True, kw_only=True):
    """A call with its traceback."""

    trace: Annotated[str, Meta(max_length=20_000)] = ""


class FunctionMinute(Ask, frozen=True, kw_only=True):
    """The calls of a function that have ended in a minute, which begins `minute` seconds after
    1970; by the bucket of the time (`on_node.counts`) how many ran and took so long.
    """

    function: _Name
    minute: _Count
    done: _Count
    failed: _Count
    ran: _Buckets
    took: _Buckets
    recent: Annotated[list[DirectCall], Meta(max_length=64)] = field(default_factory=list)


class CountsAsk(Ask, frozen=True, kw_only=True):
    """What a broker tells: its processes; of each function, the calls that wait (without those that
    the control plane keeps), that run, and those of these that it keeps; and minutes that replace
    what was told of them.
    """

    workers: _Count
    gauges: Annotated[dict[_Name, tuple[_Count, _Count, _Count]], Meta(max_length=1000)]
    minutes: Annotated[list[FunctionMinute], Meta(max_length=2000)]
    # the time since the broker's begin in which calls ran
    shared_s: _Time = 0.0
    # of what the job's agent sends for every question
    name: str = ""


class AppSummary(Answer, frozen=True, kw_only=True):
    """An app that is deployed or was called: what it does now, and how many calls have ended in the
    last hour. `revision` is "" for one that only a program runs. `jobs` are those that run now.
    """

    project: str
    name: str
    revision: str
    user: str
    deployed_at: datetime | None
    functions: list[str]
    jobs: list[str]
    workers: int
    waiting: int
    running: int
    done: int
    failed: int


class FunctionFigures(Answer, frozen=True, kw_only=True):
    """What a function does now; how many of its calls have ended in the period; and for each step
    of it the times in seconds that the half and 99 of 100 calls did not exceed: of the running
    (`ran`), and from the arrival to the result (`took`). Null where no call has ended.
    """

    name: str
    waiting: int
    running: int
    done: int
    failed: int
    ran: tuple[float | None, float | None]  # of the whole period
    ran_p50: list[float | None]
    ran_p99: list[float | None]
    took_p50: list[float | None]
    took_p99: list[float | None]


class RecentCall(Answer, frozen=True, kw_only=True):
    """A call of a program that waited for it, which the control plane has not kept. `trace` is ""
    unless tracebacks are asked for."""

    function: str
    job: str
    state: str
    ended_at: datetime
    ran_s: float
    took_s: float
    type: str
    text: str
    trace: str


class AppFigures(Answer, frozen=True, kw_only=True):
    """How the functions of an app are called, in steps of `step_s` seconds since `begin`, and the
    newest calls, some of each minute."""

    begin: datetime
    step_s: float
    workers: int
    jobs: list[str]
    functions: list[FunctionFigures]
    recent: list[RecentCall]


def list_summaries(client: ApiClient, project: str | None = None) -> list[AppSummary]:
    """Return the apps of a project, or of all projects."""
    return client.ask(f"/v1/apps{query(project=project)}", list[AppSummary])


def read_figures(
    client: ApiClient, project: str, app: str, hours: float, *, traces: bool = False
) -> AppFigures:
    """Return the figures of the last hours. Raises ApiError `app-not-found`."""
    asked = query(hours=hours, traces="true" if traces else None)
    path = f"{project_path(project)}/apps/{segment('app', app)}/figures{asked}"
    return client.ask(path, AppFigures)
