"""`remuda status`: one job, everything known about it."""

from typing import TYPE_CHECKING

import click

from remuda.cli.output import Column, json_out, pairs_out, rows_out
from remuda.cli.session import project_option, session

if TYPE_CHECKING:
    from remuda.client.wire import JobDetail


@click.command("status")
@click.argument("name")
@project_option
@click.option(
    "-o", "--output", type=click.Choice(("table", "json")), default="table", show_default=True, help="How to say it."
)
def command(name: str, project: str, output: str) -> None:
    """Show one job: phase, place, attempts, reasons, position in the queue."""
    with session() as client:
        job = client.job(project, name)
    if output == "json":
        from msgspec.json import decode, encode

        json_out(decode(encode(job)))  # task, origin and offer are raw JSON inside
        return
    pairs_out(_facts(job))
    _attempts_out(job)
    _nodes_out(job)


def _facts(job: "JobDetail") -> list[tuple[str, object]]:
    from remuda.cli import shown

    facts: list[tuple[str, object]] = [
        ("job", f"{job.name} ({job.id}) in project {job.project}"),
        ("phase", f"{job.phase}, since {shown.show_ago(job.since)}"),
        ("reason", job.reason),
        ("submitted", f"{job.submitted_at:%Y-%m-%d %H:%M:%S} UTC by {job.user or 'unknown'}"),
    ]
    if tags := shown.tags_of(job):
        facts.append(("tags", shown.show_tags(tags)))
    if job.queue_position is not None:
        facts.append(("queue", f"number {job.queue_position} of those that wait"))
    if job.not_before is not None:
        facts.append(("not before", f"{job.not_before:%Y-%m-%d %H:%M:%S} UTC"))
    if job.exit_code is not None:
        facts.append(("exit code", job.exit_code))
    ceiling = f", at most {shown.show_money(job.ceiling_micros)}" if job.ceiling_micros is not None else ""
    facts.append(("spent", shown.show_money(job.spent_micros) + ceiling))
    if job.attempts and (latest := job.attempts[-1]).nodes and (progress := latest.nodes[0].progress):
        facts.append(("progress", shown.show_progress(progress)))
    return facts


def _attempts_out(job: "JobDetail") -> None:
    from remuda.cli import shown

    columns = [
        Column("number", "TRY", right=True),
        Column("phase"),
        Column("outcome"),
        Column("exit_code", "EXIT", right=True),
        Column("place", wide=True),
        Column("started", show=shown.show_ago),
        Column("reason", wrap=True),
    ]
    rows = [(a.number, a.phase, a.outcome, a.exit_code, a.place, a.created_at, a.reason) for a in job.attempts]
    if rows:
        rows_out(columns, rows, title="\nattempts")


def _nodes_out(job: "JobDetail") -> None:
    from remuda.cli import shown

    if not job.attempts:
        return
    columns = [
        Column("rank", right=True),
        Column("phase"),
        Column("exit_code", "EXIT", right=True),
        Column("address"),
        Column("heard_at", "HEARD", shown.show_ago),
        Column("use", wide=True),
        Column("exit_reason", "REASON", wrap=True),
    ]
    rows = [
        (n.rank, n.phase, n.exit_code, n.address, n.heard_at, _use(n.telemetry), n.exit_reason)
        for n in job.attempts[-1].nodes
    ]
    rows_out(columns, rows, title=f"\nnodes of attempt {job.attempts[-1].number}")


def _use(telemetry: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in telemetry.items())
