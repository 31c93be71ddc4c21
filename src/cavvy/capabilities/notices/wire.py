"""Request and response types of the routes for the targets of notices, and client functions that
call these routes.
"""

from datetime import datetime

from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask

_TEST_S = 70  # maximum seconds until a slow receiver has answered


class NoticeAsk(Ask, frozen=True, kw_only=True):
    """Where to send notices. `channel` is slack, teams, email, pagerduty or webhook. `events` are
    names of events, such as failed, or of those that capabilities add. If `user` is not empty, only
    notices about jobs and budgets of this user are sent.
    """

    channel: str
    address: str
    events: list[str]
    user: str = ""


class NoticeRow(Answer, frozen=True, kw_only=True):
    """A target of notices, without its address, which the API never returns. `problem` is why the
    newest message could not be delivered, or "".
    """

    name: str
    channel: str
    events: list[str]
    user: str
    problem: str
    updated_at: datetime


class NoticeTest(Answer, frozen=True, kw_only=True):
    """The result of a test message: why it could not be delivered, or ""."""

    problem: str


def list_notices(client: ApiClient, project: str) -> list[NoticeRow]:
    return client.ask(f"{project_path(project)}/notices", list[NoticeRow])


def put_notice(client: ApiClient, project: str, name: str, ask: NoticeAsk) -> None:
    client.call("PUT", _target_path(project, name), encode(ask))


def delete_notice(client: ApiClient, project: str, name: str) -> None:
    """Remove a target and its waiting notices. Raises ApiError `notice-not-found`."""
    client.call("DELETE", _target_path(project, name), retry=False)


def send_test(client: ApiClient, project: str, name: str) -> NoticeTest:
    """Send a test message. Raises ApiError `notice-not-found`."""
    path = f"{_target_path(project, name)}/test"
    return client.ask(path, NoticeTest, method="POST", wait_s=_TEST_S, retry=False)


def _target_path(project: str, name: str) -> str:
    return f"{project_path(project)}/notices/{segment('target', name)}"
