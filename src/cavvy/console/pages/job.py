"""One job: its phase and reason, attempts, nodes, events, log, cost and task, and its actions. The
whole log of a rank has a page of its own: in pages, searched, with times, and as a file.
"""

import base64
import re
import time
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from operator import itemgetter
from shlex import quote
from typing import Any
from urllib.parse import urlencode

import msgspec
import yaml
from msgspec import Struct
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError, LogChunk
from cavvy.client.metrics import (
    SPEED_SINCE,
    estimate_left_s,
    find_progress,
    find_share,
    find_unsafe,
    find_use,
)
from cavvy.client.sizes import list_spans
from cavvy.client.wire import (
    AttemptView,
    EventView,
    ForecastView,
    JobDetail,
    JobFigures,
    NodeView,
)
from cavvy.console import charts
from cavvy.console.memory import Memory
from cavvy.console.pages import group
from cavvy.console.pages.page import (
    CURVE_POINTS,
    ENDED,
    PERIODS,
    USUAL_PROJECT,
    Page,
    Part,
    hours_of,
    is_update,
    make_parts,
    memory_of,
    named_in,
    path_of,
    period_choice,
    read_figures,
    read_number,
    services_by_replica,
    try_part,
)
from cavvy.domain.figures import describe_stragglers, find_stragglers

_EVENTS = 200  # events on the page, the newest
_MOST_PAGES = 20  # pages of events that are read to find the newest
_TAIL_BYTES = 64 << 10
_RANKS = 8  # with a curve each; one in long periods, of which the server reads less at once
# figures that nodes measure; all others are reported by the work
MEASURED = frozenset(
    {
        *("gpu_percent", "gpu_memory_mib", "gpu_power_w", "cpu_percent", "memory_mib"),
        *("cpu_power_w", "work_energy_j"),
        *("disk_read_mib_s", "disk_write_mib_s", "net_in_mib_s", "net_out_mib_s"),
    }
)


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `job-not-found`."""
    project, name = named_in(request)
    job = client.job(project, name)
    cost = try_part(lambda: client.cost(project, job.id))
    task = msgspec.json.decode(job.task)
    parts = make_parts(lambda each: each.job_parts, client, request, job, now)
    shown = {name for part in parts for name in part.shows}
    return Page(
        job.name,
        "job.html",
        {
            "job": job,
            "is_over": job.phase in ENDED,
            "task": yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=100),
            "window": _show_window(task),
            "group": group.group_of(job, task),
            "line": _line_of(job),
            "graph": group.graph_of(client, memory_of(request), job),
            "service": services_by_replica(client, request, [job]).get(job.id),
            "cost": cost,
            "timeline": charts.timeline(cost.value.timeline) if cost.value else None,
            "forecast": _forecast(client, memory_of(request), project, job),
            "start": _start_of(job),
            "unsafe": find_unsafe(job),
            "avoided": {key: until for key, until in job.avoid.items() if until > now},
            "attempts": [(each, _show_hardware(each)) for each in reversed(job.attempts)],
            "sizes": list_spans(job, now),
            "parts": parts,
            "figures": [
                each for each in _figures(client, request, job, now) if each[0] not in shown
            ],
            "share": find_share(find_progress(job)),
            "left": _left_of(client, request, job, now),
            "events": read_newest_events(client, memory_of(request), project, job.id),
        }
        | _shown_nodes(client, request, job)
        | dict(period_choice(request)),
    )


def _shown_nodes(client: ApiClient, request: Request, job: JobDetail) -> dict[str, Any]:
    """Return the nodes of the attempt that the page shows, and the log of one of its ranks."""
    shown = _find_attempt(job, read_number(request, "attempt", job.attempt))
    nodes = shown.nodes if shown else []
    ranks = [node.rank for node in nodes] if shown else [0]
    working = nodes if job.phase == "running" else ()
    slow = find_stragglers({node.rank: node.progress for node in working})
    rank = read_number(request, "rank", ranks[0] if ranks else 0)
    log = Part[dict[str, Any] | None](None)
    if not is_update(request):  # the page's script reads the rest of the log by itself
        log = try_part(lambda: _read_tail(client, job, rank, shown))
    return {
        "attempt": shown,
        "is_attempt_chosen": "attempt" in request.query_params,
        "nodes": [_node_row(node) for node in nodes],
        "slow": dict(slow),
        "slow_text": describe_stragglers(slow) if slow else "",
        "node_counts": Counter(node.phase for node in nodes),
        "log": log,
        "is_rank_chosen": "rank" in request.query_params,
        "rank": rank,
        "ranks": ranks,
    }


def _figures(
    client: ApiClient, request: Request, job: JobDetail, now: datetime
) -> Sequence[tuple[str, charts.Chart]]:
    """Return a chart of each figure in the chosen period before the job's end or before now: what
    the work reports first, then what nodes measure.
    """
    if not job.attempts:
        return ()
    chosen = [read_number(request, "rank", 0)] if "rank" in request.query_params else []
    ranks = chosen or range(_RANKS if hours_of(request) <= PERIODS["day"] else 1)
    read = partial(client.figures, job.project, job.id, ranks=ranks, points=CURVE_POINTS)
    end, key = min(job.ended_at or now, now), (job.id, *chosen)
    found = read_figures(request, now, job.submitted_at, end, key, lambda since: read(since=since))
    return chart_figures(found) if found else ()


def chart_figures(found: JobFigures) -> Sequence[tuple[str, charts.Chart]]:
    """Return a chart of each figure with a line for each rank of each attempt."""
    lines: dict[str, list[charts.Line]] = {}
    several = len({each.attempt for each in found.series}) > 1
    for each in found.series:
        name = f"rank {each.rank}" + (f", attempt {each.attempt}" if several else "")
        line = charts.Line(name, 0, found.step_s, each.mean, each.low, each.high)
        lines.setdefault(each.name, []).append(line)
    ordered = sorted(lines, key=lambda name: (name in MEASURED, name))
    drawn = ((name, charts.curves(lines[name], name, found.start)) for name in ordered)
    return [(name, chart) for name, chart in drawn if chart is not None]


def _left_of(client: ApiClient, request: Request, job: JobDetail, now: datetime) -> float | None:
    """Return the seconds until the work is done, by its speed of the last half hour, which is read
    once a minute; None if they are unknown.
    """
    progress = find_progress(job)
    if job.phase != "running" or find_share(progress) is None:
        return None
    if "left_s" in progress:
        return estimate_left_s(progress, None, 60)
    found = memory_of(request).recall(
        ("speed", job.id, job.attempt, now.replace(second=0, microsecond=0)),
        lambda: try_part(
            lambda: client.figures(
                job.project, job.id, attempt=job.attempt, names=["done"], since=now - SPEED_SINCE
            )
        ),
    )
    if found.value is None:
        return None
    return estimate_left_s(progress, next(iter(found.value.series), None), found.value.step_s)


def _forecast(
    client: ApiClient, memory: Memory, project: str, job: JobDetail
) -> ForecastView | None:
    """Return the forecast of a job with a deadline. The server simulates the job for it, so it may
    be a minute old.
    """
    if job.plan_state is None or job.phase in ENDED:
        return None
    return memory.recall(
        ("forecast", project, job.id),
        lambda: try_part(lambda: client.forecast(project, job.id)).value,
    )


def stop(client: ApiClient, request: Request, now: datetime) -> str:
    """Stop the job. Raises ApiError."""
    client.stop(*named_in(request))
    return path_of("jobs", *named_in(request))


def retry(client: ApiClient, request: Request, now: datetime) -> str:
    """Queue the ended job again. Raises ApiError."""
    client.retry(*named_in(request))
    return path_of("jobs", *named_in(request))


def read_log(client: ApiClient, request: Request) -> dict[str, Any]:
    """Return the log from a position on, for the page's script; nothing before the
    attempt has begun. `data` is in base64, because it may end within a character.
    """
    project, name = named_in(request)
    attempt, offset = read_number(request, "attempt", 1), read_number(request, "offset", 0)
    try:
        chunk = client.log(
            project, name, rank=read_number(request, "rank", 0), attempt=attempt, offset=offset
        )
    except ApiError as error:
        if error.code != "log-not-found":
            raise
        return {"data": "", "attempt": attempt, "offset": offset, "over": False}
    return {
        "data": base64.b64encode(chunk.data).decode(),
        "attempt": chunk.attempt,
        "offset": chunk.offset,
        "over": chunk.over,
    }


def _read_tail(
    client: ApiClient, job: JobDetail, rank: int, attempt: AttemptView | None
) -> dict[str, Any] | None:
    """Return the end of the log of an attempt, and the position after it. Before the first attempt,
    the log is empty, and the page's script waits for it.
    """
    if attempt is None:
        if job.phase in ENDED:
            return None
        return {"text": "", "attempt": 1, "offset": 0, "over": False}
    chunk = client.log(
        job.project, job.id, rank=rank, attempt=attempt.number, tail_bytes=_TAIL_BYTES
    )
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(chunk.data, final=chunk.over)
    begun = len(decoder.getstate()[0])  # bytes of a character whose other bytes follow
    return {
        "text": text.lstrip("\N{REPLACEMENT CHARACTER}"),  # the tail may begin within a character
        "attempt": chunk.attempt,
        "offset": chunk.offset - begun,
        "over": chunk.over,
    }


def read_newest_events(
    client: ApiClient, memory: Memory, project: str, name: str
) -> Sequence[EventView]:
    """Return the newest events, newest first. Events never change, so only those are requested that
    are newer than the last request's.
    """
    key = ("events", project, name)
    after, events = memory.find(key) or (0, ())
    for _ in range(_MOST_PAGES):
        page = client.events(project, name, after=after)
        if not page.events:
            break
        events = (*events, *page.events)[-_EVENTS:]
        after = page.last
    memory.keep(key, (after, events))
    return events[::-1]


def _find_attempt(job: JobDetail, number: int) -> AttemptView | None:
    found = [each for each in job.attempts if each.number == number]
    return found[0] if found else job.attempts[-1] if job.attempts else None


@dataclass(frozen=True)
class _Start:
    """What a starting job waits for: the nodes that have not joined yet."""

    reason: str
    joined: int
    nodes: int
    expected_at: datetime | None


def _start_of(job: JobDetail) -> _Start | None:
    attempt = _find_attempt(job, job.attempt) if job.phase == "starting" else None
    if attempt is None:
        return None
    joined = sum(node.phase != "expected" for node in attempt.nodes)
    return _Start(attempt.reason, joined, len(attempt.nodes), attempt.expected_at)


def _line_of(job: JobDetail) -> str:
    """Return the command that opens a shell beside the running work, or follows the log."""
    place = "" if job.project == USUAL_PROJECT else f" -p {quote(job.project)}"
    command = "cavvy ssh" if job.phase == "running" else "cavvy logs"
    return f"{command} {quote(job.name)}{place}"


def _show_window(task: Mapping[str, Any]) -> str:
    """Return the window in which the job may start, or ""."""
    window = task.get("window") or {}
    text, zone = window.get("text", ""), window.get("time_zone", "UTC")
    return text if not text or zone in text else f"{text} ({zone})"


def _show_hardware(attempt: AttemptView) -> str:
    """Return the accelerators of one node, such as "8 × H100", or ""."""
    offer = msgspec.json.decode(attempt.offer)
    if not offer.get("accelerator"):
        return ""
    part = offer.get("accelerator_part", 1)
    count = offer.get("accelerator_count", 1) if part == 1 else f"{part:.2g}"
    return f"{count} × {offer['accelerator']}"


def _node_row(node: NodeView) -> dict[str, Any]:
    use = find_use(node.telemetry)
    percents = {name: value for name, value in use.items() if name.endswith("_percent")}
    others = {name: value for name, value in use.items() if name not in percents}
    return {"node": node, "percents": percents, "others": others, "progress": node.progress}


_PAGE_BYTES = 256 << 10
_MOST_FOUND = 200  # lines that a search shows
_MOST_SEARCHED = 64 << 20  # bytes that one request searches
_SEARCH_S = 20.0
_DOWNLOAD_S = 60.0  # seconds for one part of a download
# sequences that color text or move a terminal's cursor
_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


class LogLine(Struct, frozen=True, kw_only=True):
    """A line, the attempt and the position at which it begins, and when it arrived."""

    text: str
    attempt: int
    offset: int
    at: datetime | None


def make_log(client: ApiClient, request: Request, now: datetime) -> Page:
    """A page of the log from `offset` of `attempt` on, or the lines that contain `text`. Raises
    ApiError, HTTPException.
    """
    project, name = named_in(request)
    job = client.job(project, name)
    asked = request.query_params
    attempts = [each.number for each in job.attempts]
    attempt = read_number(request, "attempt", attempts[0] if attempts else 1)
    rank, offset = read_number(request, "rank", 0), read_number(request, "offset", 0)
    text, stamped = (asked.get("text") or "")[:200], "times" in asked
    nodes = job.attempts[-1].nodes if job.attempts else []
    path = f"{path_of('jobs', job.project, job.id)}/whole-log"
    kept = {"rank": rank, **({"times": 1} if stamped else {}), **({"text": text} if text else {})}
    reader = _Reader(client, job.project, job.id, rank, attempt, offset)
    client.until = time.monotonic() + _SEARCH_S
    lines = [*islice(reader.search(text), _MOST_FOUND)] if text else [*reader.page()]
    position = {"attempt": reader.attempt, "offset": reader.offset}
    return Page(
        f"Log of {job.name}",
        "log.html",
        {
            "job": job,
            "path": path,
            "rank": rank,
            "ranks": [each.rank for each in nodes] or [0],
            "attempt": attempt,
            "attempts": attempts,
            "text": text,
            "stamped": stamped,
            "lines": lines,
            "is_first": offset == 0 and (not attempts or attempt == attempts[0]),
            "begin": f"{path}?" + urlencode(kept),
            "next": None if reader.is_at_end else f"{path}?" + urlencode({**kept, **position}),
            "file": f"{path_of('jobs', job.project, job.id)}/log.txt?"
            + urlencode({"rank": rank, **({"times": 1} if stamped else {})}),
        },
    )


def read_file(client: ApiClient, request: Request) -> Iterator[bytes]:
    """Yield the whole log of a rank, with the time before each line if `times` is set. Raises
    ApiError, HTTPException.
    """
    project, name = named_in(request)
    rank, stamped = read_number(request, "rank", 0), "times" in request.query_params
    client.until = time.monotonic() + _DOWNLOAD_S
    last = b"\n"
    for chunk in client.log_chunks(project, name, rank=rank, times=stamped):
        client.until = time.monotonic() + _DOWNLOAD_S
        if not stamped:
            yield chunk.data
            continue
        at = chunk.offset - len(chunk.data)
        for part in chunk.data.splitlines(keepends=True):
            yield (_stamp_of(chunk, at) if last == b"\n" else b"") + part
            last, at = part[-1:], at + len(part)


class _Reader:
    """Reads lines from a position on. After that, `attempt` and `offset` are the position of the
    next line, and `is_at_end` whether there is none.
    """

    def __init__(
        self, client: ApiClient, project: str, job: str, rank: int, attempt: int, offset: int
    ) -> None:
        self.attempt, self.offset, self.is_at_end = attempt, offset, False
        self._where = (client, project, job, rank)

    def page(self) -> Iterator[LogLine]:
        begin, first = self.offset, self.attempt
        for line in self._lines():
            yield line
            if self.attempt == first and self.offset - begin >= _PAGE_BYTES:
                return
            if self.attempt != first and self.offset >= _PAGE_BYTES:
                return
        self.is_at_end = True

    def search(self, text: str) -> Iterator[LogLine]:
        wanted, began, read = text.casefold(), time.monotonic(), 0
        for line in self._lines():
            read += len(line.text)
            if wanted in line.text.casefold():
                yield line
            if read > _MOST_SEARCHED or time.monotonic() > began + _SEARCH_S / 2:
                return
        self.is_at_end = True

    def _lines(self) -> Iterator[LogLine]:
        rest = b""
        begun: tuple[int, int, datetime | None] = (self.attempt, self.offset, None)
        for chunk in self._chunks():
            at = chunk.offset - len(chunk.data)
            if rest and chunk.attempt != begun[0]:
                yield self._line(rest, *begun)
                rest = b""
            for part in chunk.data.splitlines(keepends=True):
                if not rest:
                    begun = (chunk.attempt, at, _time_of(chunk, at))
                rest, at = rest + part, at + len(part)
                if part.endswith(b"\n") or len(rest) > _PAGE_BYTES:
                    line, rest = rest, b""
                    self.attempt, self.offset = chunk.attempt, at
                    yield self._line(line, *begun)
        if rest:
            self.attempt, self.offset = begun[0], begun[1] + len(rest)
            yield self._line(rest, *begun)

    def _chunks(self) -> Iterable[LogChunk]:
        client, project, job, rank = self._where
        attempt, offset = self.attempt, self.offset
        while True:
            chunk = client.log(project, job, rank=rank, attempt=attempt, offset=offset, times=True)
            yield chunk
            moved = (chunk.attempt, chunk.offset) != (attempt, offset)
            attempt, offset = chunk.attempt, chunk.offset
            if chunk.over or not moved:
                return

    def _line(self, data: bytes, attempt: int, offset: int, at: datetime | None) -> LogLine:
        text = _SEQUENCES.sub("", data.decode(errors="replace").rstrip("\r\n"))
        return LogLine(text=text.rpartition("\r")[2], attempt=attempt, offset=offset, at=at)


def _time_of(chunk: LogChunk, at: int) -> datetime | None:
    """Return when the byte at this position arrived at the server."""
    known = bisect_right(chunk.times, at, key=itemgetter(0))
    return datetime.fromtimestamp(chunk.times[known - 1][1], UTC) if known else None


def _stamp_of(chunk: LogChunk, at: int) -> bytes:
    found = _time_of(chunk, at)
    return b"-  " if found is None else f"{found:%Y-%m-%dT%H:%M:%SZ}  ".encode()
