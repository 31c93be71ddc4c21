"""Routes for all nodes that are running or billed now: list them, stop all jobs, and remove nodes
that belong to no job. Also the accounts' quotas at the enabled providers, and the queue by project:
shares, use, quotas and loans, and what waits.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Query
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_project, note_reading
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import views
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_body, in_query, on_installation, require
from cavvy.api.wire import view
from cavvy.client import queue_wire, wire
from cavvy.control.agents.uploads import LeftUpload
from cavvy.control.decide.restored import OrphanGang
from cavvy.control.garbage_collector import OrphanReport
from cavvy.control.own_reconcilers import take_all
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase
from cavvy.domain.machines import MachineStatus
from cavvy.domain.node_pools import NodePool
from cavvy.domain.offers import Quota
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.shares import DOLLARS
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderError
from cavvy.scheduler.reclaim import QuotaLoan, list_loans
from cavvy.scheduler.shares import ProjectStanding
from cavvy.store.base import JobSummary, ProjectFilter, RowNotFound, is_visible

_LIVE = tuple(phase for phase in JobPhase if phase not in JOB_ENDS)

router = RouteGroup("fleet", prefix="/v1")


@router.get("/nodes", rule=in_query(Permission.VIEW))
async def nodes(app_state: AppState, projects: ProjectFilter) -> list[wire.NodeListing]:
    """List the nodes that run or are billed now."""
    allocations = {
        (allocation.gang, allocation.rank): allocation
        for allocation in await app_state.store.allocations()
    }
    rows = []
    for attempt in await app_state.store.open_attempts(projects):
        try:
            job = await app_state.store.job(attempt.job_id)
        except RowNotFound:
            continue
        for node in await app_state.store.nodes(attempt.id):
            rows.append(
                views.node_row(job, attempt, node, allocations.get((attempt.gang, node.rank)))
            )
    return rows


@router.post("/down", rule=in_body(Permission.OPERATE))
async def down(request: Request, app_state: AppState, ask: wire.DownAsk) -> wire.CleanupReport:
    """Stop all unfinished jobs and remove their nodes."""
    require(request, Permission.OPERATE, ask.project or INSTALLATION)
    note_project(request, ask.project)
    note_reading(request, ask.dry_run)
    jobs = await list_unfinished(app_state, ask.project)
    idle = await _idle(app_state, ask.project)
    pools = [each.pool for each in await app_state.control_plane.node_pools.list(ask.project)]
    sweep = OrphanReport()
    if ask.dry_run:
        sweep = (
            OrphanReport()
            if ask.project
            else await app_state.control_plane.garbage_collector.living()
        )
        shown = {job.id for job in jobs} | {each.machine.job_id for each in idle}
        sweep = replace(
            sweep, orphans=[_over(orphan) for orphan in sweep.orphans if orphan.job_id not in shown]
        )
    elif ask.project is None:
        sweep = await app_state.control_plane.down()
    else:
        await empty_project(app_state, ask.project, jobs)
    found = _stopped(jobs, idle, pools, done=not ask.dry_run)
    return wire.CleanupReport(found=found + _gangs(sweep))


async def empty_project(app_state: AppState, project: str, jobs: Sequence[JobSummary]) -> None:
    """End the services of a project, stop its pools and jobs, and release all its nodes. Each is
    done also if one before it fails; then raises the first error.
    """
    control_plane, stop = app_state.control_plane, app_state.control_plane.jobs.stop

    async def stop_jobs() -> None:
        reason = f"project {project} is being removed"
        await control_plane.jobs.stop_waiting([job.id for job in jobs], reason)
        left = await list_unfinished(app_state, project)
        await take_all(*(partial(stop, job.project, job.id, reason, release=True) for job in left))

    async def release() -> None:
        found = await app_state.store.open_attempts(project)
        kept = [each for each in found if each.phase in (AttemptPhase.KEPT, AttemptPhase.ENDING)]
        await take_all(*(partial(stop, each.project, each.job_id, release=True) for each in kept))

    await take_all(
        partial(control_plane.own.end_all, project),
        partial(control_plane.node_pools.stop_all, project),
        stop_jobs,
        release,
    )


@router.post("/gc", rule=on_installation(Permission.OPERATE))
async def gc(request: Request, app_state: AppState, ask: wire.GcAsk) -> wire.CleanupReport:
    """Find nodes of this installation that belong to no unfinished job, and unfinished uploads of
    attempts that have ended. Without `dry_run`, also remove these nodes and uploads.
    """
    note_reading(request, ask.dry_run)
    return wire.CleanupReport(
        found=_gangs(await app_state.control_plane.garbage_collector.sweep(remove=not ask.dry_run))
    )


async def _idle(app_state: AppState, project: str | None) -> Sequence[MachineStatus]:
    """Return the machines that have nodes but no job."""
    found = await app_state.control_plane.machines.list(project)
    return [each for each in found if each.state == "idle" and each.gang is not None]


def _stopped(
    jobs: Sequence[JobSummary],
    idle: Sequence[MachineStatus],
    pools: Sequence[NodePool],
    *,
    done: bool,
) -> list[wire.CleanupItem]:
    found: list[tuple[str, str, str, str]] = [
        ("job", job.name, job.place or f"project {job.project}", job.phase) for job in jobs
    ]
    starts_nodes = "starts nodes for waiting jobs until it is stopped"
    found += [
        ("pool", pool.name, f"project {pool.project}", starts_nodes)
        for pool in pools
        if not pool.stopped
    ]
    return [
        wire.CleanupItem(kind=kind, name=name, where=where, why=why, done=done)
        for kind, name, where, why in [
            *found,
            *(
                ("machine", each.machine.name, each.gang.offer.key, each.state)
                for each in idle
                if each.gang
            ),
        ]
    ]


async def list_unfinished(app_state: AppState, project: str | None) -> Sequence[JobSummary]:
    jobs: list[JobSummary] = []
    cursor = None
    while True:
        page = await app_state.store.list_jobs(project, _LIVE, cursor, 500)
        jobs += page.jobs
        if (cursor := page.cursor) is None:
            return jobs


def _gangs(sweep: OrphanReport) -> list[wire.CleanupItem]:
    """Return the gangs and uploads that were found, and the providers that did not answer."""
    found = [
        wire.CleanupItem(
            kind="gang",
            name=orphan.gang,
            where=orphan.provider,
            why=_why(orphan),
            done=orphan.removed,
        )
        for orphan in sweep.orphans
    ]
    providers = [
        wire.CleanupItem(
            kind="provider", name=silent.provider, where="", why=str(silent), done=False
        )
        for silent in sweep.problems
    ]
    return found + [_upload(each) for each in sweep.uploads] + providers


def _upload(left: LeftUpload) -> wire.CleanupItem:
    found = urlsplit(left.upload.url)
    why = "an unfinished upload of an attempt that has ended; the storage bills its parts"
    return wire.CleanupItem(
        kind="upload",
        name=left.upload.key or "unknown",
        where=f"{found.scheme}://{found.netloc}" if found.scheme else "",
        why=f"{why}; not aborted: {left.problem}" if left.problem else why,
        done=left.aborted,
    )


def _over(orphan: OrphanGang) -> OrphanGang:
    """Return the description of the gang for the API's answer. If the gang's job has ended, the
    description says that the gang is being removed; the gang is billed until its removal is
    complete.
    """
    return (
        orphan
        if orphan.job_id is None
        else replace(orphan, why="the gang's job has ended; the gang is being removed", sure=True)
    )


def _why(orphan: OrphanGang) -> str:
    if orphan.problem:
        return f"{orphan.why}; not removed: {orphan.problem}"
    return (
        orphan.why
        if orphan.sure or orphan.removed
        else f"{orphan.why}; check again in a minute to be sure"
    )


@router.get("/quotas", rule=on_installation(Permission.VIEW))
async def quotas(
    app_state: AppState, provider: Annotated[str | None, Query(max_length=63)] = None
) -> wire.QuotaReport:
    """List the account's quotas at the providers."""
    pool = app_state.control_plane.pool
    names = sorted(pool.providers) if provider is None else [provider]
    if provider is not None and provider not in pool.providers:
        enabled = ", ".join(sorted(pool.providers))
        raise ApiProblem(
            "provider-not-enabled",
            f"the provider {provider!r} is not enabled; enabled: {enabled}",
            f"`cavvy setup {provider}` sets it up",
        )
    answers = await asyncio.gather(*(_ask(pool, name) for name in names))
    told = dict(zip(names, answers, strict=True))
    rows = [view(wire.QuotaRow, quota) for quotas, _ in answers for quota in quotas]
    untold = [
        wire.UntoldQuotas(provider=name, reason=reason)
        for name, (_, reasons) in told.items()
        for reason in reasons
    ]
    return wire.QuotaReport(quotas=rows, untold=untold)


async def _ask(pool: ProviderPool, name: str) -> tuple[Sequence[Quota], Sequence[str]]:
    """Return the provider's quotas, and the reasons why some quotas are not known."""
    try:
        found = await pool.quotas(name)
    except ProviderError as error:
        return (), [str(error)]
    if found is None:
        reason = pool.providers[name].manifest.no_quotas
        return (), [reason or "Cavvy does not read quotas of this provider"]
    return found, pool.untold_quotas(name)


share_router = RouteGroup("jobs", "/v1")


@share_router.get("/shares", rule=in_query(Permission.VIEW))
async def list_shares(app_state: AppState, projects: ProjectFilter) -> queue_wire.ShareReport:
    """Show the share of each project in the queue, what it has used, what it holds and waits for
    now, and who has borrowed its quota.
    """
    queue = app_state.control_plane.fair_queue
    standings, book = await queue.list_standings(app_state.now())
    policies = {each.project: each.policy for each in await app_state.store.policies()}
    loans = list_loans(book)
    shown = [
        _share(
            each,
            policies.get(each.project, ProjectPolicy()),
            loans,
            parent=book.parents.get(each.project),
            visible=projects,
        )
        for each in standings
        if is_visible(each.project, projects)
    ]
    return queue_wire.ShareReport(
        half_life_days=queue.half_life / timedelta(days=1), projects=shown
    )


def _share(
    standing: ProjectStanding,
    policy: ProjectPolicy,
    loans: Sequence[QuotaLoan],
    *,
    parent: str | None,
    visible: ProjectFilter,
) -> queue_wire.ShareView:
    name = standing.project
    return view(
        queue_wire.ShareView,
        standing,
        parent=parent if parent and is_visible(parent, visible) else None,
        used_gpu_hours=standing.used_h,
        debt_gpu_hours=standing.debt_h,
        accelerators=dict(standing.accelerators),
        micros_per_hour=round(standing.micros_per_hour),
        gpus=standing.held,
        waiting_gpus=standing.waiting,
        quota_gpus=policy.quota_gpus,
        max_gpus=policy.max_gpus,
        quota_accelerators=dict(policy.quota_accelerators),
        max_accelerators=dict(policy.max_accelerators),
        quota_micros_per_hour=policy.quota_micros_per_hour,
        max_micros_per_hour=policy.max_micros_per_hour,
        lent=[_loan(each, each.borrower) for each in loans if each.lender == name],
        borrowed=[_loan(each, each.lender) for each in loans if each.borrower == name],
    )


def _loan(loan: QuotaLoan, other: str) -> queue_wire.LoanView:
    in_dollars = loan.name == DOLLARS
    return queue_wire.LoanView(
        project=other,
        accelerator=None if in_dollars else loan.name or None,
        gpus=0.0 if in_dollars else loan.amount,
        micros_per_hour=round(loan.amount) if in_dollars else 0,
    )
