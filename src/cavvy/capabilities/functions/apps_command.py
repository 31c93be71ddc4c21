"""`cavvy apps`: lists deployed apps, shows their functions and calls, and stops and removes them;
and what `cavvy call APP FUNCTION --json JSON` does.
"""

import json
import sys
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.functions.signatures import say_arguments, say_kind
from cavvy.cli.reach.arguments import needless_yes_option
from cavvy.cli.reach.session import call_server, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, json_out, output_option, rows_out, text_out

if TYPE_CHECKING:
    from cavvy.capabilities.functions.wire import DeployedApp
    from cavvy.client import ApiClient


@click.group("apps", cls=CommandGroup)
def command() -> None:
    """List, show, stop and remove deployed apps, and see their calls and logs.

    `cavvy deploy app.py` deploys the apps of a file.
    """


@command.command("list")
@project_option
@output_option
def list_apps(project: str, output: str) -> None:
    """List the deployed apps with their functions and their schedules, the URLs of their web
    endpoints, and the job of each that runs."""
    from cavvy.capabilities.functions import wire
    from cavvy.capabilities.functions.web_deploy import list_endpoints

    with session() as client:
        apps = {each.name: each for each in wire.list_apps(client, project)}
        endpoints = list_endpoints(client, project)
        rows = [
            _make_row(client, project, name, apps.get(name), endpoints.get(name, {}))
            for name in sorted({*apps, *endpoints})
        ]
    columns = [
        TableColumn("name"),
        TableColumn("revision", drop=4),
        TableColumn("functions", wrap=True),
        TableColumn("schedules", "SCHEDULE", _join_pairs, wrap=True, drop=5),
        TableColumn("endpoints", show=_join_pairs, wrap=True),
        TableColumn("jobs", "JOB", drop=2),
        TableColumn("user", drop=3),
        TableColumn("deployed_at", "DEPLOYED", formatting.show_ago, drop=1),
    ]
    rows_out(columns, rows, output, empty="no apps; `cavvy deploy app.py` deploys one")


def _make_row(
    client: "ApiClient",
    project: str,
    name: str,
    app: "DeployedApp | None",
    endpoints: dict[str, str],
) -> dict[str, object]:
    """Return what is listed of an app; None is one that has only web endpoints."""
    functions = [] if app is None else [each for part in app.parts for each in part.functions]
    return {
        "name": name,
        "revision": None if app is None else app.parts[0].revision,
        "functions": ", ".join(each.name for each in functions),
        "schedules": {each.name: each.schedule for each in functions if each.schedule},
        "endpoints": endpoints,
        "jobs": ", ".join(_list_running(client, project, app) if app else ()) or "-",
        "user": None if app is None else app.parts[0].user,
        "deployed_at": None if app is None else app.parts[0].updated_at,
    }


def _join_pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "-"


@command.command("show")
@click.argument("app")
@project_option
@output_option
def show(app: str, project: str, output: str) -> None:
    """Show the functions of an app, with the arguments and the result of each."""
    from cavvy.capabilities.functions import wire

    rows = []
    with session() as client:
        for part in wire.read_app(client, project, app).parts:
            for each in part.functions:
                found = wire.read_function(client, project, app, each.name)
                rows.append(
                    {
                        "name": each.name,
                        "arguments": json.loads(bytes(found.arguments)),
                        "result": json.loads(bytes(found.result)),
                        "generator": each.generator,
                    }
                )
    if output == "json":
        json_out(rows)
        return
    for row in rows:
        row["arguments"] = say_arguments(row["arguments"])
        row["result"] = say_kind(row["result"])
    columns = [
        TableColumn("name", "FUNCTION"),
        TableColumn("arguments", wrap=True),
        TableColumn("result"),
        TableColumn("generator", drop=1),
    ]
    rows_out(columns, rows, output)


@command.command("calls")
@click.argument("app")
@project_option
@output_option
def show_calls(app: str, project: str, output: str) -> None:
    """List the newest calls of an app that the server keeps: those of `spawn`, and by HTTP."""
    from cavvy.capabilities.functions import wire

    found = call_server(wire.list_calls, project, app)
    rows = [
        {
            "id": each.id,
            "function": each.function,
            "state": each.state,
            "user": each.user,
            "created_at": each.created_at,
            "seconds": each.end.ran_s,
            "cost_micros": each.cost_micros,
            "job": each.job,
            "why": each.why,
            "problem": f"{each.end.type or each.end.kind}: {each.end.text}"
            if each.end.kind
            else "",
        }
        for each in found
    ]
    columns = [
        TableColumn("id"),
        TableColumn("function"),
        TableColumn("state"),
        TableColumn("created_at", "CALLED", formatting.show_ago, drop=2),
        TableColumn("seconds", drop=3),
        TableColumn("cost_micros", "COST", _show_cost, drop=5),
        TableColumn("job", drop=6),
        TableColumn("user", drop=4),
    ]
    if any(each.why for each in found) or output == "json":
        columns.append(TableColumn("why", "WAITS FOR", wrap=True))
    columns.append(TableColumn("problem", wrap=True, drop=1))
    rows_out(columns, rows, output, empty=f"the server keeps no calls of {app}")


def _show_cost(micros: int | None) -> str:
    return "-" if micros is None else formatting.show_money(micros, 6)


@command.command("costs")
@click.argument("app")
@project_option
@output_option
def show_costs(app: str, project: str, output: str) -> None:
    """Show how the bills of an app's newest jobs are divided: among the calls that the server
    keeps, other calls, and the time in which no call ran."""
    from cavvy.capabilities.functions import wire

    rows = [
        {
            "job": each.job,
            "calls": each.calls,
            "bill_micros": each.bill_micros,
            "kept_micros": each.kept_micros,
            "others_micros": each.others_micros,
            "idle_micros": each.idle_micros,
        }
        for each in call_server(wire.list_costs, project, app)
    ]
    columns = [
        TableColumn("job"),
        TableColumn("calls"),
        TableColumn("bill_micros", "BILL", _show_cost),
        TableColumn("kept_micros", "KEPT CALLS", _show_cost),
        TableColumn("others_micros", "OTHER CALLS", _show_cost),
        TableColumn("idle_micros", "NO CALL", _show_cost),
    ]
    rows_out(columns, rows, output, empty=f"the server has kept no calls of {app} that ended")


@command.command("cancel")
@click.argument("app")
@click.argument("call")
@project_option
def cancel(app: str, call: str, project: str) -> None:
    """Cancel a call that the server keeps."""
    from cavvy.capabilities.functions import wire

    call_server(wire.cancel_call, project, app, call)
    text_out(f"{call} was cancelled")


@command.command("stop")
@click.argument("app")
@project_option
def stop(app: str, project: str) -> None:
    """Stop the running jobs of an app. The next call starts another one. Its web endpoints go on:
    `cavvy stop` ends their services."""
    from cavvy.capabilities.functions import wire

    with session() as client:
        jobs = _list_running(client, project, wire.read_app(client, project, app))
        for each in jobs:
            client.stop(project, each, reason="the app was stopped")
    text_out(f"stopped {', '.join(jobs)}" if jobs else f"no job of {app} runs")


@command.command("rm")
@click.argument("app")
@project_option
@needless_yes_option
def remove(app: str, project: str) -> None:
    """Remove an app with its schedules, its calls and its web endpoints, and stop its jobs."""
    from cavvy.capabilities.functions import wire
    from cavvy.capabilities.functions.deployed import list_own_jobs
    from cavvy.capabilities.functions.web_deploy import end_services
    from cavvy.client import ApiError

    with session() as client:
        jobs: list[str] = []
        ended = end_services(client, project, app)
        try:
            jobs += _list_running(client, project, wire.read_app(client, project, app))
            wire.delete_app(client, project, app)
        except ApiError as error:
            # another `rm` may have ended before it stopped the jobs
            rest = ended or list_own_jobs(client, project, app)
            if error.code != "app-not-found" or not rest:
                raise
        own = [each.id for each in list_own_jobs(client, project, app)]
        for job in {*jobs, *own}:
            client.stop(project, job, reason="the app was removed")
    text_out(f"{app} was removed")


@command.command("logs")
@click.argument("app")
@click.option("--function", default=None, help="Only the lines of this function.")
@click.option("--call", default=None, help="Only the lines of this call that the server keeps.")
@project_option
def show_logs(app: str, function: str | None, call: str | None, project: str) -> None:
    """Print what the functions of an app have printed in its newest jobs."""
    from cavvy.capabilities.functions import wire
    from cavvy.cli.view.job_output import EscapeFilter

    with session() as client:
        for part in wire.read_app(client, project, app).parts:
            if not part.job or (function and function not in {x.name for x in part.functions}):
                continue
            data = client.log(project, part.job, tail_bytes=_LOG_BYTES).data
            shown = EscapeFilter().take(data, final=True).decode(errors="replace")
            for line in shown.splitlines():
                head, bar, _ = line.partition(" | ")
                name, _, told = head.partition(" ")
                if function and (not bar or name != function):
                    continue
                if call and told != call:
                    continue
                sys.stdout.write(f"{line}\n")


_LOG_BYTES = 1_000_000


_POLL_S = 15.0  # so short that the server's silence meanwhile is no reason for a report


def call_function(project: str, app: str, function: str, text: str, key: str) -> None:
    """Call a function with arguments of JSON, and print its result. Ctrl-C ends only the wait.
    Raises CommandFailure.
    """
    from cavvy.capabilities.functions import wire

    data = sys.stdin.buffer.read() if text == "-" else text.encode()
    with session() as client:
        # without a wait, so that the call's ID is known if the user ends this command
        answer = wire.call_function(client, project, app, function, data, key, 0.0)
        if answer.state != "waiting":
            json_out(json.loads(bytes(answer.result)))
            return
        ask = wire.CallsReadAsk(ids=[answer.call], wait_s=_POLL_S)
        try:
            while not (found := wire.read_calls(client, project, app, ask)).ended:
                if found.missing:
                    raise CommandFailure(f"the app {app} was removed")
        except KeyboardInterrupt:
            click.echo("", err=True)
            note_out(
                f"the call {answer.call} goes on; `cavvy apps cancel {app} {answer.call}` cancels "
                f"it, and `cavvy apps calls {app}` shows its state"
            )
            raise SystemExit(130) from None
    ended = found.ended[0]
    if ended.state != "done":
        told = f"{ended.end.type or ended.end.kind or 'CallFailed'}: {ended.end.text}"
        raise CommandFailure(told, f"`cavvy apps logs {app}` shows what the app has printed")
    if not ended.json:
        told = f"the result of the call {ended.id}, which was made from Python, is a pickle"
        raise CommandFailure(told, f'cavvy.FunctionCall.from_id("{project}/{app}/{ended.id}")')
    json_out(json.loads(ended.result))


def _list_running(client: "ApiClient", project: str, app: "DeployedApp") -> list[str]:
    from cavvy.client import ApiError

    found = []
    for part in app.parts:
        try:
            if part.job and client.job(project, part.job).phase not in (
                "done",
                "failed",
                "stopped",
            ):
                found.append(part.job)
        except ApiError as error:
            if error.code != "job-not-found":
                raise
    return found
