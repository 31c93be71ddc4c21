"""The console's pages about services, and their actions."""

import html
import re
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.console.unit.test_console_submit import client
from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, replica, sign_in
from tests.serving.served import served

from cavvy.capabilities.serving import pages
from cavvy.capabilities.serving.call_wire import CallCount, CallQueueView, QueuedCallView
from cavvy.capabilities.serving.wire import (
    CronView,
    FallbackView,
    LevelShares,
    LevelView,
    QueueView,
    ServedView,
    ServiceKeyView,
    ServiceTrafficView,
    TrialView,
    UnplacedView,
    WebhookView,
)
from cavvy.client import ApiError, wire
from cavvy.client.ledger_wire import TokensView

PATH = "/services/default/chat"
API = "/v1/projects/default/services/chat"


def call(call_id: str = "c1", **fields: Any) -> QueuedCallView:
    usual = {
        "id": call_id,
        "state": "dead",
        "method": "POST",
        "path": "/predict",
        "source": "api",
        "user": "ada",
        "submitted_at": NOW - timedelta(hours=1),
        "due_at": NOW,
        "tries": 5,
        "problem": "the replica answered 500",
        "status": 500,
        "answer_headers": {},
        "ended_at": NOW,
        "expires_at": None,
    }
    return QueuedCallView(**usual | fields)


def key(**fields: Any) -> ServiceKeyView:
    usual = {
        "id": "k1",
        "label": "mobile app",
        "user": "ada",
        "per_s": 2.5,
        "burst": 1,
        "created_at": NOW,
        "expires_at": None,
        "used_at": NOW - timedelta(minutes=3),
    }
    return ServiceKeyView(**usual | fields)


def answers(service: ServedView, **more: Any) -> dict[str, Any]:
    none = wire.JobFigures(start=NOW, step_s=60, series=[])
    usual = {"/v1/services": [service], API: service, f"{API}/keys": [], f"{API}/figures": none}
    return usual | more


def page_of(service: ServedView, **more: Any) -> str:
    """The text of the page, without its tags."""
    page = sign_in(CannedClient(answers(service, **more))).get(PATH).text
    words = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))
    return re.sub(r" ([.,])", r"\1", words)


def level(hour: LevelShares, day: LevelShares) -> LevelView:
    return LevelView(availability=0.99, p95_s=2.0, hour=hour, day=day)


def test_a_service_level_is_judged_in_words() -> None:
    hour = LevelShares(requests=1000, availability=0.98, in_time=0.96)
    day = LevelShares(requests=0, availability=None, in_time=None)
    service = served(slo=level(hour, day))
    text = page_of(service)
    assert "Requests answered 99.0% 98.0% missed 1000 requests no requests" in text
    assert "Answers within 2s 95.0% 96.0% met 1000 requests no requests" in text
    listed = sign_in(CannedClient(answers(service))).get("/services").text
    assert "level missed" in listed
    good = served(slo=level(LevelShares(requests=9, availability=0.99, in_time=0.95), day))
    assert "level missed" not in sign_in(CannedClient(answers(good))).get("/services").text


def series(name: str, *mean: float | None) -> wire.SeriesView:
    values = [*mean]
    return wire.SeriesView(attempt=0, rank=0, name=name, low=values, mean=values, high=values)


def test_figures_are_drawn_over_time() -> None:
    found = wire.JobFigures(
        start=NOW - timedelta(minutes=3),
        step_s=60,
        series=[
            series("requests_per_s", 1.0, 2.0, None),
            series("failed_per_s", 0.0, 0.5, None),
            series("cold_start_s", None, 62.0, None),
            series("an_unknown_one", 1.0, 1.0, 1.0),
        ],
    )
    client = CannedClient(answers(served(), **{f"{API}/figures": found}))
    page = sign_in(client).get(f"{PATH}?period=week").text
    titles = re.findall(r"<figcaption>([^<]+)</figcaption>", page)
    assert titles == ["Requests per second", "Seconds until a new replica was ready"]
    assert 'aria-current="true">week' in page
    refused = ApiError("forbidden", "you may not", status=403)
    for none in (structs.replace(found, series=[]), refused):
        client = CannedClient(answers(served(), **{f"{API}/figures": none}))
        assert "No figures yet." in sign_in(client).get(f"{PATH}?period=<b>").text


def test_refusals_and_fallbacks_are_figures() -> None:
    none = dict.fromkeys(("p50_s", "p95_s", "p99_s"))
    counts = {"arrivals": 20, "answered": 9, "lost": 0, "in_flight": 0, "waiting": 0, "per_s": 0.0}
    traffic = ServiceTrafficView(**counts, **none)  # type: ignore[arg-type]  # of the test
    service = served(traffic=traffic)
    assert "refused" not in page_of(service)
    traffic = structs.replace(traffic, unserved=1100, shed=4)
    api = FallbackView(name="api.openai.com", model="big", answered=7, spent_micros=2_500_000)
    other = FallbackView(name="backup", model="", answered=3, spent_micros=None)
    text = page_of(structs.replace(service, traffic=traffic, fallbacks=[api, other]))
    assert "1,100 refused, 4 of them at once" in text
    assert "7 answered by api.openai.com for $2.50 3 answered by backup" in text


def test_tokens_have_a_price_beside_that_of_public_apis() -> None:
    used = TokensView(
        model="Qwen/Qwen3-32B", prompt=600_000, cached=0, completion=400_000, estimated=0
    )
    service = structs.replace(served(), tokens=[used], spent_micros=2_500_000)
    text = page_of(service)
    assert "600,000 of prompts (0 cached), 400,000 of completions; $2.50 per million" in text
    assert "the same tokens cost $" in text
    own = structs.replace(used, model="<b>own</b>")
    assert "the same tokens" not in page_of(structs.replace(service, tokens=[own]))
    assert "of prompts" not in page_of(served())


def test_what_a_service_needs_attention_for() -> None:
    trial = TrialView(
        revision=2,
        end="",
        promoted=False,
        weight=10,
        requests=40,
        asked=500,
        errors=[0.01, 0.2],
        slower=1.5,
        evidence=3.0,
        bound=20.0,
        problem="",
    )
    service = served(
        "chat",
        replica(start_s={"queue": 1.0, "machine": 62.0}),
        unplaced=[UnplacedView(places=["eu", "DE"], waiting=2, instead="chat-1")],
        trial=trial,
        webhooks=[WebhookView(name="github", url="http://here/hooks/1", signature="github")],
        crons=[
            CronView(
                cron="0 7 * * *", time_zone="UTC", path="/daily", next_at=NOW + timedelta(hours=1)
            )
        ],
    )
    text = page_of(service, **{f"{API}/keys": [key()]})
    for part in (
        "2 requests wait for a replica in eu and DE.",
        "the replica chat-1 must end first",
        "The trial runs with 10 % of the requests.",
        "40 of 500",
        "old 1.0%, new 20.0%",
        "1.50 × the old",
        "3.00; rolled back at 20.00",
        "github http://here/hooks/1",
        "0 7 * * * UTC /daily in 1h00m",
        "machine 1m02s",
        "mobile app ada 2.5",
        "3m00s ago never",
    ):
        assert part in text, part


def test_dead_calls_are_listed_and_sent_again() -> None:
    service = served(queue=QueueView(waiting=4, running=1, done=10, dead=60))
    dead = CallQueueView(calls=[call("c1"), call("c2")], counts={"dead": 60})
    canned = answers(
        service,
        **{
            f"{API}/calls": dead,
            f"POST {API}/calls/retry": CallCount(calls=60),
            f"POST {API}/calls/c2/retry": CallCount(calls=1),
        },
    )
    client = CannedClient(canned)
    browser = sign_in(client)
    page = browser.get(PATH).text
    assert "4 waiting (1 of them running), 10 done, 60 dead." in page
    assert "the replica answered 500" in page
    assert "The table shows 2 of 60 dead calls." in page
    assert any("state=dead" in each for each in client.asked)
    for action, target in (("retry", "retry"), ("calls/c2/retry", "c2/retry")):
        assert f'action="{PATH}/{action}" data-confirm=' in page
        client.asked.clear()
        answer = browser.post(f"{PATH}/{action}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, PATH)
        assert client.asked == [f"POST {API}/calls/{target}"]


def test_a_service_without_dead_calls_needs_no_further_request() -> None:
    client = CannedClient(answers(served(queue=QueueView(waiting=0, running=0, done=1, dead=0))))
    browser = sign_in(client)
    for _ in range(3):
        assert "1 done" in browser.get(PATH).text
    asked = [each.split("?")[0].removeprefix(f"GET {API}") for each in client.asked]
    assert asked == ["", "/keys", "/figures", "", ""]


def test_a_page_that_is_opened_early_shows_the_queue_and_the_keys_later() -> None:
    """The script can only update parts that the page had when it was opened."""
    full = served(
        queue=QueueView(waiting=1, running=0, done=0, dead=0),
        crons=[CronView(cron="0 7 * * *", time_zone="UTC", path="/", next_at=None)],
    )
    parts = []
    for canned in (answers(served()), answers(full, **{f"{API}/keys": [key()]})):
        text = sign_in(CannedClient(canned)).get(PATH).text
        parts.append(re.findall(r'id="([\w-]+)"[^>]* data-live', text))
    assert "Keys</h2>" in text
    assert parts[0] == parts[1]
    assert {"queue", "keys", "service-events"} <= set(parts[0])


def test_a_service_is_ended_after_a_question() -> None:
    client = CannedClient(answers(served(), **{f"DELETE {API}": served(state="ending")}))
    browser = sign_in(client)
    assert f'action="{PATH}/end" data-confirm="End the service chat?' in browser.get(PATH).text
    client.asked.clear()
    answer = browser.post(f"{PATH}/end", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/services")
    assert client.asked == [f"DELETE {API}"]
    ending = sign_in(CannedClient(answers(served(state="ending")))).get(PATH).text
    assert "/end" not in ending


@pytest.mark.parametrize("action", ["end", "retry", "calls/c1/retry"])
def test_other_sites_cannot_change_a_service(action: str) -> None:
    client = CannedClient({})
    browser = sign_in(client)
    answer = browser.post(f"{PATH}/{action}", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403
    answer = browser.post(f"{PATH}/{action}", headers={"sec-fetch-site": "same-site"})
    assert answer.status_code == 403
    assert client.asked == []


def test_a_viewer_sees_a_service_without_its_keys_and_calls() -> None:
    refusal = ApiError("role-needed", "no role that runs", "", 403)
    service = served(queue=QueueView(waiting=0, running=0, done=0, dead=1))
    text = page_of(service, **{f"{API}/keys": refusal, f"{API}/calls": refusal})
    assert "The dead calls cannot be shown: no role that runs." in text
    assert "Keys" not in text


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_texts_of_services_are_shown_as_they_are(text: str) -> None:
    service = served(
        why=text,
        queue=QueueView(waiting=0, running=0, done=0, dead=1),
        unplaced=[UnplacedView(places=[text], waiting=1, instead=text)],
        webhooks=[WebhookView(name=text, url=text, signature=text)],
        crons=[CronView(cron=text, time_zone=text, path=text, next_at=None)],
    )
    dead = CallQueueView(calls=[call(path=text, problem=text, object=text)], counts={})
    canned = answers(service, **{f"{API}/calls": dead, f"{API}/keys": [key(label=text)]})
    page = sign_in(CannedClient(canned)).get(PATH).text
    assert text not in page
    assert html.unescape(page).count(text) >= 13


@contextmanager
def _answer(data: bytes, status: int = 200) -> Any:
    class Answer:
        def __init__(self) -> None:
            self.status, self.rest = status, data

        def read1(self, most: int) -> bytes:
            part, self.rest = self.rest[:most], self.rest[most:]
            return part

    yield Answer()


def test_a_language_model_is_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def open_answer(*given: Any) -> Any:
        asked.append(given)
        return _answer(b'{"choices": [{"message": {"content": "<b>Hi</b>"}}]}')

    monkeypatch.setattr(pages, "open_answer", open_answer)
    asking = client(**{"/v1/projects/default/services/chat": served("chat", models=["m"])})
    browser = sign_in(asking)
    assert 'name="message"' in browser.get("/services/default/chat/try").text
    data = {"message": "more", "model": "m", "key": "k", "said": ["Hello", "Yes?"]}
    page = browser.post("/services/default/chat/try", data=data).text
    assert "&lt;b&gt;Hi&lt;/b&gt;" in page
    url, path, method, body, headers, _ = asked[0]
    assert (url, path, method) == ("http://here", "/v1/chat/completions", "POST")
    assert re.findall(rb'"role":"(\w+)"', body) == [b"user", b"assistant", b"user"]
    assert headers["Authorization"] == "Bearer k"
    assert page.count('name="said"') == 4


def test_any_service_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "open_answer", lambda *given: _answer(b"no such page", 404))
    asking = client(**{"/v1/projects/default/services/web": served("web")})
    browser = sign_in(asking)
    page = browser.post("/services/default/web/try", data={"method": "GET", "path": "/x"}).text
    assert "Status 404" in page
    assert "no such page" in page
    for wrong in ({"method": "TRACE", "path": "/"}, {"path": "x"}, {"path": "/a\r\nHost: b"}):
        assert browser.post("/services/default/web/try", data=wrong).status_code == 400
    assert browser.post("/services/default/web/try", data={"path": "/", "key": "a b"}).status_code == 400  # fmt: skip


def test_a_stream_without_an_end_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        status = 200

        def read1(self, most: int) -> bytes:
            return b"x" if most else b""

    monkeypatch.setattr(pages, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(pages, "open_answer", lambda *given: nullcontext(Stream()))
    asking = client(**{"/v1/projects/default/services/web": served("web")})
    page = sign_in(asking).post("/services/default/web/try", data={"path": "/"}).text
    assert "Status 200" in page


def test_the_rows_of_replicas_keep_their_keys_while_the_page_changes() -> None:
    text = Path(pages.__file__).with_name("service.html").read_text("utf-8")
    assert 'live("replicas", "Replicas")' in text
    assert "<tr data-key=" in text


def test_lists_are_sorted_by_their_columns() -> None:
    services = [served(n, spent_micros=c, created_at=NOW) for n, c in (("a", 5), ("b", 1))]
    browser = sign_in(CannedClient({"/v1/services": services}))

    def keys(path: str) -> str:
        return "".join(re.findall(r'<tr data-key="default/(\w)"', browser.get(path).text))

    assert keys("/services") == "ab"
    assert keys("/services?sort=Cost&way=up") == "ba"
    assert browser.get("/services?sort=__class__").status_code == 400


def test_other_sites_end_no_services() -> None:
    browser, other = sign_in(CannedClient({})), {"origin": "http://evil.example"}
    assert browser.post("/services", data={"do": "end"}, headers=other).status_code == 403
