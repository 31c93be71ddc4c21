"""The provider for Slurm clusters: each gang is one batch job, with an agent on each of its
nodes.
"""

from collections.abc import Mapping

from cavvy.domain.values import replace
from cavvy.providers.base import Feature, Manifest, Refused
from cavvy.providers.batch.manifest import make_manifest
from cavvy.providers.settings import text

# container program -> the features that it makes available
CONTAINERS: Mapping[str, frozenset[Feature]] = {
    "apptainer": frozenset({Feature.IMAGE, Feature.LOGIN}),
    "podman": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "docker": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "pyxis": frozenset({Feature.IMAGE}),
}


def with_containers(manifest: Manifest, container: str) -> Manifest:
    """Return the manifest of a cluster whose nodes run images with the program `container`. If
    `container` is "", nodes run no images. Raises Refused.
    """
    if not container:
        return manifest
    if container not in CONTAINERS:
        raise Refused(
            f"[providers.slurm] container: {container!r} is not one of {', '.join(CONTAINERS)}"
        )
    unsupported = {
        feature: reason
        for feature, reason in manifest.unsupported.items()
        if feature not in CONTAINERS[container]
    }
    if Feature.LOGIN in unsupported:
        unsupported[Feature.LOGIN] = (
            "Pyxis logs in to registries with the cluster user's own file "
            "~/.config/enroot/.credentials"
        )
    return replace(manifest, unsupported=unsupported)


MANIFEST = make_manifest(
    "slurm",
    "Slurm",
    cloud="cavvy.providers.slurm.system:make_provider",
    image="the setting `container` is unset, so this cluster's nodes run no images",
    limit="Slurm's time limit",
    options={
        "sbatch": "options of sbatch for the task's jobs, such as [--constraint=ib, "
        "--reservation=course]; those for tasks, CPUs, memory and GPUs replace Cavvy's own",
    },
    settings=(
        text(
            "partitions",
            "The partitions to use, separated by commas. The default is all partitions that the "
            "user may use.",
        ),
        text(
            "account", "The account for jobs. The default is the user's default account."
        ).for_setup(),
        text("qos", "The quality of service (QOS) of jobs. By default, Slurm selects the QOS."),
        text(
            "sbatch_options",
            "Additional options of `sbatch`, such as `--constraint=ib --exclude=n7`.",
        ),
        text(
            "topology",
            "How `topology` of tasks is kept: `rack=r1|r2|r3` names node features of which all "
            "nodes of a job get the same one, `rack=block` uses the blocks of the plugin "
            "topology/block (`--segment`), and `rack=switch` keeps `prefer` with `--switches`.",
        ),
        text(
            "container",
            "The program that runs images on the nodes: `apptainer`, `podman`, `docker`, or "
            "`pyxis` (whose images must contain Python 3.8 or newer). If this is unset, tasks "
            "with an image are refused.",
        ),
    ),
)
