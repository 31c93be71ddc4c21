"""The manifest of the Slurm provider."""

from collections.abc import Mapping
from dataclasses import replace

from cavvy.providers.base import Feature, Manifest, Refused
from cavvy.providers.batch.manifest import make_manifest
from cavvy.providers.settings import text

# The limits of each way to run images.
CONTAINERS: Mapping[str, frozenset[Feature]] = {
    "apptainer": frozenset({Feature.IMAGE, Feature.LOGIN}),
    "podman": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "docker": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "pyxis": frozenset({Feature.IMAGE}),
}


def with_containers(manifest: Manifest, container: str) -> Manifest:
    """The manifest of a cluster whose nodes run images by `container`. Raises Refused."""
    if not container:
        return manifest
    if container not in CONTAINERS:
        raise Refused(
            f"[providers.slurm] container: {container!r} is none of {', '.join(CONTAINERS)}"
        )
    unsupported = {
        feature: reason
        for feature, reason in manifest.unsupported.items()
        if feature not in CONTAINERS[container]
    }
    if Feature.LOGIN in unsupported:
        unsupported[Feature.LOGIN] = (
            "Pyxis logs in by ~/.config/enroot/.credentials of the user on the cluster"
        )
    return replace(manifest, unsupported=unsupported)


MANIFEST = make_manifest(
    "slurm",
    "Slurm",
    image="the setting `container` does not say what runs images on this cluster's nodes",
    limit="Slurm's time limit",
    settings=(
        text(
            "partitions",
            "Names separated by commas; only these are used. Unset: all that the user may use.",
        ),
        text("account", "The account that jobs are charged to. Unset: the user's default."),
        text("qos", "The quality of service that jobs ask for. Unset: the default."),
        text("sbatch_options", "More options of `sbatch`, such as `--constraint=ib --exclude=n7`."),
        text(
            "container",
            "What runs images on the nodes: `apptainer`, `podman`, `docker`, or `pyxis`, whose "
            "images bring their own Python 3.8 or newer. Unset: tasks with an image are refused.",
        ),
    ),
)
