"""`cavvy runner github`: runs the jobs of GitHub Actions."""

import os
import re
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import click

from cavvy.cli.reach.session import session, task_project
from cavvy.cli.task.load import yes_option
from cavvy.cli.view.failure import CommandFailure, escape_controls
from cavvy.cli.view.numbers import count_option
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.capabilities.runners.controller import RunnerController, RunnerTask
    from cavvy.capabilities.runners.scale_sets import AppKey, GitHubProblem
    from cavvy.client import ApiClient

_APP = ("GITHUB_APP_ID", "GITHUB_APP_INSTALLATION_ID", "GITHUB_APP_PRIVATE_KEY")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WEEK_S = 7 * 24 * 3600.0  # how long the server may be away


@click.command("github")
@click.argument("url")
@click.argument("files", metavar="TASK.YAML...", nargs=-1, required=True)
@click.option("-p", "--project", help="The project; the default is the project in each file.")
@count_option("--max", "most", default=20, help="The maximum number of runners of each file.")
@click.option(
    "--label",
    "labels",
    metavar="NAME=GPU",
    multiple=True,
    help="Serve the one file under this label instead of its name, on this GPU, such as "
    "gpu-h100=H100:1, or on resources as in task files, such as 'big={cpu: 32, memory: 64GB}'. "
    "Can be repeated.",
)
@click.option(
    "--also",
    metavar="LABEL",
    multiple=True,
    help="A further label of all runners, such as self-hosted or gpu, for jobs whose runs-on names "
    "several labels. Can be repeated.",
)
@click.option("--group", help="The runner group at GitHub; the default is its group `default`.")
@click.option("--delete", is_flag=True, help="Delete the scale sets of the files instead.")
@yes_option
def serve(
    url: str,
    files: tuple[str, ...],
    project: str | None,
    most: int,
    labels: tuple[str, ...],
    also: tuple[str, ...],
    group: str | None,
    delete: bool,
    yes: bool,
) -> None:
    """Run the jobs of GitHub Actions of the organization or repository at URL.

    The name in each file is a label: a GitHub job with `runs-on: NAME` gets a runner with the
    resources of the file. The file's `run` starts GitHub's runner, which reads its configuration
    from the environment; a file with an image may omit `run`. A job with several labels gets a
    runner that has all of them: NAME and those of --also.

    GITHUB_TOKEN contains a token, or GITHUB_APP_ID, GITHUB_APP_INSTALLATION_ID and
    GITHUB_APP_PRIVATE_KEY contain an app and its key. The command runs until it is stopped, and
    may be killed: the next one continues with the same runners.
    """
    from cavvy.capabilities.runners.controller import RunnerController
    from cavvy.capabilities.runners.scale_sets import GitHubProblem, ScaleSetService
    from cavvy.cli.reach.session import ended_by_signals

    try:
        service = ScaleSetService(url, _read_credentials())
    except GitHubProblem as problem:
        raise CommandFailure(str(problem), exit_code=2) from problem
    with session(patience_s=_WEEK_S) as client:
        tasks = _read_tasks(client, files, labels, project, yes=yes)
        tasks = [replace(task, others=_read_also(also)) for task in tasks]
        controllers = [
            RunnerController(
                client.sibling(),
                service,
                task,
                most=most,
                group=group,
                submit=lambda api, task, name, secret, keep_s: _submit(
                    api, task, name, secret, keep_s, yes=yes
                ),
                # The names of CI jobs are those of anyone who may propose a change.
                report=lambda text: click.echo(escape_controls(text), err=True),
            )
            for task in tasks
        ]
        try:
            if delete:
                for controller in controllers:
                    controller.delete()
                return
            with ended_by_signals():
                _run(controllers)
        except GitHubProblem as problem:
            raise _explain(problem) from problem


def _read_tasks(
    client: "ApiClient",
    files: "Sequence[str]",
    labels: "Sequence[str]",
    project: str | None,
    *,
    yes: bool,
) -> "list[RunnerTask]":
    """Return a task for each file, or for each label of the one file."""
    if labels and len(files) > 1:
        raise CommandFailure("--label needs exactly one file", exit_code=2)
    asked = [(files[0], _read_label(each)) for each in labels] or [(file, "") for file in files]
    tasks = [_read_task(client, file, own, project, yes=yes) for file, own in asked]
    if len({task.label for task in tasks}) < len(tasks):
        what = "labels" if labels else "files"
        raise CommandFailure(f"two {what} have the same name", "give each its own name", 2)
    return tasks


def _run(controllers: "list[RunnerController]") -> NoReturn:
    """Run the controllers, each in a thread, until one fails or a signal ends the command."""
    failed: SimpleQueue[BaseException] = SimpleQueue()

    def run(controller: "RunnerController") -> None:
        try:
            controller.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            failed.put(error)

    for each in controllers:
        threading.Thread(target=run, args=(each,), daemon=True).start()
    try:
        raise failed.get()
    finally:
        for each in controllers:
            each.end()


def _read_credentials() -> "str | AppKey":
    """Return the token or the app in the environment. Raises CommandFailure."""
    from cavvy.capabilities.runners.scale_sets import AppKey

    token = os.environ.get("GITHUB_TOKEN", "").strip()
    values = [os.environ.get(name, "").strip() for name in _APP]
    if token:
        return token
    if all(values):
        return AppKey(client_id=values[0], installation=values[1], pem=values[2])
    missing = [name for name, value in zip(_APP, values, strict=True) if not value]
    given = len(missing) < len(_APP)
    raise CommandFailure(
        f"{' and '.join(missing) if given else 'GITHUB_TOKEN'} is not set",
        f"set GITHUB_TOKEN, or all of {', '.join(_APP)}",
        exit_code=2,
    )


def _read_also(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return further labels of runners. Raises CommandFailure."""
    for each in labels:
        if not _LABEL.fullmatch(each):
            expected = "expected up to 63 letters, digits, dots, dashes and underscores"
            raise CommandFailure(f"--also {each!r} is not a label", expected, exit_code=2)
    return labels


def _read_label(text: str) -> str:
    """Return what a label changes in the file, as overrides. Raises CommandFailure."""
    import json

    name, _, wanted = text.partition("=")
    if not (name and wanted):
        hint = "write NAME=GPU, such as gpu-h100=H100:1"
        raise CommandFailure(f"--label {text!r} names no resources", hint, exit_code=2)
    resources = wanted if wanted.startswith("{") else json.dumps({"gpu": wanted})
    return f"name: {json.dumps(name)}\nresources: {resources}\n"


def _read_task(
    client: "ApiClient", file: str, own: str, project: str | None, *, yes: bool
) -> "RunnerTask":
    """Return the label and the project of a file, whose task the server accepts. Raises
    CommandFailure, ApiError."""
    from cavvy.capabilities.runners.controller import RunnerTask, read_runner_task
    from cavvy.cli.task.problems import ask_server

    loaded = read_runner_task(file, {}, own, tells=True)
    price = ask_server(client, loaded, file, {}, project).consent_needed
    if price and not yes and loaded.task.limits.budget is None:
        hint = "add --yes to agree, or set limits.budget in the file"
        raise CommandFailure(f"{file}: {price}", hint, exit_code=2)
    task = loaded.task
    return RunnerTask(label=task.name, file=file, own=own, project=task_project(project, task))


def _submit(
    client: "ApiClient", task: "RunnerTask", name: str, secret: str, keep_s: float, *, yes: bool
) -> None:
    """Submit the job of a runner. The file is read again, so that new runners follow its changes.
    Raises CommandFailure, ApiError."""
    from cavvy.capabilities.runners.controller import (
        DEFAULT_RUN,
        may_wait,
        read_runner_task,
        write_overrides,
    )
    from cavvy.cli.task.submission import submit_loaded

    own = read_runner_task(task.file, {}, task.own)
    tags = {"ci": "github", "ci-label": task.label}
    overrides = task.own + write_overrides(own.task.run or DEFAULT_RUN, secret, tags)
    if keep_s and may_wait(own):
        overrides += f"keep: {round(keep_s)}s\n"
    loaded = read_runner_task(task.file, {}, overrides)
    submit_loaded(client, loaded, task.file, {}, task.project, name, yes)


def _explain(problem: "GitHubProblem") -> CommandFailure:
    hints = {
        401: "the token or the key of the app is wrong or has expired",
        403: "the token needs the permission to manage self-hosted runners: Administration of a "
        "repository, or Self-hosted runners of an organization (read and write)",
        404: "the address is wrong, or the token does not give access to it",
    }
    return CommandFailure(str(problem), hints.get(problem.status, ""))
