"""Routes for logs. The log of one rank is returned in chunks, with long polling."""

from datetime import datetime
from typing import Annotated

from fastapi import Query
from msgspec import structs
from pydantic import AwareDatetime
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import JobPath, ProjectPath, WaitQuery, find_job, named
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.api.wire import MIB, PositionQuery
from cavvy.client import LogChunk
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobRecord

_PIECE = MIB
_TIMES = 1000  # maximum number of timestamps in the header of an answer

router = RouteGroup("jobs", prefix="/v1")
RankQuery = Annotated[int, Query(ge=0, le=1_000_000)]
AttemptQuery = Annotated[
    int | None,
    Query(ge=0, le=1_000_000, description="The first attempt to return; by default, attempt 1."),
]
TailQuery = Annotated[
    int | None,
    Query(ge=0, le=1 << 62, description="Start this many bytes before the end of the log."),
]
SinceQuery = Annotated[
    AwareDatetime | None,
    Query(description="Start with the first byte that arrived at this time or later."),
]
TimesQuery = Annotated[bool, Query(description="Also return the times at which the bytes arrived.")]
OnlyQuery = Annotated[bool, Query(description="Do not continue with the logs of later attempts.")]


@router.get(
    "/projects/{project}/jobs/{name}/logs",
    rule=in_path(Permission.VIEW),
    gives=True,
    headers=("Cavvy-Log-Attempt", "Cavvy-Log-Offset", "Cavvy-Log-Over", "Cavvy-Log-Times"),
    errors=("job-not-found", "log-not-found"),
)
async def logs(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    rank: RankQuery = 0,
    attempt: AttemptQuery = None,
    offset: PositionQuery = 0,
    tail_bytes: TailQuery = None,
    since: SinceQuery = None,
    wait_s: WaitQuery = 0,
    times: TimesQuery = False,
    only: OnlyQuery = False,
) -> Response:
    """Get a part of a rank's log; the headers contain the position of the next part."""
    job = await find_job(app_state, project, name)
    # a reader that waits may also wait for an attempt that has not begun
    most = job.last_number + 1 if wait_s and not (only and job.phase in JOB_ENDS) else job.attempt
    _check_exists(job, rank, attempt, most)
    if since is not None:
        attempt, offset = await app_state.use_logs(
            False, _find_start, app_state, job, rank, attempt, since
        )
    with app_state.watch.listen([job.id], wait_s) as listener:
        while True:
            chunk = await _piece(app_state, job, rank, attempt, offset, tail_bytes, only)
            news = chunk.data or chunk.over or chunk.attempt != (attempt or 0)
            if news or not await listener.wait():
                break
            job = await app_state.store.job(job.id)
    headers = {
        "Cavvy-Log-Attempt": str(chunk.attempt),
        "Cavvy-Log-Offset": str(chunk.offset),
        "Cavvy-Log-Over": "true" if chunk.over else "false",
    }
    if times and chunk.data:
        chunk, headers["Cavvy-Log-Times"] = await app_state.use_logs(
            False, _with_times, app_state, job, rank, chunk
        )
        headers["Cavvy-Log-Offset"] = str(chunk.offset)
    return Response(chunk.data, 200, headers, "application/octet-stream")


def _find_start(
    app_state: AppState, job: JobRecord, rank: int, attempt: int | None, since: datetime
) -> tuple[int, int]:
    """Find the first byte that arrived at `since` or later, and return its attempt and its offset.
    If no byte has arrived at `since` or later, return the end of the log.
    """
    number = 0
    for number in range(attempt or min(1, job.attempt), (attempt or job.attempt) + 1):
        found = app_state.logs.times(job.project, job.id, number, rank).since(since.timestamp())
        if found is not None:
            return number, found
    return number, app_state.logs.size(job.project, job.id, number, rank) if number else 0


def _with_times(
    app_state: AppState, job: JobRecord, rank: int, chunk: LogChunk
) -> tuple[LogChunk, str]:
    """Return the chunk, and a text with the times at which the chunk's bytes arrived: pairs of an
    offset and seconds since 1970. The chunk is shortened so that there are at most `_TIMES` pairs.
    """
    start = chunk.offset - len(chunk.data)
    known = app_state.logs.times(job.project, job.id, chunk.attempt, rank)
    pairs = known.between(start, chunk.offset, _TIMES + 1)
    if len(pairs) > _TIMES:
        end = pairs[_TIMES][0]
        chunk = structs.replace(chunk, data=chunk.data[: end - start], offset=end)
    text = ",".join(f"{offset}:{at:.3f}" for offset, at in pairs[:_TIMES])
    return chunk, text


def _check_exists(job: JobRecord, rank: int, attempt: int | None, most: int) -> None:
    """Raise ApiProblem if the job does not have this rank, or if the attempt's number is above
    `most`.
    """
    if rank >= max(1, job.task.nodes):
        last = job.task.nodes - 1
        message = f"{job.name} has only " + (f"the ranks 0 to {last}" if last > 0 else "rank 0")
    elif attempt is not None and attempt > most:
        had = f"{job.attempt} attempt{'' if job.attempt == 1 else 's'}"
        message = f"{job.name} has had only {had}"
    else:
        return
    hint = f"`cavvy status {named(job)}` lists the attempts and nodes of the job"
    raise ApiProblem("log-not-found", message, hint)


async def _piece(
    app_state: AppState,
    job: JobRecord,
    rank: int,
    attempt: int | None,
    offset: int,
    tail_bytes: int | None,
    only: bool,
) -> LogChunk:
    """Return a chunk of the attempt's log from `offset` on, or the beginning of the next attempt's
    log. If `attempt` is 0 or None, start with the first attempt that has a log.
    """
    number = attempt or min(1, job.attempt)
    ended = job.phase in JOB_ENDS
    if tail_bytes is not None:
        number = attempt or job.attempt
        offset = 0
        if number:
            size = await app_state.use_logs(
                True, app_state.logs.size, job.project, job.id, number, rank
            )
            offset = max(0, size - tail_bytes)
    if number == 0:
        return LogChunk(data=b"", attempt=0, offset=0, over=ended)
    settled = ended or number < job.attempt or await _settled(app_state, job, number)
    piece = await app_state.use_logs(
        True, app_state.logs.read, job.project, job.id, number, rank, offset, _PIECE
    )
    offset = piece.next
    if piece.data or not settled:
        return LogChunk(data=piece.data, attempt=number, offset=offset, over=False)
    if only or number >= job.attempt:
        return LogChunk(data=b"", attempt=number, offset=offset, over=only or ended)
    return LogChunk(data=b"", attempt=number + 1, offset=0, over=False)


async def _settled(app_state: AppState, job: JobRecord, number: int) -> bool:
    """Return whether the attempt has ended, so that the attempt's log can no longer grow."""
    attempts = await app_state.store.attempts(job.id)
    return any(each.number == number and each.phase is AttemptPhase.ENDED for each in attempts)
