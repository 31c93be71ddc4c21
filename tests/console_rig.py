"""A console over a server whose answers are given: what a browser would get, without a browser."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
from msgspec import Raw
from msgspec.json import encode

from cavvy.client import ApiClient, wire
from cavvy.client.ledger_wire import LedgerSumView
from cavvy.client.service_wire import NamedService, ReplicaView
from cavvy.client.transport import HttpAnswer
from cavvy.console.access import Access, OneUser
from cavvy.console.app import Console

NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)
ORIGIN = "http://localhost"


class CannedClient(ApiClient):
    """A client whose server gives the answers of `answers`: by "METHOD /path" or "/path", without
    the query. A function gets the whole target; an ApiError is raised. `asked` lists what was requested.
    """

    def __init__(self, answers: Mapping[str, Any], asked: list[str] | None = None) -> None:
        super().__init__("unix:/nowhere", "token")
        self.answers = answers
        self.asked: list[str] = [] if asked is None else asked

    def send(self, method: str, target: str, *arguments: Any, **named: Any) -> HttpAnswer:
        self.asked.append(f"{method} {target}")
        path = urlsplit(target).path
        answer = self.answers.get(f"{method} {path}", self.answers.get(path))
        if answer is None:
            raise AssertionError(f"the test gives no answer to {method} {path}")
        if callable(answer):
            answer = answer(target)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, HttpAnswer):
            return answer
        return HttpAnswer(200, {}, encode(answer))

    def sibling(self) -> "CannedClient":
        return CannedClient(self.answers, self.asked)


class Browser:
    """Keeps cookies, and follows redirects unless told otherwise. Its forms are those of the
    console's own pages.
    """

    def __init__(self, access: Access, start: Callable[[], None] | None = None) -> None:
        self.cookies = httpx.Cookies()
        self._app = Console(access, "here", lambda: NOW, start).app

    def get(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request("GET", path, options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request("POST", path, options))

    async def _request(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        options.setdefault("follow_redirects", True)
        async with httpx.AsyncClient(
            transport=transport, base_url=ORIGIN, cookies=self.cookies, headers={"origin": ORIGIN}
        ) as client:
            answer = await client.request(method, path, **options)
            self.cookies = client.cookies
            return answer


def sign_in(client: CannedClient) -> Browser:
    """Return the signed-in browser of one user."""
    access = OneUser(client)
    browser = Browser(access)
    answer = browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    assert answer.status_code == 303
    return browser


def listing(name: str = "train", **fields: Any) -> wire.JobListing:
    return wire.JobListing(**_job_fields(name) | fields)


def detail(name: str = "train", **fields: Any) -> wire.JobDetail:
    usual = {
        "task": Raw(encode({"run": "python train.py"})),
        "origin": Raw(b"null"),
        "not_before": None,
        "stop_reason": None,
        "consented": False,
        "ceiling_micros": None,
        "queue_position": None,
        "attempts": [],
    }
    return wire.JobDetail(**_job_fields(name) | usual | fields)


def attempt(number: int = 1, **fields: Any) -> wire.AttemptView:
    usual = {
        "id": f"a{number}",
        "number": number,
        "gang": f"g{number}",
        "placement": "local/here/cpu:0/on-demand",
        "offer": Raw(b"{}"),
        "rate_micros_per_hour": 2_000_000,
        "phase": "running",
        "reason": "the work runs",
        "outcome": None,
        "exit_code": None,
        "first_failed_rank": None,
        "created_at": NOW - timedelta(minutes=9),
        "since": NOW - timedelta(minutes=9),
        "launched_at": None,
        "running_at": None,
        "finished_at": None,
        "ended_at": None,
        "checkpoint_at": None,
        "drill_until": None,
        "nodes": [],
    }
    return wire.AttemptView(**usual | fields)


def node(rank: int = 0, **fields: Any) -> wire.NodeView:
    usual = {
        "rank": rank,
        "phase": "running",
        "address": None,
        "exit_code": None,
        "exit_outcome": None,
        "exit_reason": "",
        "claimed_at": None,
        "running_at": None,
        "exited_at": None,
        "heard_at": NOW,
        "telemetry": {},
        "progress": {},
    }
    return wire.NodeView(**usual | fields)


def cost(**fields: Any) -> wire.CostView:
    usual = {
        "job": "train",
        "charges": [],
        "total_micros": 300_000,
        "queued_s": 1.0,
        "starting_s": 2.0,
        "running_s": 540.0,
        "lost_s": 0.0,
        "ending_s": 0.0,
        "timeline": [],
    }
    return wire.CostView(**usual | fields)


def spent(amount_micros: int, **groups: str) -> LedgerSumView:
    return LedgerSumView(groups=groups, amount_micros=amount_micros, discount_micros=0, jobs=1)


def log_answer(data: bytes, attempt: int = 1, *, over: bool = False) -> HttpAnswer:
    headers = {
        "cavvy-log-attempt": str(attempt),
        "cavvy-log-offset": str(len(data)),
        "cavvy-log-over": "true" if over else "false",
    }
    return HttpAnswer(200, headers, data)


def job_answers(job: wire.JobDetail, log: bytes = b"", **more: Any) -> dict[str, Any]:
    """Return the answers for the page of one job."""
    path = f"/v1/projects/{job.project}/jobs"
    return {
        f"{path}/{each}{part}": answer
        for each in (job.name, job.id)
        for part, answer in {
            "": job,
            "/cost": more.get("cost", cost()),
            "/events": wire.EventPage(events=[], last=0, over=False),
            "/logs": log_answer(log),
            "/forecast": wire.ForecastView(runs=0),
            "/figures": more.get("figures", wire.JobFigures(start=NOW, step_s=60, series=[])),
            "/curves": {"curves": []},  # of a capability, which may be left out
            "/curve-names": {"names": []},
            "/examples": {"examples": []},
        }.items()
    }


def replica(number: int = 1, **fields: Any) -> ReplicaView:
    usual = {
        "job": f"id-{number}",
        "number": number,
        "revision": 1,
        "state": "ready",
        "reason": "",
        "place": "",
        "port": 1,
        "ordered_at": NOW,
        "ready_at": None,
        "ended_at": None,
        "in_flight": None,
        "start_s": {},
    }
    return ReplicaView(**usual | fields)


def served(name: str = "chat", *replicas: ReplicaView, **fields: Any) -> NamedService:
    usual = {
        "project": "default",
        "name": name,
        "state": "ready",
        "url": "http://here",
        "models": [],
        "revision": 1,
        "ready": 1,
        "target": 1,
        "why": "",
        "problem": "",
        "replicas": list(replicas),
    }
    return NamedService(**usual | fields)


def _job_fields(name: str) -> dict[str, Any]:
    return {
        "id": f"id-{name}"[:16],
        "project": "default",
        "name": name,
        "user": "ada",
        "phase": "running",
        "reason": "the work runs",
        "priority": 0,
        "submitted_at": NOW - timedelta(minutes=10),
        "since": NOW - timedelta(minutes=9),
        "ended_at": None,
        "attempt": 1,
        "exit_code": None,
        "placement": "local/here/cpu:0/on-demand",
        "spent_micros": 300_000,
    }


# texts that users and nodes can choose, and that a page must show as they are
HOSTILE_TEXTS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }} {% for x in y %}<b>",
    "</pre></textarea><!--",
)
