"""`cavvy status`: shows one job in detail."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec.json import decode, encode

from cavvy.cli.reach.arguments import any_job_argument
from cavvy.cli.reach.names import find_named
from cavvy.cli.reach.newest import find_newest
from cavvy.cli.reach.services import find_service_commands
from cavvy.cli.reach.session import named, project_option
from cavvy.cli.reach.waiting import show_repeatedly, watch_option
from cavvy.cli.view import formatting
from cavvy.cli.view.output import TableColumn, json_option, json_out, pairs_out, rows_out, text_out
from cavvy.client.errors import ApiError
from cavvy.client.metrics import (
    SPEED_SINCE,
    describe_energy,
    estimate_left_s,
    find_progress,
    find_share,
    find_unsafe,
    find_use,
)
from cavvy.client.sizes import list_spans
from cavvy.domain.figures import describe_stragglers, find_stragglers
from cavvy.domain.units import format_duration, format_measure

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import ForecastView, JobDetail

_STILL_TOLD_S = 60
_IDLE_TOLD_S = 300  # loading and compiling leave GPUs idle for shorter times


class ShownJob(NamedTuple):
    """A job, the forecast of its deadline policy, and the seconds until its work is done, if they
    are known.
    """

    job: "JobDetail"
    forecast: "ForecastView | None"
    left_s: float | None


@click.command("status")
@any_job_argument
@project_option
@watch_option
@json_option
def command(name: str | None, project: str, watch: bool, output: str) -> None:
    """Show one job: phase, placement, attempts, reasons, position in the queue; or an array, or a
    service as `cavvy services show` does.

    Without NAME, this is the newest job of the task in the current folder.
    """

    chosen = [name] if name else []  # without a name, it is looked for once

    def read(client: "ApiClient") -> "ShownJob | ArrayDetail | NamedService":
        from cavvy.client import wire

        chosen[:] = chosen or [find_newest(client, project, "status")]
        job = find_named(client, project, chosen[0], newest=True)
        if not isinstance(job, wire.JobDetail):
            return job
        planned = job.plan_state is not None and job.ended_at is None
        forecast = client.forecast(project, job.id) if planned else None
        return ShownJob(job, forecast, _estimate_left(client, job))

    def show(found: "ShownJob | ArrayDetail | NamedService") -> None:
        from cavvy.client.array_wire import ArrayDetail

        if isinstance(found, ShownJob):
            _show(found, output)
        elif isinstance(found, ArrayDetail):
            _show_array(found, output)
        else:
            find_service_commands().show_service(found, output)

    show_repeatedly(read, show, watch, output)


def _show_array(found: "ArrayDetail", output: str) -> None:
    array = found.array
    if output == "json":
        json_out(decode(encode(found)))
        return
    what = "group" if found.group else "array"
    facts: list[tuple[str, object]] = [
        (what, f"{array.name} ({array.id}) in project {array.project}"),
        ("jobs", f"{len(found.jobs)}: {array.reason}"),
        ("submitted", f"{formatting.show_time(array.submitted_at)} by {array.user or 'unknown'}"),
        ("spent", formatting.show_money(array.spent_micros)),
    ]
    facts += [("parallel", f"at most {found.parallel} jobs")] if found.parallel else []
    facts += [("tags", formatting.show_tags(array.tags))] if array.tags else []
    pairs_out(facts)
    text_out(f"`cavvy ps {named(array.project, array.name)}` lists the jobs")


def _show(found: "ShownJob", output: str) -> None:
    job, forecast = found.job, found.forecast
    if output == "json":
        # The fields `task`, `origin` and `offer` of the job are raw JSON.
        document = decode(encode(job))
        extra = {} if forecast is None else {"forecast": decode(encode(forecast))}
        json_out(document | extra)
        return
    pairs_out(_facts(found) + _plan_state_facts(job, forecast))
    _attempts_out(job)
    _sizes_out(job)
    _search_out(job)
    _nodes_out(job)


def _facts(found: "ShownJob") -> list[tuple[str, object]]:
    job = found.job
    lasted = (formatting.show_ago if job.phase in formatting.ENDED else formatting.show_for)(
        job.since
    )
    facts: list[tuple[str, object]] = [
        ("job", f"{job.name} ({job.id}) in project {job.project}"),
        ("phase", f"{job.phase} {lasted}"),
        ("reason", job.reason),
        ("submitted", f"{formatting.show_time(job.submitted_at)} by {job.user or 'unknown'}"),
    ]
    facts += [("nodes", text)] if (text := formatting.range_of(job)) else []
    facts += [("grows", text)] if (text := formatting.hold_of(job)) else []
    facts += [("machine", job.machine)] if job.machine else []
    if tags := formatting.tags_of(job):
        facts.append(("tags", formatting.show_tags(tags)))
    facts += _queue_facts(job)
    if job.phase == "queued" and (window := formatting.window_of(job)):
        facts.append(("window", f"starts in window {window}"))
    if job.not_before is not None:
        facts.append(("not before", formatting.show_time(job.not_before)))
    if job.exit_code is not None:
        facts.append(("exit code", job.exit_code))
    ceiling = (
        f", at most {formatting.show_money(job.ceiling_micros)}"
        if job.ceiling_micros is not None
        else ""
    )
    facts.append(("spent", formatting.show_money(job.spent_micros) + ceiling))
    facts += [("energy", describe_energy(job.energy))] if job.energy else []
    return (
        facts
        + _progress_facts(found)
        + _checkpoint_facts(job)
        + _unsafe_facts(job)
        + _rank_facts(job)
    )


def _unsafe_facts(job: "JobDetail") -> list[tuple[str, object]]:
    """Return which files may be lost, why, and since when this is known."""
    unsafe = find_unsafe(job)
    return [("not safe", f"{unsafe.reason} ({formatting.show_ago(unsafe.at)})")] if unsafe else []


def _checkpoint_facts(job: "JobDetail") -> list[tuple[str, object]]:
    """Return how old the newest safe checkpoint of an unfinished job is."""
    task = decode(job.task)
    if job.phase in formatting.ENDED or not isinstance(task, dict) or not task.get("checkpoint"):
        return []
    saved = [each.checkpoint_at for each in job.attempts if each.checkpoint_at is not None]
    if not saved and not job.attempts:
        return []
    text = formatting.show_ago(max(saved)) if saved else "none yet"
    return [("checkpoint", f"newest safe checkpoint: {text}")]


def _queue_facts(job: "JobDetail") -> list[tuple[str, object]]:
    if not job.queue_position:
        return []
    start = (
        "not known yet"
        if job.estimated_start is None
        else f"{formatting.show_start(job.estimated_start)}, in 90 of 100 cases"
    )
    return [("queue", f"position {formatting.show_place(job)}"), ("starts", start)]


def _rank_facts(job: "JobDetail") -> list[tuple[str, object]]:
    """Return the ranks whose GPUs have been idle for five minutes or more, that are slower than the
    others, and for how long no rank has made progress."""
    own = next((attempt for attempt in job.attempts if attempt.number == job.attempt), None)
    if own is None or job.phase != "running":
        return []
    idle = [
        f"rank {node.rank} for {format_duration(timedelta(seconds=lasted))}"
        for node in own.nodes
        if (lasted := round(node.telemetry.get("gpu_idle_s", 0))) >= _IDLE_TOLD_S
        and node.exited_at is None
    ]
    facts: list[tuple[str, object]] = [("idle gpus", ", ".join(idle))] if idle else []
    if slow := find_stragglers({node.rank: node.progress for node in own.nodes}):
        facts.append(("stragglers", describe_stragglers(slow)))
    still = min((node.telemetry.get("still_s", 0) for node in own.nodes), default=0)
    if still >= _STILL_TOLD_S:
        now, silence = datetime.now(UTC), timedelta(seconds=round(still))
        text = f"for {format_duration(silence)}, since {now - silence:%H:%M:%S} UTC, on any rank"
        facts.append(("no progress", text))
        if own.silent is not None and own.silent.at >= now - silence:
            facts.append(("silent", own.silent.reason))
    return facts


def _estimate_left(client: "ApiClient", job: "JobDetail") -> float | None:
    """Return the seconds until the work is done, by its speed in the last minutes."""
    progress = find_progress(job)
    if job.phase != "running" or find_share(progress) is None or "left_s" in progress:
        return None
    since, names = datetime.now(UTC) - SPEED_SINCE, ["done"]
    with suppress(ApiError):  # of a server that keeps no figures
        found = client.figures(job.project, job.id, attempt=job.attempt, names=names, since=since)
        return estimate_left_s(progress, next(iter(found.series), None), found.step_s)
    return None


def _progress_facts(found: "ShownJob") -> list[tuple[str, object]]:
    progress = find_progress(found.job)
    if not progress:
        return []
    share, text = find_share(progress), formatting.show_progress(progress)
    if share is not None:
        text = f"{formatting.show_bar(share)}  {text}"
    if found.left_s is not None:
        text += f"  about {formatting.show_seconds(round(found.left_s))} left"
    return [("progress", text)]


def _plan_state_facts(
    job: "JobDetail", forecast: "ForecastView | None"
) -> list[tuple[str, object]]:
    """Return the last decision of the deadline policy with its reason, and the forecast for the
    remaining run.
    """

    facts: list[tuple[str, object]] = []
    if job.plan_state is not None:
        where = f" on {job.plan_state.placement}" if job.plan_state.placement else ""
        facts.append(
            (
                "decided",
                f"{job.plan_state.mode}{where}, {formatting.show_ago(job.plan_state.at)}: "
                f"{job.plan_state.reason}",
            )
        )
    if job.standbys:
        facts.append(("standby gang", ", ".join(f"attempt {number}" for number in job.standbys)))
    if forecast is not None and forecast.runs:
        money = [
            formatting.show_money(each)
            for each in (forecast.mean_micros, forecast.p10_micros, forecast.p90_micros)
        ]
        cost = f"{money[0]} more expected ({money[1]} to {money[2]} in 80 % of simulated runs)"
        length = format_duration(timedelta(minutes=max(1, round(forecast.hours_p50 * 60))))
        facts.append(
            (
                "forecast",
                f"{cost}; about {length} left; the job ends in time in "
                f"{forecast.in_time:.0%} of the runs",
            )
        )
    elif forecast is not None:
        facts.append(("forecast", forecast.reason))
    return facts


def _search_out(job: "JobDetail") -> None:
    """Print every placement that was refused or failed, and when it may be tried again."""

    failed: dict[str, tuple[int, str, datetime]] = {}
    for attempt in job.attempts:
        if attempt.outcome in ("capacity", "refused", "timeout", "node"):
            count = failed[attempt.placement][0] if attempt.placement in failed else 0
            failed[attempt.placement] = count + 1, attempt.reason, attempt.created_at
    if not failed:
        return
    now = datetime.now(UTC)
    rows = [
        (
            placement,
            count,
            at,
            until if (until := job.avoid.get(placement)) and until > now else None,
            reason,
        )
        for placement, (count, reason, at) in failed.items()
    ]
    columns = [
        TableColumn("placement"),
        TableColumn("tries", drop=2),
        TableColumn("last", show=formatting.show_ago, drop=1),
        TableColumn("avoided", "AVOIDED UNTIL", formatting.show_clock, drop=3),
        TableColumn("reason", wrap=True),
    ]
    rows_out(columns, rows, title="\nfailed placements")


def _attempts_out(job: "JobDetail") -> None:
    columns = [
        TableColumn("number", "TRY"),
        TableColumn("phase", drop=3),
        TableColumn("outcome"),
        TableColumn("exit_code", "EXIT", drop=2),
        TableColumn("placement", drop=4),
        TableColumn("created_at", "STARTED", formatting.show_ago, drop=1),
        TableColumn("reason", wrap=True),
    ]
    if job.attempts:
        rows_out(columns, job.attempts, title="\nattempts")


def _sizes_out(job: "JobDetail") -> None:
    """Print on how many nodes a job has run for how long and how fast, and what each change has
    cost."""
    spans = list_spans(job, datetime.now(UTC))
    unknown = all(each.speed is None for each in spans)
    columns = [
        TableColumn("number", "TRY"),
        TableColumn("nodes"),
        TableColumn("began", "SINCE", formatting.show_clock, drop=1),
        TableColumn("ran", show=format_duration),
        TableColumn("speed", "SAMPLES/S", lambda rate: f"{rate:.4g}", hidden=unknown),
        TableColumn("change", wrap=True),
        TableColumn("waited", "WAITED", format_duration),
        TableColumn("wait_micros", "COST OF START", formatting.show_money, drop=2),
    ]
    if spans:
        rows_out(columns, spans, title="\nsizes over time")


def _nodes_out(job: "JobDetail") -> None:
    if not job.attempts:
        return
    columns = [
        TableColumn("rank"),
        TableColumn("phase"),
        TableColumn("exit_code", "EXIT", drop=3),
        TableColumn("address", drop=1),
        TableColumn("heard_at", "HEARD", formatting.show_ago, drop=2),
        TableColumn("telemetry", "USE", _use, drop=4, wrap=True),
        TableColumn("exit_reason", "REASON", wrap=True),
    ]
    own = next(
        (attempt for attempt in job.attempts if attempt.number == job.attempt), job.attempts[-1]
    )
    rows_out(columns, own.nodes, title=f"\nnodes of attempt {own.number}")


def _use(telemetry: dict[str, float]) -> str:
    used = find_use(telemetry).items()
    return ", ".join(format_measure(name, value) for name, value in used) or "-"
