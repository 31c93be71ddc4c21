"""Routes for market observations, and for forecasts of a job's remaining cost."""

from asyncio import to_thread

from cavvy.api.app_state import AppState
from cavvy.api.routes import views
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, on_installation
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS
from cavvy.planner.deadline.forecast import foresee

_MARKETS = 500  # maximum number of markets for which single observations are listed
_RUNS = 60  # number of simulated runs for each answer

router = RouteGroup("markets", prefix="/v1")


@router.get("/markets", rule=on_installation(Permission.VIEW))
async def markets(app_state: AppState) -> list[wire.MarketListing]:
    """List the observations about each offer that was ever used."""
    history = app_state.control_plane.advisor.history
    knowledge = await history.knowledge(list(await history.standings())[:_MARKETS])
    found = sorted(knowledge.standings.items())
    return [views.market_row(known, knowledge.recent.get(key, ())) for key, known in found]


@router.get(
    "/projects/{project}/jobs/{name}/forecast",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found",),
)
async def forecast(app_state: AppState, project: ProjectPath, name: JobPath) -> wire.ForecastView:
    """Get the forecast remaining cost of a job with a deadline, and the probability that the job
    ends in time.
    """
    job = await find_job(app_state, project, name)
    if job.phase in JOB_ENDS:
        return wire.ForecastView(runs=0, reason="the job has ended")
    found = await app_state.control_plane.advisor.policy_inputs(job)
    if found is None:
        why = "the job needs resources.spot: auto, a deadline, and work or limits.duration"
        return wire.ForecastView(runs=0, reason=why)
    inputs, knowledge, progress = found
    now_s = (app_state.now() - job.submitted_at).total_seconds()
    made = await to_thread(foresee, inputs, knowledge, progress, now_s, "auto", runs=_RUNS)
    return views.forecast_view(made)
