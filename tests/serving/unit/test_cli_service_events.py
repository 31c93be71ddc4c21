"""What `cavvy services show` says of webhooks, cron lines, the queue, refusals and fallbacks."""

from datetime import UTC, datetime

from tests.serving.unit.test_cli_call_waits import make_service

from cavvy.capabilities.serving.services_command import list_events, list_pairs
from cavvy.capabilities.serving.wire import (
    CronView,
    FallbackView,
    QueueView,
    ServiceTrafficView,
    WebhookView,
)
from cavvy.cli.view.formatting import show_time

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
            "3 waiting (2 of them running), 7 done, 1 dead; see `cavvy services queue list echo -p team "
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


def test_refusals_and_fallbacks_are_told_with_their_cost() -> None:
    none = dict.fromkeys(("p50_s", "p95_s", "p99_s"))
    counts = {"arrivals": 20, "answered": 9, "lost": 0, "in_flight": 0, "waiting": 0, "per_s": 0.0}
    traffic = ServiceTrafficView(**counts, **none, unserved=11, shed=4)  # type: ignore[arg-type]  # of the test
    api = FallbackView(name="api.openai.com", model="big", answered=1, spent_micros=2_500_000)
    other = FallbackView(name="backup", model="", answered=0, spent_micros=None)
    pairs = list_pairs(
        make_service(state="ready", ready=1, traffic=traffic, fallbacks=[api, other])
    )
    assert ("refused", "4 at once (429), 7 after they had waited (504)") in pairs
    assert [text for name, text in pairs if name == "fallback"] == [
        "api.openai.com, model big; 1 answer since the gateway started; $2.50 in all",
        "backup; 0 answers since the gateway started",
    ]
    assert "refused" not in dict(list_pairs(make_service(state="ready", ready=1)))
