"""Routes for the server itself: its health, its properties, its shutdown, its audit log, and the
route that Prometheus scrapes: what the server knows, as figures of this moment.

All servers of one database export the same figures, apart from the calls of providers and the
process's own figures. The names are listed in docs/reference/metrics.md. No route changes or
removes records of the audit log.
"""

import asyncio
import os
from asyncio import to_thread
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime
from starlette.requests import Request
from starlette.responses import Response

from cavvy import __version__
from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN, SIGNED_IN, filter_projects, in_query, on_installation
from cavvy.api.wire import PositionQuery, view
from cavvy.client import API, REVISION, account_wire, wire
from cavvy.client.file_limit import describe_open_files
from cavvy.client.state import host_name
from cavvy.control.attempt_counts import AttemptCounts
from cavvy.control.budgets import read_parents, sum_budget
from cavvy.control.retention import read_begin
from cavvy.control.running_costs import list_open
from cavvy.costs.energy import weigh_energy
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.audit import AuditOutcome
from cavvy.domain.authorization import Principal, Verdict, decide, list_visible
from cavvy.domain.figures import list_gpus
from cavvy.domain.jobs import JOB_ENDS, Attempt, JobPhase, Node
from cavvy.domain.ledger import month_of
from cavvy.domain.retention import AUDIT_SETTING, JOBS_SETTING
from cavvy.domain.units import MICROS_PER_USD
from cavvy.frame.faults import list_faults
from cavvy.store.base import LedgerFilter, ProjectFilter, is_visible
from cavvy.store.reserve import free_space
from cavvy.telemetry import Figures, MetricsMissing, load_client, write_metrics

router = RouteGroup("server")
_NAMES_SPARE = 10_000  # names of jobs that have ended, and are kept for now

AGENT_PROTOCOLS = (1,)
# bytes; with less free space on its disk, the server cannot store a part of a log and its row
_LEAST_SPACE = 256 * 1024


@router.get("/metrics", rule=in_query(Permission.SPENDING), gives=True, errors=("extra-missing",))
async def metrics(request: Request, app_state: AppState, projects: ProjectFilter) -> Response:
    """The server's figures in Prometheus' text format. Without a project, figures of all projects
    whose costs the caller may see.
    """
    try:
        load_client()
    except MetricsMissing as error:
        raise ApiProblem("extra-missing", str(error), error.hint) from error
    figures = Figures()
    await _add_jobs(figures, app_state, projects)
    await _add_gangs(figures, app_state, projects)
    await _add_money(figures, app_state, projects)
    _add_attempts(figures, app_state.control_plane.attempt_counts, projects)
    await app_state.control_plane.own.add_figures(figures, projects)
    if projects is None:
        _add_calls(figures, app_state.control_plane.pool.calls)
    accept = request.headers.get("accept", "")
    body, kind = await to_thread(write_metrics, figures, accept, process=projects is None)
    return Response(body, media_type=kind)


async def _add_jobs(figures: Figures, app_state: AppState, projects: ProjectFilter) -> None:
    now = app_state.now()
    counts = await app_state.control_plane.job_counts.count(now)
    for count in (each for each in counts if is_visible(each.project, projects)):
        figures.add(
            "cavvy_jobs",
            "Jobs by phase. Ended jobs count until they are removed.",
            count.jobs,
            project=count.project,
            phase=count.phase,
        )
        if count.phase is JobPhase.QUEUED and count.since is not None:
            figures.add(
                "cavvy_queue_oldest_seconds",
                "For how long the oldest waiting job has waited.",
                (now - count.since).total_seconds(),
                project=count.project,
            )


def _add_attempts(figures: Figures, counts: AttemptCounts, projects: ProjectFilter) -> None:
    for project, waits in counts.waits.items():
        if is_visible(project, projects):
            figures.set_histogram(
                "cavvy_job_wait_seconds",
                "How long jobs waited for their first nodes.",
                waits.counts,
                waits.total_s,
                project=project,
            )
    for (project, provider), starts in counts.starts.items():
        if is_visible(project, projects):
            figures.set_histogram(
                "cavvy_attempt_start_seconds",
                "From an attempt's placement to the start of its work.",
                starts.counts,
                starts.total_s,
                project=project,
                provider=provider,
            )
    for (project, provider, outcome), count in counts.ends.items():
        if is_visible(project, projects):
            figures.add(
                "cavvy_attempts_ended",
                "Attempts that have ended.",
                count,
                kind="counter",
                project=project,
                provider=provider,
                outcome=outcome,
            )


async def _add_gangs(figures: Figures, app_state: AppState, projects: ProjectFilter) -> None:
    store = app_state.store
    attempts = {each.id: each for each in await store.open_attempts(projects)}
    for attempt in attempts.values():
        offer = attempt.offer
        place = {"project": attempt.project, "provider": offer.provider}
        figures.add("cavvy_gangs", "Gangs by phase.", 1, **place, phase=attempt.phase)
        figures.add(
            "cavvy_nodes", "Nodes of gangs.", attempt.nodes, **place, purchase=offer.purchase
        )
        figures.add(
            "cavvy_accelerators",
            "Accelerators of gangs; a part of one counts as that part.",
            attempt.nodes * offer.accelerator_count * offer.accelerator_part,
            **place,
            accelerator=offer.accelerator or "",
        )
        figures.add(
            "cavvy_spend_rate_dollars_per_hour",
            "The prices of all gangs.",
            attempt.nodes * offer.rate.micros_per_hour / MICROS_PER_USD,
            **place,
        )
    names = await _read_names(app_state, {each.job_id for each in attempts.values()})
    for node in await store.open_nodes(projects):
        if known := attempts.get(node.attempt_id):
            _add_node(figures, known, node, names.get(known.job_id, ""))


async def _read_names(app_state: AppState, wanted: set[str]) -> Mapping[str, str]:
    """Return the names of jobs by their ids. Names never change, so they are read once."""
    known = app_state.job_names
    if new := [each for each in wanted if each not in known]:
        known.update({job.id: job.name for job in await app_state.store.find_jobs(new)})
    if len(known) > 2 * len(wanted) + _NAMES_SPARE:
        for gone in known.keys() - wanted:
            del known[gone]
    return known


def _add_node(figures: Figures, attempt: Attempt, node: Node, job: str) -> None:
    labels = {"project": attempt.project, "job_name": job, "rank": str(node.rank)}
    told = node.telemetry
    for name, text, key in (
        ("cavvy_node_cpu_percent", "CPU use in percent of one CPU.", "cpu_percent"),
        ("cavvy_node_memory_mib", "Memory that the work uses.", "memory_mib"),
        ("cavvy_node_disk_read_mib_per_second", "What the work reads.", "disk_read_mib_s"),
        ("cavvy_node_disk_write_mib_per_second", "What the work writes.", "disk_write_mib_s"),
        ("cavvy_node_network_in_mib_per_second", "What the node receives.", "net_in_mib_s"),
        ("cavvy_node_network_out_mib_per_second", "What the node sends.", "net_out_mib_s"),
    ):
        if (value := told.get(key)) is not None:
            figures.add(name, text, value, **labels)
    model = {**labels, "modelName": attempt.offer.accelerator or ""}
    # older agents report only the mean use and the sums of several GPUs
    whole = "" if attempt.offer.accelerator_count > 1 else "0"
    gpus = {str(number): each for number, each in enumerate(list_gpus(told))} or {whole: told}
    for number, each in gpus.items():
        for name, text, key in (
            ("DCGM_FI_DEV_GPU_UTIL", "GPU use in percent.", "gpu_percent"),
            ("DCGM_FI_DEV_FB_USED", "GPU memory in use, in MiB.", "gpu_memory_mib"),
            ("DCGM_FI_DEV_POWER_USAGE", "Power of the GPU in watts.", "gpu_power_w"),
        ):
            if (value := each.get(key)) is not None:
                figures.add(name, text, value, gpu=number, **model)


async def _sum_running(app_state: AppState, projects: ProjectFilter) -> dict[tuple[str, str], int]:
    """Return the micro-dollars of running nodes that the ledger does not have yet, by project and
    provider."""
    found, now = defaultdict[tuple[str, str], int](int), app_state.now()
    attempts = await app_state.store.open_attempts(projects)
    for cost in await list_open(app_state.store, attempts, now):
        place = cost.attempt.project, cost.attempt.offer.provider
        found[place] += cost.over(None, None).micros
    return found


async def _add_money(figures: Figures, app_state: AppState, projects: ProjectFilter) -> None:
    store, which = app_state.store, LedgerFilter(projects=projects)
    sums = await _sum_running(app_state, projects)
    for row in await store.sum_ledger(which, ("project", "provider")):
        sums[row.groups["project"], row.groups["provider"]] += row.amount.micros
    for (project, provider), micros in sums.items():
        figures.add(
            "cavvy_spent_dollars",
            "The sum of the ledger, and what running nodes cost since. Corrections may lower it.",
            micros / MICROS_PER_USD,
            project=project,
            provider=provider,
        )
    energies = await store.meters.sum_energy(which, ("project", "provider"))
    for (project, provider), measured in energies.items():
        energy, labels = weigh_energy(measured), {"project": project, "provider": provider}
        if energy is None:
            continue
        text = "Energy that nodes measured."
        figures.add("cavvy_energy_joules", text, energy.joules, kind="counter", **labels)
        if energy.grids:
            text = "Emissions of the grids for this energy."
            figures.add("cavvy_co2_grams", text, energy.co2_g, kind="counter", **labels)
    for (project,), uses in (await store.meters.sum_tokens(which, ("project",))).items():
        for model, use in uses.items():
            kinds = {"prompt": use.prompt, "cached": use.cached, "completion": use.completion}
            for kind, count in kinds.items():
                figures.add(
                    "cavvy_tokens",
                    "Tokens of language models. The cached ones are also in the prompt.",
                    count,
                    kind="counter",
                    project=project,
                    model=model,
                    type=kind,
                )
    parents, month = await read_parents(store), month_of(app_state.now())
    for budget in await store.budgets.list():
        if is_visible(budget.project, projects):
            spent = await sum_budget(store, budget, parents, month, app_state.now())
            for name, text, amount in (
                ("cavvy_budget_limit_dollars", "A month's amount of a budget.", budget.limit),
                ("cavvy_budget_spent_dollars", "What this month has cost.", spent),
            ):
                figures.add(name, text, amount.micros / MICROS_PER_USD, budget=budget.name)


def _add_calls(figures: Figures, calls: Mapping[tuple[str, str, str], tuple[int, float]]) -> None:
    for (provider, operation, result), (count, seconds) in calls.items():
        for name, text, value in (
            ("cavvy_provider_calls", "Calls of providers.", count),
            ("cavvy_provider_call_seconds", "Time that these calls took.", seconds),
        ):
            labels = {"provider": provider, "operation": operation, "result": result}
            figures.add(name, text, value, kind="counter", **labels)


@router.get("/v1/health", rule=OPEN)
async def health(app_state: AppState) -> wire.Health:
    """Check that the server and its database answer."""
    await app_state.store.installation()
    return wire.Health(status="ok")


@router.get("/v1/server", rule=SIGNED_IN)
async def server(app_state: AppState, principal: Principal) -> wire.ServerView:
    """Get this server's properties and state."""
    visible = list_visible(principal, Permission.VIEW)
    counts = await app_state.store.count_jobs(visible, set(JobPhase) - JOB_ENDS)
    inside = decide(principal, Permission.VIEW, INSTALLATION) is Verdict.ALLOWED
    return wire.ServerView(
        version=__version__,
        api=API,
        revision=REVISION,
        agent_protocols=list(AGENT_PROTOCOLS),
        pid=os.getpid() if inside else 0,
        host=host_name() if inside else "",
        home=str(app_state.settings.home) if inside else "",
        address=app_state.address if inside else "",
        started_at=app_state.started_at,
        uptime_s=(app_state.now() - app_state.started_at).total_seconds(),
        idle_s=app_state.idle_s(),
        idle_stop_s=app_state.settings.whole("server.idle_stop_s"),
        unfinished=sum(counts.values()),
        database=app_state.database,
        listen=app_state.listen if inside else None,
        node_endpoint=app_state.node_endpoint if inside else None,
        database_mib=await app_state.store.retention.size_mib() if inside else None,
        keep_jobs_days=app_state.settings.whole(JOBS_SETTING),
        keep_audit_days=app_state.settings.whole(AUDIT_SETTING),
        removes_old_from=await read_begin(app_state.store, app_state.now()),
        long_threads=app_state.long_threads() if inside else [],
        capability_faults=[*list_faults()] if inside else [],
        problem=await asyncio.to_thread(_find_problem, app_state, inside),
    )


def _find_problem(app_state: AppState, inside: bool) -> str:
    """Return what the server cannot do now and why, or "". If `inside` is False, the user may not
    know the server's addresses.
    """
    if free_space(app_state.settings.home) < _LEAST_SPACE:
        return (
            "the server's disk is full: new log lines and changes are not stored until the disk of "
            "the state folder has free space"
        )
    if shortage := describe_open_files():
        return shortage
    return app_state.control_plane.own.find_problem() if inside else ""


@router.post("/v1/server/stop", rule=on_installation(Permission.OPERATE))
async def stop(app_state: AppState) -> None:
    """Stop the server; nodes and their work continue."""
    app_state.stop()


audit_router = RouteGroup("audit log")


@audit_router.get("/v1/audit-log", rule=in_query(Permission.AUDIT))
async def read_log(
    request: Request,
    app_state: AppState,
    project: Annotated[str | None, Query(max_length=63)] = None,
    account: Annotated[str | None, Query(max_length=63)] = None,
    outcome: AuditOutcome | None = None,
    since: AwareDatetime | None = None,
    after: PositionQuery = 0,
    newest: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> account_wire.AuditLogPage:
    """Get records of changes and refusals in the caller's projects, ordered by number: the oldest
    records after `after` or, with `newest`, the newest records. The hashes can be checked only if
    all records are visible.
    """
    found = await app_state.store.audit_records(
        filter_projects(request, Permission.AUDIT, project),
        account=account,
        outcome=outcome,
        since=since,
        after=after,
        limit=limit,
        newest=newest,
    )
    return account_wire.AuditLogPage(
        records=[view(account_wire.AuditLogRow, each) for each in found]
    )
