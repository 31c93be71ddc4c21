"""Routes for sandboxes: their hosts tell of them through the agent of their node, and users list
them.
"""

from datetime import UTC, datetime

from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.agents import GangQuery, RankQuery, enter_attempt
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG, in_query
from cavvy.api.wire import read
from cavvy.capabilities.functions.frames import clean
from cavvy.capabilities.sandboxes.hosts import TAG
from cavvy.capabilities.sandboxes.rows import SandboxRows, StoredSandbox
from cavvy.capabilities.sandboxes.wire import MOST_REPORT, SandboxesAsk, SandboxView
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS, JobRecord
from cavvy.store.base import ProjectFilter

router = RouteGroup("sandboxes", prefix="/v1/sandboxes")
agent_router = RouteGroup("agent", prefix="/agent/v1/asks/sandboxes")
_MOST_IMAGE = 200  # letters


@agent_router.post("/report", rule=GANG, ask=SandboxesAsk)
async def report(request: Request, gang: GangQuery, rank: RankQuery) -> None:
    """Tell of the sandboxes of the job."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    told = await read(request, SandboxesAsk, MOST_REPORT)
    job = await app_state.store.job(attempt.job_id)
    if TAG not in job.task.tags:
        raise ApiProblem("invalid-request", f"the job {job.id} is no host of sandboxes")
    rows = SandboxRows(*app_state.store.database)
    await rows.put(job.project, job.id, told.sandboxes, app_state.now())


@router.get("", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[SandboxView]:
    """List the sandboxes that run, and those that ended within a day."""
    now = app_state.now()
    found = await SandboxRows(*app_state.store.database).list_all(projects, now)
    jobs = await app_state.store.find_jobs(sorted({each.job for each in found}))
    by_id = {each.id: each for each in jobs}
    return [view(each, by_id.get(each.job), now) for each in found]


def view(stored: StoredSandbox, host: JobRecord | None, now: datetime) -> SandboxView:
    """Return a sandbox as users see it: one whose host is gone has ended."""
    told = stored.report
    until = datetime.fromtimestamp(told.until_s, UTC)
    ended = None if told.ended_s is None else datetime.fromtimestamp(told.ended_s, UTC)
    why = told.why
    if ended is None and (host is None or host.phase in JOB_ENDS):
        lost = now if host is None else host.since
        ended, why = min(lost, until), "lost" if lost < until else "timeout"
    elif ended is None and now > until:
        ended, why = until, "timeout"
    return SandboxView(
        id=f"sb-{stored.job}-{told.name}",
        project=stored.project,
        job=stored.job,
        title=clean(told.title),
        user=clean(told.user) or (host.user if host else ""),
        state="running" if ended is None else "ended",
        why=clean(why),
        began_at=datetime.fromtimestamp(told.began_s, UTC),
        until_at=until,
        ended_at=ended,
        cpu=told.cpu,
        memory_mib=told.memory_mib,
        network=told.network,
        image=_name_image(host),
    )


def _name_image(host: JobRecord | None) -> str:
    """Return the software of a host in a few words, or "" for that of its machine."""
    if host is None:
        return ""
    said = host.task.image or " ".join((host.task.setup or "").split())
    return said if len(said) <= _MOST_IMAGE else f"{said[:_MOST_IMAGE]}…"
