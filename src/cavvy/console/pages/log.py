"""The whole log of a rank: in pages, searched, with times, and as a file."""

import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from operator import itemgetter
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request

from cavvy.client import ApiClient, LogChunk
from cavvy.console.pages.page import Page, named_in, path_of, read_number

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


def make(client: ApiClient, request: Request, now: datetime) -> Page:
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
