"""One job: its phase and reason, attempts, nodes, events, log, cost and task, and its actions."""

import base64
from datetime import datetime
from typing import Any

import msgspec
import yaml
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.metrics import TOTALS
from cavvy.client.wire import AttemptView, EventView, JobDetail, NodeView
from cavvy.console import charts
from cavvy.console.pages.page import ENDED, Page, try_part

_EVENTS = 200  # events on the page, the newest
_MOST_PAGES = 20  # pages of events that are read to find the newest
_TAIL_BYTES = 64 << 10


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `job-not-found`."""
    project, name = _job_of(request)
    found = client.job(project, name)
    key = found.id
    is_over = found.phase in ENDED
    cost = try_part(lambda: client.cost(project, key))
    planned = found.plan_state is not None and not is_over
    shown = _shown_attempt(found, request)
    ranks = [node.rank for node in shown.nodes] if shown else [0]
    rank = _read_number(request, "rank", ranks[0] if ranks else 0)
    return Page(
        found.name,
        "job.html",
        {
            "job": found,
            "is_over": is_over,
            "task": _task_text(found),
            "tags": msgspec.json.decode(found.task).get("tags") or {},
            "cost": cost,
            "timeline": charts.timeline(cost.value.timeline) if cost.value else None,
            "forecast": try_part(lambda: client.forecast(project, key)).value if planned else None,
            "attempt": shown,
            "nodes": [_node_row(node) for node in shown.nodes] if shown else [],
            "events": _newest_events(client, project, key),
            "log": try_part(lambda: _read_tail(client, project, key, rank)),
            "rank": rank,
            "ranks": ranks,
        },
    )


def stop(client: ApiClient, request: Request) -> None:
    """Stop the job. Raises ApiError."""
    client.stop(*_job_of(request), reason="stopped in the console")


def retry(client: ApiClient, request: Request) -> None:
    """Queue the ended job again. Raises ApiError."""
    client.retry(*_job_of(request))


def read_log(client: ApiClient, request: Request) -> dict[str, Any]:
    """Return the log from a position on, for the page's script. `data` is in base64, because it may
    end within a character.
    """
    project, name = _job_of(request)
    chunk = client.log(
        project,
        name,
        rank=_read_number(request, "rank", 0),
        attempt=_read_number(request, "attempt", 1),
        offset=_read_number(request, "offset", 0),
    )
    return {
        "data": base64.b64encode(chunk.data).decode(),
        "attempt": chunk.attempt,
        "offset": chunk.offset,
        "over": chunk.over,
    }


def _read_tail(client: ApiClient, project: str, name: str, rank: int) -> dict[str, Any]:
    """Return the end of the log of the newest attempt, and the position after it."""
    newest = client.job(project, name).attempt or 1
    chunk = client.log(project, name, rank=rank, attempt=newest, tail_bytes=_TAIL_BYTES)
    return {
        "text": chunk.data.decode(errors="replace"),
        "attempt": chunk.attempt,
        "offset": chunk.offset,
        "over": chunk.over,
    }


def _newest_events(client: ApiClient, project: str, name: str) -> list[EventView]:
    """Return the newest events, newest first."""
    events: list[EventView] = []
    after = 0
    for _ in range(_MOST_PAGES):
        page = client.events(project, name, after=after)
        events = [*events, *page.events][-_EVENTS:]
        if not page.events:
            break
        after = page.last
    return events[::-1]


def _shown_attempt(job: JobDetail, request: Request) -> AttemptView | None:
    number = _read_number(request, "attempt", job.attempt)
    found = [each for each in job.attempts if each.number == number]
    return found[0] if found else job.attempts[-1] if job.attempts else None


def _node_row(node: NodeView) -> dict[str, Any]:
    use = {name: value for name, value in node.telemetry.items() if name not in TOTALS}
    percents = {name: value for name, value in use.items() if name.endswith("_percent")}
    others = {name: f"{value:g}" for name, value in use.items() if name not in percents}
    progress = {name: str(value) for name, value in node.progress.items()}
    return {"node": node, "percents": percents, "others": others, "progress": progress}


def _task_text(job: JobDetail) -> str:
    task = msgspec.json.decode(job.task)
    return yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=100)


def _job_of(request: Request) -> tuple[str, str]:
    return request.path_params["project"], request.path_params["name"]


def _read_number(request: Request, name: str, usual: int) -> int:
    """Raises HTTPException."""
    text = request.query_params.get(name, "")
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise HTTPException(400, f"`{name}` must be a whole number, not {text!r}.")
    return int(text)
