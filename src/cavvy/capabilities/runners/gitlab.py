"""`cavvy runner gitlab`: the stages of a custom executor of GitLab Runner, each a command that
GitLab Runner calls: https://docs.gitlab.com/runner/executors/custom/

The job of Cavvy for a CI job only waits; each stage runs its script there. It is named after the
ID of the CI job, which the stages read from the job's own document: the pipeline could change
variables. It ends by itself, so that its nodes can be kept for the next job: after the last stage,
or when the CI job's time is over, because GitLab Runner may be gone.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.task.load import yes_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import JobDetail

_PARAM = "CUSTOM_ENV_CAVVY_PARAM_"
_END = ".cavvy-ci-job-has-ended"  # a file in the job's folder
_WAIT = f"""\
i=0
until [ -e {_END} ]; do
  i=$((i + 1))
  [ $i -lt %d ] || {{ echo "the time of the CI job is over"; exit 1; }}
  sleep 1
done
"""
# The scripts are made for bash or, with `shell = "sh"`, for sh.
_SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"
_SPARE_S = 900  # how long a job outlives the CI job's own limit, for the last stages
_ATTEMPTS = 3  # how often GitLab Runner tries to prepare a CI job
_PATIENCE_S = 600.0


@click.group("gitlab", cls=CommandGroup)
def command() -> None:
    """Run the jobs of GitLab CI, as a custom executor of GitLab Runner. GitLab Runner calls these
    commands, which its config.toml names.
    """


@command.command("config")
def config() -> None:
    """Describe the executor (`config_exec`)."""
    from cavvy import __version__

    click.echo(json.dumps({"driver": {"name": "Cavvy", "version": __version__}}))


@command.command("prepare")
@click.argument("file", metavar="TASK.YAML")
@project_option
@yes_option
def prepare(file: str, project: str, yes: bool) -> None:
    """Start a job with the resources of a task file, and wait until it runs (`prepare_exec`).

    The `image` of the CI job replaces that of the file. Variables CAVVY_PARAM_NAME of the CI job
    set parameters of the file.
    """
    from cavvy.cli.reach.waiting import wait_for_all

    with _system_failures(), session(patience_s=_PATIENCE_S) as client:
        document = _read_document()
        found = _find_live(client, project, _name(document))
        name = found.name if found else _submit(client, file, document, project, yes=yes)
        if code := wait_for_all(client, project, [name], {"running", "done", "failed", "stopped"}):
            raise CommandFailure(f"{name} ended with exit code {code} before the CI job")
        if (job := client.job(project, name)).phase != "running":
            raise CommandFailure(f"{name} is {job.phase}: {job.reason}")
        click.echo(f"{name} runs on {job.placement}")


@command.command("run")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("stage")
@project_option
def run(script: str, stage: str, project: str) -> None:
    """Run a script of GitLab Runner in the job (`run_exec`). STAGE is the script's name."""
    from cavvy.cli.reach.tunnel import run_here, with_tunnel

    with _system_failures():
        with session(patience_s=_PATIENCE_S) as client:
            job = _find_live(client, project, name := _name(_read_document()))
        if job is None:
            raise CommandFailure(f"{name} does not run any more, so {stage} cannot run")
        file = os.open(script, os.O_RDONLY)
        os.dup2(file, sys.stdin.fileno())
        code = with_tunnel(
            project,
            job.id,
            lambda tunnel: run_here(tunnel, argv=None, line=_SHELL, terminal=False),
        )
    if code:
        _end_build(code)


@command.command("cleanup")
@project_option
def cleanup(project: str) -> None:
    """End the job (`cleanup_exec`)."""
    with _system_failures(), session(patience_s=_PATIENCE_S) as client:
        job = _find_live(client, project, _name(_read_document()))
        if job is not None and not _end(client, project, job):
            client.stop(project, job.id, reason="the CI job has ended")


def _end(client: "ApiClient", project: str, job: "JobDetail") -> bool:
    """Let a running job end by itself. Return False if that is not possible."""
    from cavvy.client import ApiError

    try:
        chunks = [*client.exec(project, job.id, ["touch", _END])] if job.phase == "running" else []
    except ApiError:
        return False
    return bool(chunks) and chunks[-1].exit_code == 0


def _submit(
    client: "ApiClient", file: str, document: Mapping[str, Any], project: str, *, yes: bool
) -> str:
    """Submit the job of a CI job, and return its name. Raises CommandFailure, ApiError."""
    from cavvy.capabilities.runners.controller import read_runner_task
    from cavvy.cli.task.submission import submit_loaded

    params = {
        name.removeprefix(_PARAM).lower(): value
        for name, value in os.environ.items()
        if name.startswith(_PARAM)
    }
    loaded = read_runner_task(file, params, json.dumps(_make_overrides(document)))
    return submit_loaded(client, loaded, file, params, project, _name(document), yes).name


def _make_overrides(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the job of a CI job has instead of the file's values. Raises CommandFailure."""
    from cavvy.capabilities.runners.controller import NO_RETRY

    about = document.get("runner_info")
    timeout = about.get("timeout") if isinstance(about, dict) else None
    if not isinstance(timeout, int):
        raise CommandFailure("GitLab's document states no timeout of the CI job")
    made: dict[str, Any] = {
        "run": _WAIT % (timeout + _SPARE_S),
        "retry": NO_RETRY,
        "tags": {"ci": "gitlab", "ci-job": str(document["id"])},
    }
    image = document.get("image")
    if isinstance(image, dict) and image.get("name"):
        made["image"] = str(image["name"])
    return made


def _find_live(client: "ApiClient", project: str, name: str) -> "JobDetail | None":
    """Return the unfinished job of a CI job, if there is one. If `prepare` is repeated, the name of
    the failed job is taken, so the server appends a number to that of the next job."""
    from cavvy.cli.view.formatting import ENDED
    from cavvy.client import ApiError

    for each in (name, *(f"{name}-{n}" for n in range(2, _ATTEMPTS + 1))):
        try:
            job = client.job(project, each)
        except ApiError as error:
            if error.code != "job-not-found":
                raise
            continue
        if job.phase not in ENDED:
            return job
    return None


def _read_document() -> Mapping[str, Any]:
    """Return GitLab's document of the CI job. Raises CommandFailure."""
    path = os.environ.get("JOB_RESPONSE_FILE", "")
    if not path:
        hint = "GitLab Runner calls this command; it needs version 15 or newer"
        raise CommandFailure("JOB_RESPONSE_FILE is not set", hint)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if isinstance(found["id"], int):
            return dict(found)
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CommandFailure(f"{path} cannot be read: {type(error).__name__}") from error
    raise CommandFailure(f"{path} has no number of a job")


def _name(document: Mapping[str, Any]) -> str:
    return f"gitlab-{document['id']}"


@contextmanager
def _system_failures() -> Iterator[None]:
    """Let GitLab Runner tell failures of the executor from those of the script."""
    try:
        yield
    except CommandFailure as failure:
        code = int(os.environ.get("SYSTEM_FAILURE_EXIT_CODE") or 2)
        raise CommandFailure(failure.message, failure.hint, code) from failure


def _end_build(code: int) -> NoReturn:
    """Exit because the script has failed, and tell GitLab Runner its exit code."""
    if path := os.environ.get("BUILD_EXIT_CODE_FILE"):
        with open(path, "w", encoding="ascii") as file:
            file.write(str(code))
    sys.exit(int(os.environ.get("BUILD_FAILURE_EXIT_CODE") or 1))
