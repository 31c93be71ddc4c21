"""What `cavvy services show` says of webhooks, cron lines and the queue."""

from datetime import UTC, datetime

from tests.unit.test_cli_call_waits import make_service

from cavvy.cli.view.formatting import show_time
from cavvy.cli.view.service_events import list_events
from cavvy.client.service_wire import CronView, QueueView, WebhookView

AT = datetime(2026, 1, 2, 3, tzinfo=UTC)
URL = "https://cavvy.example.org/hooks/v1/default/echo/push"


def make_hook(url: str) -> WebhookView:
    return WebhookView(name="push", url=url, signature="github")


def test_each_source_of_calls_has_a_line() -> None:
    found = make_service(
        state="idle",
        ready=0,
        problem="",
        webhooks=[make_hook(URL)],
        crons=[CronView(cron="0 3 * * *", time_zone="UTC", path="/night", next_at=AT)],
        queue=QueueView(waiting=3, running=2, done=7, dead=1),
    )
    assert list_events(found, "echo -p team") == [
        ("webhook", f"push: POST {URL} (signature github)"),
        ("cron", f"0 3 * * * (UTC) calls /night; next at {show_time(AT)}"),
        (
            "queue",
            "3 waiting (2 of them running), 7 done, 1 dead; see `cavvy queue list echo -p team "
            "--state dead`",
        ),
    ]


def test_a_webhook_without_an_address_says_what_is_missing() -> None:
    found = make_service(
        state="idle",
        ready=0,
        problem="",
        webhooks=[make_hook("/hooks/v1/default/echo/push")],
        queue=QueueView(waiting=0, running=None, done=0, dead=0),
    )
    [(_, hook)] = list_events(found, "echo")
    assert "other systems cannot reach the webhook until server.listen is set" in hook
