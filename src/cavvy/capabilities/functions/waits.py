"""Says what calls without a result wait for: their job, or something in it."""

from collections.abc import Sequence

from msgspec.json import decode

from cavvy.api.app_state import AppState
from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.rows import FunctionRows
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord


async def explain_waits(
    app_state: AppState, project: str, app: str, calls: Sequence[tuple[str, str, str]]
) -> dict[str, str]:
    """Return what these calls of an app wait for. Each has an ID, a function, and what the broker
    has said of it last, or ""."""
    if not calls:
        return {}
    by_function: dict[str, str] = {}
    for part in await FunctionRows(*app_state.store.database).parts(project, app):
        for each in decode(part.document, type=wire.AppPartAsk).functions:
            by_function[each.name] = part.job
    wanted = {by_function.get(function, "") for _, function, _ in calls} - {""}
    jobs = {each.id: each for each in await app_state.store.find_jobs(sorted(wanted))}
    return {
        call: explain_wait(jobs.get(by_function.get(function, "")), told)
        for call, function, told in calls
    }


def explain_wait(job: JobRecord | None, told: str) -> str:
    """Return what a call waits for whose job is this one. `told` is what the broker has said."""
    if job is None:
        return "its job is about to be submitted"
    if job.phase in JOB_ENDS:
        return f"its job {job.id} has ended, and another one is about to be submitted"
    if job.phase is JobPhase.RUNNING:
        return told or f"its job {job.id} runs"
    return f"its job {job.id} is {job.phase.value}: {job.reason}"
