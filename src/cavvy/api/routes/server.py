"""Routes for the server itself: its health, its properties, and its shutdown."""

import asyncio
import os

from cavvy import __version__
from cavvy.api.app_state import AppState
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN, SIGNED_IN, on_installation
from cavvy.client import API, REVISION, wire
from cavvy.client.file_limit import describe_open_files
from cavvy.client.state import host_name
from cavvy.control.retention import read_begin
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.authorization import Principal, Verdict, decide, list_visible
from cavvy.domain.jobs import JOB_ENDS, JobPhase
from cavvy.domain.retention import AUDIT_SETTING, JOBS_SETTING
from cavvy.store.reserve import free_space

AGENT_PROTOCOLS = (1,)
# bytes; with less free space on its disk, the server cannot store a part of a log and its row
_LEAST_SPACE = 256 * 1024

router = RouteGroup("server")


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
    reason = app_state.control_plane.services.find_problem() if inside else ""
    return f"services cannot be reached: {reason}" if reason else ""


@router.post("/v1/server/stop", rule=on_installation(Permission.OPERATE))
async def stop(app_state: AppState) -> None:
    """Stop the server; nodes and their work continue."""
    app_state.stop()
