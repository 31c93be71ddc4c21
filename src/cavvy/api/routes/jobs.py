"""Routes to submit, list, inspect, stop, retry and drill jobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Annotated, Any

from fastapi import Header, Path, Query
from msgspec import structs
from pydantic import AwareDatetime, Field
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change, note_reading
from cavvy.api.errors import CODES, ApiProblem
from cavvy.api.routes import views
from cavvy.api.routes.bulk_submission import ReadTask, submit_batch
from cavvy.api.routes.submission import (
    check_graph,
    check_submission,
    count_new,
    move_job,
    rank_placements,
    submit_graph,
    submit_task,
    view_submitted,
)
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import (
    filter_projects,
    in_path,
    in_query,
    name_user,
    principal_of,
    require,
    say_who_stopped,
)
from cavvy.api.wire import PositionQuery, reply, view
from cavvy.catalog.accelerators import names_matching
from cavvy.client import wire
from cavvy.client.paths import PATTERN
from cavvy.control.decide.requests import can_retry
from cavvy.control.fair_queue import QueuePlace
from cavvy.control.job_service import TooLate, UnsupportedTask
from cavvy.control.running_costs import read_unwritten, sum_to_now
from cavvy.costs.metering import total
from cavvy.costs.running import charge_to_now
from cavvy.domain.accounts import Permission
from cavvy.domain.arrays import StoredArray
from cavvy.domain.jobs import JOB_ENDS, Attempt, JobPhase, JobRecord
from cavvy.domain.ledger import EnergyUse
from cavvy.domain.retention import JOBS_SETTING, RemovedJob
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.planner.placements import Placement
from cavvy.spec.problems import nearest
from cavvy.store.base import JobSummary, LedgerFilter, ProjectFilter, RowNotFound, is_visible
from cavvy.store.job_search import JobOrder, JobSearch

_USUAL_PROJECT = "default"  # the project that commands use by default
_LONGEST_WAIT_S = 60.0
_EVENTS_AT_ONCE = 1000
_LONGEST_NOTICE_S = 86400

router = RouteGroup("jobs", prefix="/v1")
ProjectPath = Annotated[str, Path(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
JobPath = Annotated[str, Path(max_length=80, description="The job's name or id.")]
_COMPARED = 100  # the newest jobs whose names are compared with a name that does not exist
_AUDITED = 100  # maximum number of jobs in one audit of a project
PhaseQuery = Annotated[list[JobPhase] | None, Query(description="Only jobs in these phases.")]
CursorQuery = Annotated[
    str | None,
    Query(max_length=200, description="The cursor from the previous page."),
]
ArraysQuery = Annotated[
    bool,
    Query(description="List each array as one row, instead of its jobs; searches: services, too."),
]
LimitQuery = Annotated[int, Query(ge=1, le=500)]
TextQuery = Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$")]
_MOST_SKIPPED = 1_000_000  # jobs before a page
WaitQuery = Annotated[
    float, Query(ge=0, le=_LONGEST_WAIT_S, description="Seconds to wait for new data.")
]
SessionQuery = Annotated[
    bool,
    Query(
        description="If no unfinished job has this name, treat the name as the name of a machine, "
        "and return the newest unfinished session on that machine."
    ),
]
PlacementsQuery = Annotated[
    int, Query(ge=0, le=50, description="How many of the best offers to return.")
]
KeyHeader = Annotated[str | None, Header(alias="Idempotency-Key", pattern=PATTERN)]

SUBMISSION_ERRORS = (
    "invalid-task",
    "task-refused",
    "no-offer",
    "policy-refused",
    "consent-needed",
    "machine-unfit",
    "secret-missing",
    "snapshot-missing",
    "residency",
    "key-reused",
    "too-large",
    "disk-full",
)


@router.post(
    "/projects/{project}/jobs",
    rule=in_path(Permission.RUN),
    answer=wire.Submitted,
    status=201,
    errors=SUBMISSION_ERRORS,
    limit="server.request_mib",
)
async def submit(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    ask: wire.SubmitRequest,
    key: KeyHeader = None,
) -> Response:
    """Submit a task."""
    ask = structs.replace(ask, user=name_user(request, ask.user))

    def announce(job_id: str, task: TaskSpec) -> None:
        _check_step(request, task)
        digest = sha256(ask.text.encode()).hexdigest() if isinstance(ask.text, str) else None
        note_change(request, after={"id": job_id, "name": task.name, "file_sha256": digest})

    job, created = await submit_task(
        app_state, project, ask, key, principal_of(request).account or "", announce
    )
    return reply(view_submitted(job, created=created), 201 if created else 200)


@router.post(
    "/projects/{project}/job-graphs",
    rule=in_path(Permission.RUN),
    answer=list[wire.Submitted],
    status=201,
    errors=SUBMISSION_ERRORS,
    limit="server.request_mib",
)
async def submit_several(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.GraphRequest
) -> Response:
    """Submit several tasks, which may wait for each other, or none of them."""
    tasks = [structs.replace(each, user=name_user(request, each.user)) for each in ask.tasks]
    noted = list[dict[str, str]]()

    def announce(job_id: str, task: TaskSpec) -> None:
        _check_step(request, task)
        noted.append({"id": job_id, "name": task.name})
        note_change(request, after={"jobs": noted})

    ask, account = structs.replace(ask, tasks=tasks), principal_of(request).account or ""
    jobs, created = await submit_graph(app_state, project, ask, account, announce)
    answers = [view_submitted(each, created=created) for each in jobs]
    return reply(answers, 201 if created else 200)


@router.post(
    "/projects/{project}/job-batches",
    rule=in_path(Permission.RUN),
    answer=wire.SubmittedBatch,
    status=201,
    errors=SUBMISSION_ERRORS,
    limit="server.request_mib",
)
async def submit_many(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.BatchRequest
) -> Response:
    """Submit up to 10,000 tasks, in one transaction: all of them, or each that is accepted."""
    tasks = [structs.replace(each, user=name_user(request, each.user)) for each in ask.tasks]

    def permit(task: TaskSpec) -> None:
        _check_step(request, task)

    def announce(read: Sequence[ReadTask]) -> None:
        ends = {"first": read[0].key, "last": read[-1].key}
        note_change(request, after={"jobs": len(read), **ends})

    account = principal_of(request).account or ""
    ask = structs.replace(ask, tasks=tasks)
    batch = await submit_batch(app_state, project, ask, account, permit, announce)
    return reply(batch, 201 if any(job.created for job in batch.jobs) else 200)


def _check_step(request: Request, task: TaskSpec) -> None:
    """Raise ApiProblem if the task deploys to devices and the caller may not do so."""
    if task.edge is not None and task.edge.deploy:
        require(request, Permission.OPERATE, task.project)


@router.post(
    "/projects/{project}/job-check",
    rule=in_path(Permission.RUN),
    errors=(
        "invalid-task",
        "task-refused",
        "no-offer",
        "machine-unfit",
        "secret-missing",
        "too-large",
    ),
    limit="server.request_mib",
)
async def check(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    ask: wire.SubmitRequest,
    placements: PlacementsQuery = 0,
) -> wire.SubmissionCheck:
    """Apply the checks of a submission without a submission. Only the files of the working folder
    are not checked.
    """
    note_reading(request)
    ask = structs.replace(ask, user=name_user(request, ask.user))
    task, price = await check_submission(app_state, project, ask)
    [ranked] = await rank_placements(app_state, [task], placements)
    return _view_check(task, price, ranked)


@router.post(
    "/projects/{project}/job-graph-check",
    rule=in_path(Permission.RUN),
    errors=SUBMISSION_ERRORS,
    limit="server.request_mib",
)
async def check_several(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    ask: wire.GraphRequest,
    placements: PlacementsQuery = 0,
) -> list[wire.SubmissionCheck]:
    """Apply the checks of a submission of several tasks without a submission. The best offers are
    only those of the first 20 tasks.
    """
    note_reading(request)
    tasks = [structs.replace(each, user=name_user(request, each.user)) for each in ask.tasks]
    found = await check_graph(app_state, project, structs.replace(ask, tasks=tasks))
    ranked = await rank_placements(app_state, [each.placed for each in found], placements)
    return [
        _view_check(each.task, each.price, some) for each, some in zip(found, ranked, strict=True)
    ]


def _view_check(task: TaskSpec, price: str, ranked: Sequence[Placement]) -> wire.SubmissionCheck:
    return wire.SubmissionCheck(
        name=task.name,
        consent_needed=price,
        placements=[views.placement_view(each) for each in ranked],
    )


@router.get("/jobs", rule=in_query(Permission.VIEW))
async def list_all(
    request: Request,
    app_state: AppState,
    phase: PhaseQuery = None,
    cursor: CursorQuery = None,
    limit: LimitQuery = 50,
    arrays: ArraysQuery = False,
) -> wire.JobPage:
    """List the jobs of all projects, newest first."""
    projects = filter_projects(request, Permission.VIEW)
    page = await _page(app_state, projects, phase, cursor, limit, arrays=arrays)
    return await _add_places(request, app_state, page)


@router.get("/projects/{project}/jobs", rule=in_path(Permission.VIEW))
async def list_some(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    phase: PhaseQuery = None,
    cursor: CursorQuery = None,
    limit: LimitQuery = 50,
    arrays: ArraysQuery = False,
) -> wire.JobPage:
    """List a project's jobs, newest first."""
    page = await _page(app_state, project, phase, cursor, limit, arrays=arrays)
    return await _add_places(request, app_state, page)


NamedJobsQuery = Annotated[
    list[Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")]] | None,
    Query(max_length=100, description="Only jobs with these names or IDs; by default, all."),
]


@router.get("/job-search", rule=in_query(Permission.VIEW))
async def search(
    request: Request,
    app_state: AppState,
    projects: ProjectFilter,
    phase: PhaseQuery = None,
    user: TextQuery = "",
    text: TextQuery = "",
    job: NamedJobsQuery = None,
    provider: TextQuery = "",
    gpu: TextQuery = "",
    tag: TextQuery = "",
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    sort: JobOrder = JobOrder.SUBMITTED,
    ascending: bool = False,
    offset: Annotated[int, Query(ge=0, le=_MOST_SKIPPED)] = 0,
    limit: LimitQuery = 50,
    arrays: ArraysQuery = False,
) -> wire.JobMatches:
    """Search jobs by user, name, place, accelerator, tag and time; sorted, in pages by number."""
    wanted = JobSearch(
        projects=projects,
        phases=phase or (),
        user=user,
        text=text,
        jobs=job or (),
        provider=provider,
        accelerators=sorted(names_matching(gpu)) if gpu else (),
        tag=tag,
        since=since,
        until=until,
        order=sort,
        ascending=ascending,
        offset=offset,
        limit=limit,
        arrays=arrays,
    )
    found = await app_state.store.search_jobs(wanted, app_state.now())
    rows = [
        views.array_row(found.arrays[row.id])
        if row.id in found.arrays
        else views.service_row(row, found.services[row.id])
        if row.id in found.services
        else row
        for row in await _list_rows(app_state, found.jobs)
    ]
    page = wire.JobPage(jobs=rows, cursor=None)
    page = await _add_places(request, app_state, page)
    return wire.JobMatches(jobs=page.jobs, total=found.total)


async def _page(
    app_state: AppState,
    project: ProjectFilter,
    phases: list[JobPhase] | None,
    cursor: str | None,
    limit: int,
    *,
    arrays: bool,
) -> wire.JobPage:
    page = await app_state.store.list_jobs(project, phases or (), cursor, limit, arrays=arrays)
    rows = await _list_rows(app_state, page.jobs)
    if not arrays:
        return wire.JobPage(jobs=rows, cursor=page.cursor)
    # The IDs of arrays and jobs sort together by the time of submission. Rows below `end` belong to
    # the next page, because only some of the jobs or of the arrays below it were read.
    found = await app_state.store.arrays.list(project, cursor, limit + 1)
    ends = [page.cursor, found[limit - 1].id if len(found) > limit else None]
    end = max((each for each in ends if each is not None), default=None)
    rows += [row for row in map(views.array_row, found) if not phases or row.phase in phases]
    rows = sorted(
        (row for row in rows if end is None or row.id >= end), key=lambda row: row.id, reverse=True
    )
    cut = len(rows) > limit
    return wire.JobPage(jobs=rows[:limit], cursor=rows[limit - 1].id if cut else end)


@router.get(
    "/projects/{project}/jobs/{name}", rule=in_path(Permission.VIEW), errors=("job-not-found",)
)
async def get(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    session: SessionQuery = False,
) -> wire.JobDetail:
    """Get one job with its attempts and nodes."""
    job = await find_job(app_state, project, name, session=session)
    attempts = [
        (attempt, await app_state.store.nodes(attempt.id))
        for attempt in await app_state.store.attempts(job.id)
    ]
    waits = _waits_in_line(job, app_state.now())
    queue = await _find_queue_fields(request, app_state, [job.id] if waits else [])
    charges = await app_state.store.charges(job.id)
    spent = total(charge_to_now([each for each, _ in attempts], charges, app_state.now()))
    energy = await _read_energy(app_state, [attempt for attempt, _ in attempts])
    return views.job_detail(job, attempts, spent, queue.get(job.id, {}), energy)


async def _read_energy(app_state: AppState, attempts: Sequence[Attempt]) -> wire.EnergyView | None:
    joules = await app_state.store.meters.energy_of([each.id for each in attempts])
    return views.energy_view(
        EnergyUse(
            provider=each.offer.provider, region=each.offer.region, joules=joules.get(each.id, 0)
        )
        for each in attempts
    )


@router.get(
    "/projects/{project}/jobs/{name}/events",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found",),
)
async def events(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    after: PositionQuery = 0,
    wait_s: WaitQuery = 0,
) -> wire.EventPage:
    """List a job's events, each with its reason."""
    job = await find_job(app_state, project, name)
    with app_state.watch.listen([job.id], wait_s) as listener:
        found = await app_state.store.events(job.id, after, _EVENTS_AT_ONCE)
        over = job.phase in JOB_ENDS
        while not found and not over and await listener.wait():
            job = await app_state.store.job(job.id)
            found, over = (
                await app_state.store.events(job.id, after, _EVENTS_AT_ONCE),
                job.phase in JOB_ENDS,
            )
    last = found[-1].id if found else after
    return wire.EventPage(
        events=[view(wire.EventView, event) for event in found], last=last, over=over
    )


@router.get(
    "/projects/{project}/jobs/{name}/cost",
    rule=in_path(Permission.SPENDING),
    errors=("job-not-found",),
)
async def cost(app_state: AppState, project: ProjectPath, name: JobPath) -> wire.CostView:
    """Get a job's cost and its time by phase."""
    job = await find_job(app_state, project, name)
    attempts = await app_state.store.attempts(job.id)
    now = app_state.now()
    charges = charge_to_now(attempts, await app_state.store.charges(job.id), now)
    nodes = [node for each in attempts for node in await app_state.store.nodes(each.id)]
    energy = await _read_energy(app_state, attempts)
    return views.cost_view(job, attempts, nodes, charges, now, energy)


@router.get(
    "/projects/{project}/audit", rule=in_path(Permission.SPENDING), errors=("job-not-found",)
)
async def audit(
    app_state: AppState,
    project: ProjectPath,
    job: Annotated[str | None, Query(max_length=80)] = None,
) -> wire.AuditReport:
    """Compare the bills of one job, or of the newest jobs, with the providers' own records."""
    if job is None:
        page = await app_state.store.list_jobs(project, limit=_AUDITED)
        names = {summary.id: summary.name for summary in page.jobs}
    else:
        found = await find_job(app_state, project, job)
        names = {found.id: found.name}
    bills, silent = await app_state.control_plane.audit.audit(list(names))
    rows = [views.audit_row(names[each.attempt.job_id], each) for each in bills]
    return wire.AuditReport(bills=rows, problems=[str(each) for each in silent])


@router.get("/projects/{project}/cost", rule=in_path(Permission.SPENDING))
async def project_cost(
    app_state: AppState, project: ProjectPath, since: AwareDatetime | None = None
) -> wire.ProjectCost:
    """Get a project's spending."""
    which = LedgerFilter(projects=project, since=since)
    sums = await sum_to_now(app_state.store, which, (), app_state.now())
    spent = sums[0].amount.micros if sums else 0
    return wire.ProjectCost(project=project, since=since, total_micros=spent)


@router.post(
    "/projects/{project}/jobs/{name}/stop", rule=in_path(Permission.RUN), errors=("job-not-found",)
)
async def stop(
    request: Request, app_state: AppState, project: ProjectPath, name: JobPath, ask: wire.StopAsk
) -> wire.JobListing:
    """Stop a job."""
    reason = ask.reason or say_who_stopped(request)
    return await _row(app_state, await app_state.control_plane.jobs.stop(project, name, reason))


@router.delete(
    "/projects/{project}/jobs/{name}",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "job-not-ended", "conflict"),
)
async def remove(app_state: AppState, project: ProjectPath, name: JobPath) -> wire.JobRemoved:
    """Delete an ended job with its events, log and checkpoints; its bill stays."""
    try:
        job, removed = await app_state.control_plane.jobs.remove(project, name)
    except RowNotFound:
        raise await _missing(app_state, project, name) from None
    except TooLate as error:
        job = await app_state.store.find_job(project, name)
        hint = f"stop the job with `cavvy stop {named(job)}`, then remove the job"
        raise ApiProblem("job-not-ended", str(error), hint) from error
    return wire.JobRemoved(freed_bytes=removed.bytes, kept=removed.kept)


@router.post(
    "/projects/{project}/jobs/{name}/retry",
    rule=in_path(Permission.RUN),
    errors=(
        "job-not-found",
        "job-not-ended",
        "job-done",
        "conflict",
        "project-archived",
        "policy-refused",
        "invalid-task",
        "no-offer",
        "machine-unfit",
        "consent-needed",
    ),
)
async def retry(
    request: Request, app_state: AppState, project: ProjectPath, name: JobPath, ask: wire.RetryAsk
) -> wire.JobListing:
    """Queue an ended job again."""
    await app_state.store.archive.check(project)
    jobs, account = app_state.control_plane.jobs, principal_of(request).account or ""
    found = await find_job(app_state, project, name)  # says why a removed job is gone
    _check_step(request, found.task)
    new = 1 if can_retry(found) else 0
    policies = await app_state.store.policies_of(project)
    try:
        async with count_new(app_state, policies, found.user, new, what="retry"):
            moved = await move_job(app_state, found, ask) if new else None
            return await _row(
                app_state, await jobs.retry(project, name, account, moved, ask.checkpoint)
            )
    except TooLate as error:
        job = await app_state.store.find_job(project, name)
        if job.removing:
            hint = f"`cavvy rm {named(job)}` completes the removal"
            raise ApiProblem("conflict", str(error), hint) from error
        if job.phase is JobPhase.DONE:
            hint = f"run the job again as a new job with `cavvy rerun {named(job)}`"
            raise ApiProblem("job-done", str(error), hint) from error
        if job.after or can_retry(job):
            raise ApiProblem("conflict", str(error), error.hint) from error
        hint = f"wait for the job, or stop it with `cavvy stop {named(job)}`"
        raise ApiProblem("job-not-ended", str(error), hint) from error


@router.post(
    "/projects/{project}/jobs/{name}/drill/preempt",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "job-not-running"),
)
async def drill(
    app_state: AppState, project: ProjectPath, name: JobPath, ask: wire.DrillAsk
) -> wire.JobListing:
    """Reclaim the job's nodes, or one of them, as a provider would."""
    if not 0 <= ask.notice_s <= _LONGEST_NOTICE_S:
        raise ApiProblem(
            "invalid-request",
            f"`notice_s` must be from 0 to {_LONGEST_NOTICE_S}, not {ask.notice_s}",
        )
    try:
        await app_state.control_plane.jobs.drill_preempt(
            project, name, timedelta(seconds=ask.notice_s), ask.rank
        )
    except TooLate as error:
        raise ApiProblem(
            "job-not-running", str(error), say_what_to_do(await find_job(app_state, project, name))
        ) from error
    return await _row(app_state, await find_job(app_state, project, name))


@router.post(
    "/projects/{project}/jobs/{name}/resize",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "invalid-request", "conflict"),
)
async def resize(
    app_state: AppState, project: ProjectPath, name: JobPath, ask: wire.ResizeAsk
) -> wire.JobListing:
    """Let an elastic job have at most this many nodes."""
    await find_job(app_state, project, name)  # says why a removed job is gone
    try:
        return await _row(
            app_state, await app_state.control_plane.jobs.resize(project, name, ask.nodes)
        )
    except UnsupportedTask as error:
        raise ApiProblem("invalid-request", str(error), error.hint) from error
    except TooLate as error:
        raise ApiProblem("conflict", str(error), error.hint) from error


async def find_job(
    app_state: AppState, project: str, name: str, *, session: bool = False
) -> JobRecord:
    """Return a job by its name or ID. With `session`, `JobService.find_session` resolves the name.
    Raises ApiProblem.
    """
    jobs = app_state.control_plane.jobs
    try:
        return await (jobs.find_session if session else app_state.store.find_job)(project, name)
    except RowNotFound:
        raise await _missing(app_state, project, name) from None


async def _missing(app_state: AppState, project: str, name: str) -> ApiProblem:
    """Return the problem for a job that does not exist. If the job was removed because of its age,
    the problem says so. If the project has a service of this name or a job with a similar name, the
    hint names it.
    """
    gone = await app_state.store.retention.find_removed(project, name)
    if gone is not None:
        return _describe_removed(gone)
    page = await app_state.store.list_jobs(project, limit=_COMPARED)
    services = await app_state.control_plane.list_services(project)
    if any(each.task.name == name for each in services):
        place = "" if project == _USUAL_PROJECT else f" -p {project}"
        replica = next((each.name for each in page.jobs if each.name.startswith(f"{name}.")), "")
        hint = f"{name} is a service, which `cavvy status {name}{place}` shows"
        hint += f"; its newest replica is the job {replica}" if replica else ""
        return ApiProblem("job-not-found", f"project {project} has no job {name}", hint)
    with suppress(RowNotFound):
        array = await app_state.store.arrays.find(project, name)
        place = "" if project == _USUAL_PROJECT else f" -p {project}"
        hint = f"{name} is an array, whose jobs `cavvy ps {array.name}{place}` lists"
        return ApiProblem("job-not-found", f"project {project} has no job {name}", hint)
    close = nearest(name, (each.name for each in reversed(page.jobs)))
    hint = f"did you mean {close}? {CODES['job-not-found'].hint}" if close else ""
    return ApiProblem("job-not-found", f"project {project} has no job {name}", hint)


def _describe_removed(gone: RemovedJob) -> ApiProblem:
    where = f"setting {gone.rule}" if gone.rule == JOBS_SETTING else gone.rule
    place = "" if gone.project == _USUAL_PROJECT else f" -p {gone.project}"
    return ApiProblem(
        "job-not-found",
        f"job {gone.name} of project {gone.project} ended on {gone.ended_at:%Y-%m-%d} and was "
        f"removed on {gone.removed_at:%Y-%m-%d}, with its task, events, log and checkpoints: ended "
        f"jobs are kept for {gone.days} days ({where})",
        f"`cavvy cost --by job{place}` still shows its cost",
    )


def named(job: JobRecord | StoredArray) -> str:
    """Return the job's name as users must write it in commands. Used in hints."""
    return job.name if job.project == _USUAL_PROJECT else f"{job.name} -p {job.project}"


def say_what_to_do(job: JobRecord) -> str:
    """Return a hint for a user who tried to connect to a node of a job without active nodes."""
    if job.phase in JOB_ENDS and job.task.machine is not None:
        return f"`cavvy dev --machine {job.task.machine}` opens a session on the job's machine"
    if job.phase in JOB_ENDS:
        saved = f"`cavvy cp --checkpoint {named(job)} FOLDER` copies its newest checkpoint; "
        return (
            f"`cavvy logs {named(job)}` shows the job's output; "
            + (saved if job.task.checkpoint is not None else "")
            + f"`cavvy rerun {named(job)}` runs the job again"
        )
    return f"`cavvy status {named(job)}` shows the job's nodes, and what the job waits for"


async def _add_places(request: Request, app_state: AppState, page: wire.JobPage) -> wire.JobPage:
    """Return the page with the places of its waiting jobs in the queue. An array has the place of
    its next job.
    """
    waiting = [
        row.id
        for row in page.jobs
        if row.phase == JobPhase.QUEUED and not (row.held or row.members or row.machine is not None)
    ]
    arrays = {row.id for row in page.jobs if JobPhase.QUEUED in row.members}
    firsts = await app_state.control_plane.fair_queue.find_next(arrays, app_state.now())
    found = await _find_queue_fields(request, app_state, [*waiting, *firsts.values()])
    rows = [structs.replace(row, **found.get(firsts.get(row.id, row.id), {})) for row in page.jobs]
    return wire.JobPage(jobs=rows, cursor=page.cursor) if found else page


async def _find_queue_fields(
    request: Request, app_state: AppState, job_ids: Sequence[str]
) -> Mapping[str, Mapping[str, Any]]:
    """Return for each job in the queue its position, how many jobs of each project are before it,
    and when it probably starts. Jobs of projects that the caller may not see count under the name
    "".
    """
    if not job_ids:
        return {}
    control_plane, now = app_state.control_plane, app_state.now()
    places = await control_plane.fair_queue.find_places(job_ids, now)
    starts = await control_plane.start_estimator.estimate([*places], now) if places else {}
    visible = filter_projects(request, Permission.VIEW)

    def show_ahead(place: QueuePlace) -> Mapping[str, int]:
        if visible is None:
            return place.ahead
        shown: Counter[str] = Counter()
        for project, count in place.ahead.items():
            shown[project if is_visible(project, visible) else ""] += count
        return dict(sorted(shown.items()))

    return {
        job_id: {
            "queue_position": place.position,
            "queue_ahead": show_ahead(place),
            "estimated_start": view(wire.EstimatedStart, starts[job_id])
            if job_id in starts
            else None,
        }
        for job_id, place in places.items()
    }


def _waits_in_line(job: JobRecord, now: datetime) -> bool:
    """Return whether the job has a position in the queue. A job has no position while it waits for
    its schedule, its time window or the end of a delay.
    """
    early = job.held_until is not None or (job.not_before is not None and job.not_before > now)
    elsewhere = job.task.machine is not None or job.task.pool is not None
    return job.phase is JobPhase.QUEUED and not elsewhere and not early


async def _list_rows(app_state: AppState, jobs: Sequence[JobSummary]) -> list[wire.JobListing]:
    """Return the jobs with what they have spent by now."""
    live = {job.project for job in jobs if job.attempt and job.phase not in JOB_ENDS}
    more = await read_unwritten(app_state.store, list(live), app_state.now())
    spent = [job.spent + more.get(job.id, Money()) for job in jobs]
    return [views.job_row(replace(job, spent=each)) for job, each in zip(jobs, spent, strict=True)]


async def _row(app_state: AppState, job: JobRecord) -> wire.JobListing:
    attempts = await app_state.store.attempts(job.id)
    charges = await app_state.store.charges(job.id)
    spent = total(charge_to_now(attempts, charges, app_state.now()))
    return views.changed_row(job, attempts, spent)
