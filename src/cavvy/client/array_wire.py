"""Response types of the routes of arrays, and client functions that call these routes."""

from datetime import datetime

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, JobListing, JobPage, JobRemoved, Scalar, StopAsk

_REMOVAL_S = 600  # in which the files of 10,000 jobs are deleted


class ArrayMemberView(Answer, frozen=True, kw_only=True):
    """One job of an array. `params` are its values of the parameters that differ between the jobs,
    and `progress` is what its last attempt reported. If `early` is set, it was stopped early.
    """

    index: int
    id: str
    name: str
    phase: str
    reason: str
    attempt: int
    exit_code: int | None
    placement: str | None
    since: datetime
    ended_at: datetime | None
    spent_micros: int
    params: dict[str, Scalar]
    progress: dict[str, float | str]
    early: bool = False


class ArrayDetail(Answer, frozen=True, kw_only=True):
    """An array with its jobs, sorted by index. At most `parallel` of them run at once. If `group`
    is set, it is a group, whose jobs have tasks of their own and start together."""

    array: JobListing
    parallel: int | None
    jobs: list[ArrayMemberView]
    group: bool = False
    best: str = ""  # the metric by which the task compares its jobs, with :min or :max


def list_arrays(
    client: ApiClient, project: str | None = None, cursor: str | None = None, limit: int = 50
) -> JobPage:
    """Return a page of the arrays and groups of a project or of all, newest first."""
    return client.ask("/v1/arrays" + query(project=project, cursor=cursor, limit=limit), JobPage)


def read_array(client: ApiClient, project: str, name: str) -> ArrayDetail:
    """Return an array by its name or ID. Raises ApiError `job-not-found`."""
    return client.ask(_path(project, name), ArrayDetail)


def stop_array(client: ApiClient, project: str, name: str) -> JobListing:
    """Request that all jobs of the array stop, and return immediately."""
    return client.ask(f"{_path(project, name)}/stop", JobListing, StopAsk())


def retry_array(client: ApiClient, project: str, name: str) -> JobListing:
    """Queue all failed and stopped jobs of the array again."""
    return client.ask(f"{_path(project, name)}/retry", JobListing, method="POST")


def remove_array(client: ApiClient, project: str, name: str) -> JobRemoved:
    """Delete all jobs of the array except their bills. Raises ApiError `job-not-ended`."""
    path = _path(project, name)
    return client.ask(path, JobRemoved, method="DELETE", retry=False, wait_s=_REMOVAL_S)


def _path(project: str, name: str) -> str:
    return f"{project_path(project)}/arrays/{segment('array', name)}"
