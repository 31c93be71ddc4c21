"""`cavvy rerun`, `retry` and `diff`: run a job again as a new job, queue an ended job again, and
show how two runs differ.
"""

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import detach_option, named, project_option, session
from cavvy.cli.task.load import param_option, read_params, yes_option
from cavvy.cli.task.options import resource_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import WholeRange
from cavvy.cli.view.output import TableColumn, output_option, rows_out

_DEPLOYS = "`cavvy serve FILE` deploys a new revision; lost replicas are replaced without a command"


@click.command("rerun")
@job_argument
@project_option
@param_option
@detach_option
@yes_option
def command(name: str, project: str, param: tuple[str, ...], detach: bool, yes: bool) -> None:
    """Run a job again with the same task, the same parameters and the same copy of its working
    folder. --param changes a parameter. An array is run again as a whole, and a job of an array as
    an array of its own.
    """
    from cavvy.cli.reach.arrays import follow_to_end
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.names import find_array
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.cli.task.submission import submit
    from cavvy.client import ApiError
    from cavvy.client.reruns import NotRepeatable, read_run

    changed = read_params(param)
    with session() as client:
        array = None
        try:
            old = client.job(project, name)
        except ApiError as error:
            array = find_array(client, project, name, error, _DEPLOYS)
            old = client.job(project, array.jobs[0].id)
        try:
            whole = array is not None
            run = read_run(old, array.array.id if array else old.id, is_whole_array=whole)
        except NotRepeatable as error:
            raise CommandFailure(str(error), error.hint) from error
        try:
            new = submit(
                client,
                run.text,
                path=f"the task of {name}",
                params={**run.params, **changed},
                project=project,
                origin=run.origin,
                name=run.name,
                consent=yes or old.consented,
                ceiling_micros=old.ceiling_micros,
            )
        except ApiError as error:
            if error.code != "invalid-task":
                raise
            known = ", ".join(run.task.params) or "none"
            hint = f"the task of {name} cannot be changed; the task's parameters: {known}"
            raise CommandFailure(error.message, hint) from error
        if new.members is not None:
            whole_name = array.array.name if array is not None else old.name
            jobs = "1 job" if new.members == 1 else f"{new.members} jobs"
            click.echo(f"{new.name}: {jobs} queued, a rerun of {whole_name}")
            if not detach:
                follow_to_end(client, new)
            return
        why = find_wait(client, project, new.id) if detach else ""
        click.echo(f"{new.name}: queued, a rerun of {old.name}{why and f'; {why}'}")
        click.echo(f"compare the jobs: cavvy diff {old.name} {named(project, new.name)}")
        if not detach:
            follow(client, project, new.name)


@click.command("retry")
@job_argument
@project_option
@resource_options
@click.option(
    "--checkpoint",
    type=WholeRange(min=1),
    metavar="N",
    help="Resume from the stored checkpoint with this number; `cavvy events` lists the numbers.",
)
@detach_option
@yes_option
def retry_command(
    name: str,
    project: str,
    resources: dict[str, object],
    checkpoint: int | None,
    detach: bool,
    yes: bool,
) -> None:
    """Queue an ended job again, or all failed and stopped jobs of an array. A job resumes from its
    newest checkpoint, elsewhere if options such as --provider replace its resources.
    """
    from cavvy.cli.reach.arrays import exit_code_of, follow_array
    from cavvy.cli.reach.follow import follow
    from cavvy.cli.reach.names import find_array
    from cavvy.cli.reach.waiting import find_wait
    from cavvy.cli.task.submission import ask_consent
    from cavvy.client import ApiError
    from cavvy.client.array_wire import retry_array

    with session() as client:
        try:
            seen = client.events(project, name).last
        except ApiError as error:
            array_id = find_array(client, project, name, error, _DEPLOYS).array.id
            if checkpoint is not None:
                hint = f"retry one of its jobs, such as {name}.0, with --checkpoint"
                raise CommandFailure("an array has no checkpoint", hint, 2) from error
            if resources:
                hint = f"retry one of its jobs, such as {name}.0, or `cavvy rerun` the array"
                raise CommandFailure("an array keeps its resources", hint, 2) from error
            array = retry_array(client, project, array_id)
            click.echo(f"{array.name}: {array.reason}")
            if not detach:
                jobs = follow_array(client, project, array.id).jobs
                raise SystemExit(exit_code_of(jobs)) from None
            return
        job = ask_consent(
            yes,
            lambda consent: client.retry(
                project, name, resources=resources, consent=consent, checkpoint=checkpoint
            ),
        )
        why = find_wait(client, project, job.id) if detach else ""
        click.echo(f"{job.name}: {job.phase}{why and f', {why}'}")
        if not detach:
            follow(client, project, job.name, after=seen, first=job.attempt + 1)


@click.command("diff")
@click.argument("first")
@click.argument("second")
@project_option
@output_option
def diff_command(first: str, second: str, project: str, output: str) -> None:
    """Show what differed between two runs: task, parameters, code, offer, versions and result."""
    from cavvy.cli.reach.names import find_job
    from cavvy.client.reruns import compare_jobs, find_replica, show_value

    with session() as client:
        jobs = find_job(client, project, first), find_job(client, project, second)
    if replica := find_replica(*jobs):
        text = f"{first} and {second} cannot be compared: {replica} is a replica of a service"
        raise CommandFailure(text, "`cavvy ps --all` lists the jobs and their reruns")
    rows = compare_jobs(*jobs)
    if output == "table":
        rows = [(name, show_value(name, a), show_value(name, b)) for name, a, b in rows]
    columns = [
        TableColumn("field"),
        TableColumn("first", first, wrap=True),
        TableColumn("second", second, wrap=True),
    ]
    rows_out(columns, rows, output, empty="nothing differed")
