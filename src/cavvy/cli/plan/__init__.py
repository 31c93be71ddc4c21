"""`cavvy plan`: ranks offers for a task by cost or duration, without a server."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.task.load import param_option, read_any_tasks, read_params
from cavvy.cli.task.modes import add_modes, find_mode
from cavvy.cli.task.options import TaskCommand, task_options
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import output_option

if TYPE_CHECKING:
    from cavvy.cli.plan.answer import PlanAnswer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.task_files import ReadOptions


@click.command("plan", cls=TaskCommand)
@task_options
@click.option(
    "--by",
    type=click.Choice(["cost", "time"]),
    default="cost",
    help="The order: the lowest expected total cost, or the earliest finish.",
)
@count_option("--limit", least=0, default=10, help="How many offers to show, 0 for all.")
@click.option(
    "--all-locations",
    is_flag=True,
    help="Show every region and zone, not only the best one for each machine type.",
)
@click.option(
    "--ready",
    "--here",
    "ready",
    is_flag=True,
    help="Show only offers that a job can use now: the offers of configured providers.",
)
@click.option(
    "--output-size",
    metavar="SIZE",
    help="Size of the results to download at the end, such as 50GB, to include egress costs.",
)
@add_modes("plan")
@param_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@output_option
def command(
    file: str,
    options: "ReadOptions",
    by: str,
    limit: int,
    all_locations: bool,
    ready: bool,
    output_size: str | None,
    param: tuple[str, ...],
    project: str | None,
    output: str,
    **of_modes: Any,
) -> None:
    """Rank the offers that a task could run on, with cost, time and reasons.

    The command launches no machines and costs no money. Estimates use the task's `work` and limits;
    notes below the table state their assumptions. If `cavvy run` would refuse the task for another
    reason than missing offers, the command reports this reason and exits with an error. The server
    is asked only if it is running.
    """
    from cavvy.cli.plan.answer import find_answer
    from cavvy.cli.task.problems import find_refusal
    from cavvy.cli.task.profiles import with_rates

    params = read_params(param)
    tasks = [with_rates(each, Path(file).parent) for each in read_any_tasks(file, params, options)]
    parts = [part for each in tasks for part in _list_parts(each)]
    count = sum(max(1, len(each.replica_groups)) for each in tasks)
    mode = find_mode("plan", of_modes)
    if (len(tasks) > 1 and mode) or (count > 1 and not mode and output != "table"):
        what = "tasks" if len(tasks) > 1 else "groups of replicas"
        rather = f"omit {mode.option}" if mode else "use -o table"
        raise click.UsageError(f"{file} has {count} {what}; {rather}")
    if mode:
        mode.run(tasks[0], of_modes, output)
        return
    for number, (title, task) in enumerate(parts):
        if number:
            click.echo()
        if title:
            click.echo(title)
        _plan(
            task,
            lambda each: find_answer(
                each, by, limit or None, all_locations, ready, _size(output_size)
            ),
            output,
            all_locations,
        )
    if refusal := find_refusal(file, params, options, project, files=True):
        raise refusal


_PLANNED = ("resources", "nodes", "image")  # groups with the same of these get the same offers


def _list_parts(task: "TaskSpec") -> "Iterator[tuple[str, TaskSpec]]":
    """Yield the task of the groups of replicas on the same nodes, with a title, or the task alone
    without groups.
    """
    from cavvy.domain.tasks import take_role

    parts: list[tuple[list[str], TaskSpec]] = []
    for each in task.replica_groups:
        least, most = each.replicas.least, each.replicas.most
        count = str(most) if least == most else f"{least} to {most}"
        role = "" if each.name == each.role else f"{each.role}, "
        known, part = f"{each.name} ({role}{count})", take_role(task, each)
        for names, other in parts:
            if all(getattr(other, key) == getattr(part, key) for key in _PLANNED):
                names.append(known)
                break
        else:
            parts.append(([known], part))
    for names, part in parts:
        what = "group" if len(names) == 1 else "groups"
        yield f"{what} {', '.join(names)}: each replica on one of these", part
    if not task.replica_groups:
        yield "", task


def _plan(
    task: "TaskSpec",
    answer: "Callable[[TaskSpec], PlanAnswer]",
    output: str,
    all_locations: bool,
) -> None:
    """Print the offers for one task. Raises CommandFailure if none fits."""
    from cavvy.cli.task.buckets import with_regions, with_sizes
    from cavvy.domain.arrays import count_members, is_array
    from cavvy.domain.values import replace
    from cavvy.planner.candidates import join_reasons, tasks_of

    task, warnings = with_regions(*with_sizes(task))
    for nodes in (task.nodes,) if task.elastic is None else task.elastic.list_samples():
        answers = [answer(each) for each in tasks_of(replace(task, nodes=nodes))]
        if any(not each.message for each in answers):
            break  # the least of these sizes that fits, such as one that meets the deadline
    _put_out(answers, task, output, all_locations)
    for warning in warnings:
        note_out(warning, "warning")
    if is_array(task):
        count = count_members(task)
        note_out(f"this is the plan of each of the {count:,} jobs")
    _print_notes(answers, output)
    if all(each.message for each in answers):
        raise CommandFailure(join_reasons([each.message for each in answers]))


def _put_out(
    answers: "Sequence[PlanAnswer]", task: "TaskSpec", output: str, all_locations: bool
) -> None:
    from cavvy.cli.plan.tables import put_out_csv, show_answers

    match output:
        case "json":
            from cavvy.cli.plan.document import make_document
            from cavvy.cli.view.output import json_out

            documents = [make_document(each) for each in answers]
            several = {"task": task.name, "ordered": task.resources.ordered, "any_of": documents}
            json_out(documents[0] if len(documents) == 1 else several)
        case "csv":
            put_out_csv(answers)
        case _:
            show_answers(answers, task.resources.ordered, all_locations)


def show_plan(task: "TaskSpec", file: str) -> None:
    """Print the best offers of the configured providers. Raises CommandFailure if no offer fits.
    The error's hint contains `file`, the name of the task's file.
    """
    from cavvy.cli.plan.answer import find_answer
    from cavvy.cli.plan.tables import show_answers
    from cavvy.planner.candidates import join_reasons, tasks_of

    if task.edge is not None:
        click.echo("the server does this step; it needs no node")
        return
    answers = [find_answer(each, "cost", 5, False, True, None) for each in tasks_of(task)]
    show_answers(answers, task.resources.ordered, all_locations=False)
    _print_notes(answers, "table")
    if all(each.message for each in answers):
        from cavvy.cli.task.available import suggest_offer

        hint = suggest_offer(task, file, is_file=Path(file).is_file())
        raise CommandFailure(join_reasons([each.message for each in answers]), hint)


def _print_notes(answers: "Sequence[PlanAnswer]", output: str) -> None:
    warnings = [
        warning for each in answers for warning in each.warnings
    ]  # the JSON output contains the warnings
    notes = [("warning", each) for each in warnings if output != "json"]
    notes += [("note", problem) for each in answers for problem in each.offered.problems]
    hints = [advice for each in answers for advice in each.advice]
    notes += [("hint", each) for each in hints if output != "json"]
    for kind, note in dict.fromkeys(notes):
        note_out(note, kind)


def _size(text: str | None) -> int | None:
    from cavvy.domain.units import UnitError, parse_memory_mib

    try:
        return None if text is None else parse_memory_mib(text)
    except UnitError as error:
        raise CommandFailure(f"--output-size: {error}", exit_code=2) from error
