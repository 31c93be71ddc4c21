"""`cavvy diff`: shows how two runs differ."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import JobDetail

_TEXTS = frozenset(
    {"origin.task_text", "origin.diff"}
)  # These values are too long for a table cell, so their size and hash are shown.


@click.command("diff")
@click.argument("first")
@click.argument("second")
@project_option
@output_option
def command(first: str, second: str, project: str, output: str) -> None:
    """Show what differed between two runs: task, parameters, code, offer, versions and result."""
    with session() as client:
        jobs = client.job(project, first), client.job(project, second)
    replicas = {job.name for job in jobs if _is_replica(job)}
    if len({job.name in replicas for job in jobs}) > 1:
        replica = next(iter(replicas))
        text = f"{first} and {second} cannot be compared: {replica} is a replica of a service"
        raise CommandFailure(text, "`cavvy ps --all` lists the jobs and their reruns")
    a, b = (dict(_facts(job)) for job in jobs)
    rows = [
        (name, _cell(name, a.get(name), output), _cell(name, b.get(name), output))
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]
    columns = [
        TableColumn("field"),
        TableColumn("first", first, wrap=True),
        TableColumn("second", second, wrap=True),
    ]
    rows_out(columns, rows, output, empty="nothing differed")


def _is_replica(job: "JobDetail") -> bool:
    """Return whether the job is a replica; jobs of arrays have the same form of names."""
    import msgspec

    from cavvy.domain.arrays import is_array
    from cavvy.domain.services import is_replica
    from cavvy.domain.tasks import TaskSpec

    return is_replica(job.name) and not is_array(msgspec.json.decode(job.task, type=TaskSpec))


def _facts(job: "JobDetail") -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every property of a run."""
    from msgspec.json import decode

    yield from _flat("task", decode(job.task))
    origin = decode(job.origin)
    origin.pop("rerun_of", None)
    origin.pop("path", None)  # differs between terminals
    yield from _flat("origin", origin)
    yield "result.phase", job.phase
    yield "result.exit_code", job.exit_code
    yield "result.attempts", job.attempt
    yield "result.spent_usd", job.spent_micros / 1_000_000
    if job.attempts:
        yield from _flat("offer", decode(job.attempts[-1].offer))
        for node in job.attempts[-1].nodes[:1]:
            yield from _flat("result.progress", node.progress)


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value


def _cell(name: str, value: object, output: str) -> object:
    if name in _TEXTS and isinstance(value, str):
        import hashlib

        count = len(value.splitlines())
        return (
            f"{count} line{'s' if count != 1 else ''}, sha256 "
            f"{hashlib.sha256(value.encode()).hexdigest()[:12]}"
        )
    if output == "table":
        if isinstance(value, bool):
            return str(value).lower()  # written as in a task file
        if name == "result.spent_usd" and isinstance(value, float):
            return f"{value:.6f}"
    return value
