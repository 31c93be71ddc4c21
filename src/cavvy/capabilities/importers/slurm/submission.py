"""Submits the jobs for which a job's script calls `sbatch`: the node's program asks here, through
its agent. A job so submitted belongs to the same person and project, starts with the same working
folder, and may cost money if its user has agreed to this without a limit.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from shlex import join, quote
from typing import Any

import msgspec
import yaml
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.agents import GangQuery, RankQuery, enter_attempt
from cavvy.api.routes.submission import check_runner, submit_task
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG
from cavvy.api.wire import read
from cavvy.capabilities.importers.detect import find_batch_system
from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.slurm.batch_script import calls_sbatch
from cavvy.capabilities.importers.slurm.directives import read_options
from cavvy.capabilities.importers.slurm.submitted import (
    SubmissionRow,
    TooMany,
    list_chain,
    number_of,
    put,
    remove,
)
from cavvy.client import wire
from cavvy.control.decide.job import cap_of
from cavvy.domain.arrays import find_phase
from cavvy.domain.jobs import JobRecord, RunOrigin
from cavvy.domain.units import format_usd
from cavvy.spec.problems import SpecError
from cavvy.store.base import RowNotFound

LIMIT = 65536  # bytes that the agent passes on
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_CONDITIONS = {"afterok": "success", "afterany": "any", "afternotok": "failure"}
# parts of the options of a job that say where it may run, and not what it needs
_PLACES = ("providers", "regions", "max_price", "spot", "network", "options", "instance")
_STATES = {
    **{"queued": "PENDING", "starting": "CONFIGURING", "running": "RUNNING", "done": "COMPLETED"},
    **{"stopping": "COMPLETING", "failed": "FAILED", "stopped": "CANCELLED"},
}
router = RouteGroup("agent", prefix="/agent/v1/asks/slurm")


class SubmitAsk(wire.Ask, frozen=True, kw_only=True):
    """What a call of `sbatch` says. `env` are the variables that the script has set, and `unset`
    those that it has removed; with `inherits`, the job also gets those of the job that submits it.
    `array` is the number of the array to which this job belongs, or 0.
    """

    id: str
    script: str
    name: str = "sbatch"
    options: Sequence[tuple[str, str | None]] = ()
    arguments: Sequence[str] = ()
    env: Mapping[str, str]
    unset: Sequence[str] = ()
    inherits: bool = True
    folder: str = ""
    array: int = 0


class SubmittedJob(wire.Answer, frozen=True, kw_only=True):
    """The job that was submitted, with its number as for Slurm."""

    number: int
    name: str


class StateAsk(wire.Ask, frozen=True, kw_only=True):
    """A question for a job that this job, or one of its chain, has submitted."""

    number: int


class SubmittedJobState(wire.Answer, frozen=True, kw_only=True):
    """The state of a job in Slurm's words. `exit_code` is set if it has ended."""

    state: str
    exit_code: int | None = None


@router.post(
    "/submit",
    rule=GANG,
    ask=SubmitAsk,
    errors=("role-needed", "invalid-task", "no-offer", "consent-needed", "policy-refused"),
)
async def submit(request: Request, gang: GangQuery, rank: RankQuery) -> SubmittedJob:
    """Submit a job for which the script of a job calls sbatch."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    ask = await read(request, SubmitAsk, LIMIT)
    job = await app_state.store.job(attempt.job_id)
    _check_caller(job)
    await check_runner(app_state, job.project, job.account, job.since)
    reading, writing = app_state.store.database
    chain = await reading(lambda session: list_chain(session, job.id, job.array_id))
    after = _read_after(ask, job, chain)
    text = compose_script(ask.script, _list_options(ask), ask.arguments)
    most = app_state.settings.whole("importers.submitted_jobs")
    new = SubmissionRow(
        project=job.project,
        parent=job.id,
        array=job.array_id,
        ask=ask.id,
        job_id=app_state.control_plane.jobs.make_id(),
        at=app_state.now(),
    )
    try:
        job_id = await writing(lambda session: put(session, new, most))
    except TooMany:
        hint = "the setting importers.submitted_jobs of the server permits more"
        message = f"this job and those that it has submitted may submit {most} jobs"
        raise ApiProblem("policy-refused", message, hint) from None
    numbers = {}
    if any(option.name == "array" for option in read_options(text)):
        numbers["SLURM_ARRAY_JOB_ID"] = str(number_of(job_id))
    origin = RunOrigin(
        task_text=text,
        dialect=Dialect.SLURM,
        overrides=make_overrides(job, ask, numbers, after),
        commit=job.origin.commit,
        diff=job.origin.diff,
        snapshot=job.origin.snapshot,
        versions=job.origin.versions,
        path=job.origin.path,
    )
    asked = wire.SubmitRequest(
        text=text,
        path=ask.name,
        origin=msgspec.Raw(msgspec.json.encode(origin)),
        user=job.user,
        # What a job may spend at most is not multiplied by what it submits: see `_explain_price`.
        consent=job.consented and cap_of(job) is None,
        ceiling_micros=None if job.ceiling is None else job.ceiling.micros,
    )
    try:
        made, _ = await submit_task(
            app_state, job.project, asked, job_id, job.account, lambda *_: None
        )
    except (ApiProblem, SpecError) as error:
        await writing(lambda session: remove(session, job.id, ask.id))
        if isinstance(error, SpecError):
            raise ApiProblem("invalid-task", str(error)) from None
        if error.code == "consent-needed" and job.consented:
            raise _explain_price(job, error) from None
        raise
    return SubmittedJob(number=number_of(job_id), name=made.name)


def _explain_price(job: JobRecord, refusal: ApiProblem) -> ApiProblem:
    """Return why a job whose user has agreed to costs up to a limit may submit only jobs that cost
    nothing: each of them could cost as much again."""
    cap = cap_of(job)
    assert cap is not None
    return ApiProblem(
        refusal.code,
        f"{refusal.message}; its user has agreed to at most {format_usd(cap)} for job {job.name}, "
        "which the jobs that it submits do not share",
        "submit this script with `cavvy run`, or the first one without a budget",
    )


@router.post("/state", rule=GANG, ask=StateAsk, errors=("job-not-found",))
async def state(request: Request, gang: GangQuery, rank: RankQuery) -> SubmittedJobState:
    """Say in which state a job is that this job has submitted."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    ask = await read(request, StateAsk)
    job = await app_state.store.job(attempt.job_id)
    reading, _ = app_state.store.database
    chain = await reading(lambda session: list_chain(session, job.id, job.array_id))
    found = next((each for each in chain if number_of(each) == ask.number), None)
    if found is None:
        raise ApiProblem("job-not-found", f"Invalid job id specified: {ask.number}")
    return await _find_state(app_state, found)


async def _find_state(app_state: AppState, job_id: str) -> SubmittedJobState:
    try:
        job = await app_state.store.job(job_id)
    except RowNotFound:
        pass
    else:
        return SubmittedJobState(
            state=_STATES[job.phase], exit_code=_code_of(job.phase, job.exit_code)
        )
    try:
        array = await app_state.store.arrays.get(job_id)
    except RowNotFound:
        raise ApiProblem("job-not-found", "the job was removed") from None
    phase = find_phase(array.counts)
    return SubmittedJobState(state=_STATES[phase], exit_code=_code_of(phase, None))


def _code_of(phase: str, code: int | None) -> int | None:
    if phase not in ("done", "failed", "stopped"):
        return None
    return code or (0 if phase == "done" else 1)


def _check_caller(job: JobRecord) -> None:
    """Raise ApiProblem unless the user has submitted a script of Slurm that calls sbatch: other
    programs of a job, such as a package that it installs, must not spend the user's money.
    """
    text = job.origin.task_text
    if find_batch_system(text, None) is not Dialect.SLURM or not calls_sbatch(text):
        raise ApiProblem(
            "policy-refused",
            "only a script of Slurm that names sbatch itself may submit jobs",
            "write `type sbatch` in the script whose programs call it",
        )


def _list_options(ask: SubmitAsk) -> list[tuple[str, str | None]]:
    """Return the options of a call for the lines of the script. The script starts in the folder in
    which sbatch was called.
    """
    named = {name for name, _ in ask.options}
    options = [each for each in ask.options if each[0] != "dependency"]
    if ask.folder and "chdir" not in named:
        options.append(("chdir", ask.folder))
    return options


def compose_script(
    script: str, options: Sequence[tuple[str, str | None]], arguments: Sequence[str]
) -> str:
    """Return the script with the options and arguments of a call, which follow its own lines of
    #SBATCH, so that they win. Raises ApiProblem.
    """
    lines = script.replace("\r\n", "\n").split("\n")
    if not lines[0].startswith("#!"):
        message = "This does not look like a batch script"
        raise ApiProblem("invalid-task", message, "its first line names a program: #!/bin/bash")
    at = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))
    added = []
    for name, value in options:
        if value is not None and "\n" in value:
            message = f"--{name} has a value of several lines"
            raise ApiProblem("invalid-task", message, "write it into one line")
        added.append(f"#SBATCH --{name}" + ("" if value is None else f"={quote(value)}"))
    if arguments:
        words = lines[0][2:].replace("/usr/bin/env", "").split()
        program = PurePath(words[0]).name if words else ""
        if program not in _SHELLS:
            message = f"arguments of a script for {program} are not supported"
            raise ApiProblem("invalid-task", message, "use a script for bash, which calls it")
        added.append(f"set -- {join(arguments)}")
    return "\n".join((*lines[:at], *added, *lines[at:]))


def _read_after(ask: SubmitAsk, job: JobRecord, chain: Collection[str]) -> list[dict[str, str]]:
    """Return the jobs for which a job waits. Raises ApiProblem."""
    numbers = {number_of(each): each for each in (*chain, job.id)}
    if ask.array and job.array_id is not None:
        numbers[ask.array] = job.array_id
    found: dict[str, str] = {}
    for text in (value for name, value in ask.options if name == "dependency"):
        for part in filter(None, (text or "").split(",")):
            kind, *named = part.split(":")
            if kind == "after" and named == [str(number_of(job.id))]:
                continue  # it has begun
            if kind not in _CONDITIONS or not named:
                raise ApiProblem(
                    "invalid-task",
                    f"--dependency={part} is not supported",
                    "expected afterok, afterany or afternotok with numbers, joined by commas",
                )
            for number in named:
                known = numbers.get(int(number)) if number.isdecimal() else None
                if known is None:
                    raise ApiProblem(
                        "invalid-task",
                        f"--dependency={part}: Job dependency problem: {number} is neither this "
                        "job nor one that it or its chain has submitted",
                        "name a number that sbatch has printed in this job, or $SLURM_JOB_ID",
                    )
                found[known] = _CONDITIONS[kind]
    return [{each: condition} for each, condition in found.items()]


def make_overrides(
    job: JobRecord, ask: SubmitAsk, numbers: Mapping[str, str], after: Sequence[Mapping[str, str]]
) -> str:
    """Return the options of the new job; `numbers` are variables that only it has. The options of
    its parent that say where a job runs count for it, too; a script that submits itself keeps all.
    """
    given: dict[str, Any] = yaml.safe_load(job.origin.overrides or "{}") or {}
    own = {"after", "array", "sweep", "parallel", "name", "schedule", "group", "run", "env"}
    if ask.script.strip() == job.origin.task_text.strip():
        made = {key: value for key, value in given.items() if key not in own}
    else:
        needs = {key: each for key, each in given.get("resources", {}).items() if key in _PLACES}
        made = {key: given[key] for key in ("workdir", "pool", "tags", "image") if key in given}
        made |= {"resources": needs} if needs else {}
    env = dict(ask.env)
    if ask.inherits:
        env = {**job.task.env, **env}
        if job.task.secrets:
            made["secrets"] = list(job.task.secrets)
    env = {name: value for name, value in env.items() if name not in ask.unset}
    env |= numbers
    if env:
        made["env"] = env
    if after:
        made["after"] = list(after)
    return msgspec.json.encode(made).decode() if made else ""
