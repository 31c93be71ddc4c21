"""`cavvy export`: writes a task in the job format of a provider or managed service. The exported
job runs without Cavvy.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.agent.images.own_command import names_own_command
from cavvy.cli.reach.providers import ASK_TIMEOUT_S, SILENT, load_settings
from cavvy.cli.task.load import param_option, read_any_task, read_params, task_argument
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.providers.base import Provider
    from cavvy.providers.formats import JobFormat


@click.command("export")
@click.argument("provider", metavar="PROVIDER")
@task_argument
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write to FILE instead of standard output.",
)
@click.option(
    "--ask/--blind",
    default=True,
    help="Ask the configured provider for a fitting offer (--ask), or make no requests (--blind).",
)
@count_option(
    "--index", least=0, help="Which job of an array or a sweep to write; the default is the first."
)
@param_option
def command(
    provider: str,
    file: str,
    target: str | None,
    ask: bool,
    index: int | None,
    param: tuple[str, ...],
) -> None:
    """Write a task in PROVIDER's own job format, for use without Cavvy.

    PROVIDER is a provider with its own job format, such as kubernetes, slurm or pbs; a managed
    service, such as sagemaker; or `dockerfile` for an image that contains the result of the task's
    setup. The exported job runs the task's setup and work with the variables that Cavvy would set.
    The exported job does not restart after failures, upload or download checkpoints, or record
    costs. Comments in the output list the steps that you must do by hand.
    """
    import asyncio

    from cavvy.domain.values import replace
    from cavvy.providers.formats import find_format

    task = _choose_member(read_any_task(file, read_params(param)), index)
    if len(task.replica_groups) > 1:
        raise CommandFailure(
            "other systems have no groups of replicas",
            "write a file for each group, with the group's `run` and `resources`",
        )
    if names_own_command(task.run) and provider != "dockerfile":
        raise CommandFailure(
            "the command of the image is known only to its registry",
            f"write the command that {task.image} runs into `run`",
        )
    if task.elastic is not None and provider != "dockerfile":
        note_out(
            f"other systems do not choose the number of nodes; this job has {task.nodes}, "
            f"the least of {task.elastic}"
        )
    if provider == "dockerfile":
        text = _write_dockerfile(task)
    elif job_format := find_format(provider):
        text = _write_request(provider, job_format, task)
    else:
        # The clusters are the user's own, so only the sizes that the task states apply.
        own = replace(task, resources=task.resources.stated())
        text = asyncio.run(_export(provider, own, ask))
    if target is None:
        click.echo(text.rstrip("\n"))
        return
    from cavvy.cli.view.output_file import write_text

    write_text(Path(target), text)
    click.echo(f"wrote {target}", err=True)


def _choose_member(task: "TaskSpec", index: int | None) -> "TaskSpec":
    """Return the task of one job of an array, or the task itself if it is one job."""
    from cavvy.domain.arrays import is_array, list_indices, make_member

    if not is_array(task):
        if index is not None:
            raise CommandFailure("--index: the task is one job, not an array", exit_code=2)
        return task
    indices = list_indices(task)
    chosen = indices[0] if index is None else index
    if chosen not in indices:
        hint = f"its jobs have the indices {min(indices)} to {max(indices)}"
        if len(indices) <= max(indices) - min(indices):
            hint += ", but not each of these"
        raise CommandFailure(f"--index: the array has no job {chosen}", hint, exit_code=2)
    if task.search is not None:
        message = "the values of a job of a search are chosen when it starts"
        raise CommandFailure(message, "delete `search` and `trials`", exit_code=2)
    if index is None:
        note_out(f"this is job {chosen}, one of {len(indices):,} jobs; --index chooses another")
    return make_member(task, chosen)


def _write_dockerfile(task: "TaskSpec") -> str:
    if task.image_build is not None:
        own = f"{task.image_build.path}/{task.image_build.dockerfile}"
        raise CommandFailure(
            "the task has its own Dockerfile",
            f"build {own} in the working folder instead",
            exit_code=2,
        )
    from cavvy.spec.dockerfile import make_dockerfile

    return make_dockerfile(task)


def _write_request(name: str, job_format: "JobFormat", task: "TaskSpec") -> str:
    from cavvy.providers.base import ProviderError
    from cavvy.store.snapshot.layout import SnapshotError
    from cavvy.store.snapshot.reader import find_offers

    try:
        return job_format.write(task, find_offers)
    except (ProviderError, SnapshotError) as error:
        raise CommandFailure(f"{name}: {error}", exit_code=2) from error


async def _export(name: str, task: "TaskSpec", ask: bool) -> str:
    from cavvy.providers import registry
    from cavvy.providers.abilities import CLOSEABLE, EXPORTS_TASKS, ability
    from cavvy.providers.base import ProviderContext, ProviderError

    known = load_settings()
    installed = registry.list_known()
    if name not in installed:
        raise CommandFailure(
            f"there is no provider {name!r}", _suggest_provider(name, installed), exit_code=2
        )
    context = ProviderContext(installation="export", home=known.home / "providers")
    try:
        provider = registry.make(installed[name], known.providers.get(name, {}), context)
        try:
            exports = ability(provider, EXPORTS_TASKS)
            if exports is None:
                raise CommandFailure(
                    f"{name} has no job format, so Cavvy cannot export tasks for it",
                    _list_exports(),
                    exit_code=2,
                )
            offer = await _choose(provider, task) if ask and name in known.providers else None
            return exports.export(task, offer, task.nodes)
        finally:
            if closeable := ability(provider, CLOSEABLE):
                await closeable.close()
    except ProviderError as error:
        raise CommandFailure(f"{name}: {error}", "--blind makes no requests") from error


def _suggest_provider(name: str, installed: Collection[str]) -> str:
    from difflib import get_close_matches

    from cavvy.providers.formats import list_formats

    known = sorted({*installed, *list_formats(), "dockerfile"})
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else _list_exports()


def _list_exports() -> str:
    from cavvy.providers import registry
    from cavvy.providers.abilities import EXPORTS_TASKS
    from cavvy.providers.formats import list_formats

    able = (each.name for each in registry.manifests() if EXPORTS_TASKS in each.abilities)
    return f"expected one of {', '.join(sorted({*able, *list_formats(), 'dockerfile'}))}"


async def _choose(provider: "Provider", task: "TaskSpec") -> "Offer":
    """Return the provider's cheapest offer that fits the task."""
    import asyncio

    from cavvy.catalog.fit import match_offers
    from cavvy.providers.base import TryAgain

    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            offers = await provider.offers()
    except TimeoutError as error:
        raise TryAgain(SILENT) from error
    fitting = match_offers(offers, task.resources).offers
    if not fitting:
        raise CommandFailure(
            "none of the provider's current offers fits the task",
            "use --blind to export the task's own requirements, without an offer",
        )
    return min(fitting, key=lambda offer: (offer.rate, offer.key))
