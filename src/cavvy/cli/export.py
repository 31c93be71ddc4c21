"""`cavvy export`: write what would be submitted to a place, in the place's own language, to be
used without Cavvy.
"""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.providers import ASK_TIMEOUT_S, SILENT, load_settings
from cavvy.cli.task.load import param_option, read_any_task, read_params
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import Task
    from cavvy.providers.base import Provider


@click.command("export")
@click.argument("place", metavar="PLACE")
@click.argument("file", metavar="TASK.YAML", type=click.Path(dir_okay=False))
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write to FILE, not to the screen.",
)
@click.option(
    "--ask/--blind",
    default=True,
    help="Ask the place, where it is configured, what fits; or ask nobody.",
)
@param_option
def command(place: str, file: str, target: str | None, ask: bool, param: tuple[str, ...]) -> None:
    """Write what would be submitted to PLACE, for use without Cavvy.

    PLACE is a provider that has a language of its own, such as kubernetes, slurm or pbs; or
    `dockerfile`, for an image of what the task's setup makes. What is written runs the task's setup
    and work with the variables that Cavvy would set; restarts, checkpoints that move and bills are
    Cavvy's and stay out. What the reader must do by hand stands in comments.
    """
    task = read_any_task(file, read_params(param))
    text = (
        _write_dockerfile(task) if place == "dockerfile" else asyncio.run(_export(place, task, ask))
    )
    if target is None:
        click.echo(text.rstrip("\n"))
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailure(f"{target} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {target}", err=True)


def _write_dockerfile(task: "Task") -> str:
    if task.image_build is not None:
        own = f"{task.image_build.path}/{task.image_build.dockerfile}"
        raise CommandFailure(
            "the task has a Dockerfile of its own",
            f"it is {own} of the working folder",
            exit_code=2,
        )
    from cavvy.spec.dockerfile import make_dockerfile

    return make_dockerfile(task)


async def _export(place: str, task: "Task", ask: bool) -> str:
    from cavvy.providers import registry
    from cavvy.providers.base import Closeable, ExportsTasks, ProviderError

    known = load_settings()
    everyone = registry.list_known()
    if place not in everyone:
        raise CommandFailure(
            f"there is no place {place!r}", _suggest_place(place, everyone), exit_code=2
        )
    maker = registry.ProviderMaker(installation="export", home=known.home / "providers")
    try:
        provider = maker.make(everyone[place], known.providers.get(place, {}))
        try:
            if not isinstance(provider, ExportsTasks):
                raise CommandFailure(
                    f"{place} has no language of its own to write the task in", exit_code=2
                )
            offer = await _choose(provider, task) if ask and place in known.providers else None
            return provider.export(task, offer, task.nodes)
        finally:
            if isinstance(provider, Closeable):
                await provider.close()
    except ProviderError as error:
        raise CommandFailure(f"{place}: {error}", "`--blind` asks nobody") from error


def _suggest_place(place: str, everyone: Collection[str]) -> str:
    from difflib import get_close_matches

    known = sorted([*everyone, "dockerfile"])
    close = get_close_matches(place, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


async def _choose(provider: "Provider", task: "Task") -> "Offer":
    """The cheapest offer of the place that fits the task."""
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
            "nothing that the place has now fits the task",
            "`--blind` writes what the task asks for",
        )
    return min(fitting, key=lambda offer: (offer.rate, offer.key))
