"""`cavvy catalog diagram`: draws pictures from the catalog, the providers and the settings."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.providers.base import Manifest

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("diagram")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--folder", type=_FOLDER, default=Path(), help="Where NAME.svg is written.")
def command(names: tuple[str, ...], folder: Path) -> None:
    """Draw decision, costs, hybrid, containers, serverless, regions and generations as SVG.

    The pictures show the catalog in use and the installed providers; without NAME, all are drawn.
    They follow the reader's choice of light or dark.
    """
    from cavvy.cli.view.output_file import make_folder, write_text

    pictures = list_pictures()
    if unknown := [name for name in names if name not in pictures]:
        raise CommandFailure(
            f"there is no picture {unknown[0]!r}", f"known: {', '.join(pictures)}", 2
        )
    make_folder(folder)
    for name in names or pictures:
        write_text(folder / f"{name}.svg", pictures[name]())
        click.echo(f"wrote {folder / name}.svg")


def list_pictures() -> dict[str, Callable[[], str]]:
    return {
        "decision": _draw_decision,
        "costs": _draw_costs,
        "hybrid": _draw_hybrid,
        "containers": _draw_containers,
        "serverless": _draw_serverless,
        "regions": _draw_regions,
        "generations": _draw_generations,
    }


def _draw_decision() -> str:
    from cavvy.capabilities.choose.decision import CRITERIA, OptionKind
    from cavvy.capabilities.choose.diagrams import draw_decision

    return draw_decision(CRITERIA, [*map(str, OptionKind)])


def _draw_costs() -> str:
    from cavvy.capabilities.choose.diagrams import draw_costs
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        return draw_costs(snapshot.all_offers())


def _draw_regions() -> str:
    from cavvy.capabilities.choose.diagrams import draw_regions
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        return draw_regions(snapshot.regions())


def _draw_generations() -> str:
    from cavvy.capabilities.choose.diagrams import draw_family_timeline
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        return draw_family_timeline(snapshot.all_offers())


def _draw_hybrid() -> str:
    from cavvy.capabilities.choose.diagrams import draw_hybrid
    from cavvy.providers.registry import manifests

    known = [each for each in manifests() if not each.test_double]
    own = [each.name for each in known if _is_own(each)]
    rented = [each.name for each in known if not _is_own(each)]
    return draw_hybrid(own, rented, "join" in own)


def _is_own(manifest: "Manifest") -> bool:
    """Return whether the provider's nodes are the user's own: projects have no accounts there."""
    return bool(manifest.no_project_accounts)


def _draw_containers() -> str:
    from cavvy.capabilities.choose.diagrams import draw_containers
    from cavvy.providers.base import Feature
    from cavvy.providers.registry import manifests

    known = [each for each in manifests() if not each.test_double]
    images = [each.name for each in known if Feature.IMAGE not in each.unsupported]
    builds = [each.name for each in known if Feature.BUILD not in each.unsupported]
    return draw_containers(images, builds, len(known))


def _draw_serverless() -> str:
    from cavvy.capabilities.choose.diagrams import draw_serverless
    from cavvy.providers.base import Feature
    from cavvy.providers.registry import manifests

    known = [each for each in manifests() if not each.test_double]
    managed = [each.name for each in known if each.only_services]
    spot = sum(Feature.SPOT not in each.unsupported for each in known)
    return draw_serverless(managed, spot)
