"""What runs or bills now, over all jobs: look, stop everything, sweep what belongs to nobody."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.house import House, house_of
from cavvy.api.openapi import document
from cavvy.api.routes import views
from cavvy.api.wire import read, reply
from cavvy.client import wire
from cavvy.control.sweep import Stray, Sweep
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase
from cavvy.store.base import JobSummary, NotFound

_LIVE = tuple(phase for phase in JobPhase if phase not in JOB_ENDS)

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/nodes", **document("Nodes that run or bill now.", answer=list[wire.NodeRow]))
async def nodes(
    request: Request, project: Annotated[str | None, Query(max_length=63)] = None
) -> Response:
    house = house_of(request)
    holds = {(hold.gang, hold.rank): hold for hold in await house.store.holds()}
    rows = []
    for attempt in await house.store.open_attempts(project):
        try:
            job = await house.store.job(attempt.job_id)
        except NotFound:
            continue
        for node in await house.store.nodes(attempt.id):
            rows.append(views.node_row(job, attempt, node, holds.get((attempt.gang, node.rank))))
    return reply(rows)


@router.post(
    "/down",
    **document(
        "Stop all unfinished jobs and remove their nodes.", ask=wire.DownAsk, answer=wire.FoundList
    ),
)
async def down(request: Request) -> Response:
    house = house_of(request)
    ask = await read(request, wire.DownAsk)
    jobs = await _unfinished(house, ask.project)
    sweep = Sweep()
    if ask.dry_run:
        sweep = Sweep() if ask.project else await house.plant.sweeper.living()
        shown = {job.id for job in jobs}
        sweep = replace(
            sweep, strays=[_over(stray) for stray in sweep.strays if stray.job_id not in shown]
        )
    elif ask.project is None:
        sweep = await house.plant.down()
    else:
        for job in jobs:
            await house.plant.jobs.stop(job.project, job.id, f"project {ask.project} is taken down")
        for attempt in await house.store.open_attempts(ask.project):
            if attempt.phase is AttemptPhase.KEPT:
                await house.plant.jobs.stop(attempt.project, attempt.job_id)
    found = [
        wire.Found(
            kind="job",
            name=job.name,
            where=job.place or f"project {job.project}",
            why=job.phase,
            done=not ask.dry_run,
        )
        for job in jobs
    ]
    return reply(wire.FoundList(found=found + _gangs(sweep)))


@router.post(
    "/gc",
    **document(
        "Find, and unless dry remove, what runs under this installation's name and belongs to no "
        "unfinished job.",
        ask=wire.GcAsk,
        answer=wire.FoundList,
    ),
)
async def gc(request: Request) -> Response:
    house = house_of(request)
    ask = await read(request, wire.GcAsk)
    return reply(
        wire.FoundList(found=_gangs(await house.plant.sweeper.sweep(remove=not ask.dry_run)))
    )


async def _unfinished(house: House, project: str | None) -> Sequence[JobSummary]:
    jobs: list[JobSummary] = []
    cursor = None
    while True:
        page = await house.store.list_jobs(project, _LIVE, cursor, 500)
        jobs += page.jobs
        if (cursor := page.cursor) is None:
            return jobs


def _gangs(sweep: Sweep) -> list[wire.Found]:
    """What a sweep found, and the places that it could not ask."""
    found = [
        wire.Found(
            kind="gang", name=stray.gang, where=stray.provider, why=_why(stray), done=stray.removed
        )
        for stray in sweep.strays
    ]
    places = [
        wire.Found(kind="place", name=silent.provider, where="", why=str(silent), done=False)
        for silent in sweep.problems
    ]
    return found + places


def _over(stray: Stray) -> Stray:
    """What belongs to a job that has ended bills until it is gone, and is as good as removed."""
    return (
        stray
        if stray.job_id is None
        else replace(stray, why="its job has ended; it is being removed", sure=True)
    )


def _why(stray: Stray) -> str:
    if stray.problem:
        return f"{stray.why}; not removed: {stray.problem}"
    return (
        stray.why
        if stray.sure or stray.removed
        else f"{stray.why}; to be sure, look again in a minute"
    )
