"""What was seen of markets, and what the rest of a job may cost."""

from asyncio import to_thread

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.house import house_of
from cavvy.api.openapi import document
from cavvy.api.routes import views
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.wire import reply
from cavvy.client import wire
from cavvy.domain.jobs import JOB_ENDS
from cavvy.planner.deadline.forecast import foresee

_MARKETS = 500  # of which single sights are told
_RUNS = 60  # made-up courses of one answer

router = APIRouter(prefix="/v1", tags=["markets"])


@router.get(
    "/markets",
    **document("What was seen of each offer that was ever used.", answer=list[wire.MarketRow]),
)
async def markets(request: Request) -> Response:
    book = house_of(request).plant.guide.book
    knowledge = await book.knowledge(list(await book.standings())[:_MARKETS])
    found = sorted(knowledge.standings.items())
    return reply([views.market_row(known, knowledge.recent.get(key, ())) for key, known in found])


@router.get(
    "/projects/{project}/jobs/{name}/outlook",
    **document(
        "What the rest of a job with a deadline may cost, and the chance that it ends in time.",
        answer=wire.OutlookView,
        errors=("job-not-found",),
    ),
)
async def outlook(request: Request, project: ProjectPath, name: JobPath) -> Response:
    house = house_of(request)
    job = await find_job(house, project, name)
    if job.phase in JOB_ENDS:
        return reply(wire.OutlookView(runs=0, reason="the job has ended"))
    found = await house.plant.guide.ground(job)
    if found is None:
        why = "only for jobs with resources.spot: auto, a deadline, and work or limits.duration"
        return reply(wire.OutlookView(runs=0, reason=why))
    inputs, knowledge, progress = found
    now_s = (house.now() - job.submitted_at).total_seconds()
    made = await to_thread(foresee, inputs, knowledge, progress, now_s, "auto", runs=_RUNS)
    return reply(views.outlook_view(made))
