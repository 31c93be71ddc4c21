"""Routes for logs. The log of one rank is returned in chunks, with long polling.

The routes for what the nodes of a job measured, and its program reported, over time.
"""

from asyncio import to_thread
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
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
from cavvy.client import LogChunk, wire
from cavvy.domain.accounts import Permission
from cavvy.domain.figures import FigureColumns, choose_step, summarize_blocks
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
Since = Annotated[AwareDatetime | None, Query(description="By default, a day before `until`.")]
Points = Annotated[int, Query(ge=2, le=1500, description="The most values of a series.")]
USUAL_PERIOD = timedelta(days=1)
_LONGEST = timedelta(days=32)
USUAL_RANKS, _MOST_RANKS = 8, 64
OneAttemptQuery = Annotated[
    int | None, Query(ge=1, description="Only this attempt; by default, all attempts.")
]
RanksQuery = Annotated[
    list[int] | None,
    Query(
        max_length=_MOST_RANKS,
        description=f"Only these ranks; by default, the first {USUAL_RANKS}.",
    ),
]
USUAL_NAMES = 16
# Figures times ranks times days; a day of a figure takes about 2 ms of CPU time.
_MOST_READ = 2000
_MINUTE_S = 60
_FIRST_YEAR = 1971


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


@router.get(
    "/projects/{project}/jobs/{name}/figures",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found", "invalid-request"),
)
async def figures(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    attempt: OneAttemptQuery = None,
    rank: RanksQuery = None,
    figure: Annotated[
        list[str] | None,
        Query(max_length=64, description="Only figures with these names; by default, all."),
    ] = None,
    since: Since = None,
    until: Annotated[
        AwareDatetime | None,
        Query(description="By default, the end of the job, or now."),
    ] = None,
    points: Points = 300,
) -> wire.JobFigures:
    """Get what the job's nodes measured and its program reported, over time."""
    check_years(since, until)
    job = await find_job(app_state, project, name)
    end = until or (job.ended_at or app_state.now()) + timedelta(minutes=1)
    numbers = {each.id: each.number for each in await app_state.store.attempts(job.id)}
    chosen = [each for each, number in numbers.items() if attempt in (None, number)]
    known = await app_state.store.figures.ranks(chosen)
    ranks = sorted({each for _, each in known} & set(rank if rank else range(USUAL_RANKS)))
    begin = since or max(end - USUAL_PERIOD, job.submitted_at)
    check_size(begin, end, len(ranks), len(figure or ()) or USUAL_NAMES)
    steps = divide_period(begin, end, points)
    series: list[wire.SeriesView] = []
    for attempt_id, number in sorted(known, key=lambda pair: (numbers[pair[0]], pair[1])):
        if number in ranks:
            blocks = await app_state.store.figures.list(
                attempt_id, number, since=begin, until=end, names=figure or ()
            )
            found = await to_thread(summarize_blocks, blocks, *steps)
            series += list_series(numbers[attempt_id], number, found)
    return answer_figures(steps, series)


def check_years(*times: datetime | None) -> None:
    if any(each is not None and not _FIRST_YEAR <= each.year < 9999 for each in times):
        raise ApiProblem("invalid-request", f"expected times in the years {_FIRST_YEAR} to 9998")


def divide_period(begin: datetime, end: datetime, points: int) -> tuple[int, int, int]:
    """Return the first minute, the minutes of a step, and how many steps there are."""
    step = choose_step((end - begin) // timedelta(minutes=1) + 1, points)
    start = int(begin.timestamp()) // _MINUTE_S // step * step
    return start, step, max(0, int(end.timestamp()) // _MINUTE_S - start) // step + 1


def list_series(
    attempt: int, rank: int, found: Mapping[str, FigureColumns]
) -> Sequence[wire.SeriesView]:
    return [
        _make_series(attempt, rank, name, columns)
        for name, columns in sorted(found.items())
        if any(each == each for each in columns.mean)
    ]


def answer_figures(
    steps: tuple[int, int, int], series: Sequence[wire.SeriesView]
) -> wire.JobFigures:
    start, step, _ = steps
    return wire.JobFigures(
        start=datetime.fromtimestamp(start * _MINUTE_S, UTC),
        step_s=step * _MINUTE_S,
        series=[*series],
    )


def check_size(begin: datetime, end: datetime, ranks: int, names: int) -> None:
    if not begin < end <= begin + _LONGEST:
        raise ApiProblem(
            "invalid-request", f"`since` must be at most {_LONGEST.days} days before `until`"
        )
    days = (end - begin) / timedelta(days=1) + 1
    if ranks * names * days > _MOST_READ:
        raise ApiProblem(
            "invalid-request",
            f"{names} figures of {ranks} ranks in {days:.0f} days are too many",
            "request fewer ranks or figures, or a shorter period",
        )


def _make_series(attempt: int, rank: int, name: str, columns: FigureColumns) -> wire.SeriesView:
    low, mean, high = (
        [float(f"{each:.6g}") if each == each else None for each in values]
        for values in (columns.low, columns.mean, columns.high)
    )
    return wire.SeriesView(attempt=attempt, rank=rank, name=name, low=low, mean=mean, high=high)
