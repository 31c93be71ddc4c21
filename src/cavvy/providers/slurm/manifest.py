"""What this provider says about itself."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from cavvy.providers.base import Feature, Manifest, ProviderSetting, Refused, SettingKind
from cavvy.providers.settings import gpu_price, login_node, node_price, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.IMAGE: "the setting `container` does not say what runs images on this cluster's nodes",
    Feature.BUILD: "Dockerfiles are built where there is podman or docker; "
    "`cavvy image build TASK.YAML --push NAME` makes one",
    Feature.LOGIN: "jobs run in no images here",
    Feature.VOLUMES: "a cluster has no volumes to attach by name; give the `host` folder or the "
    "`nfs` export",
    Feature.NETWORK: "Slurm does not say how fast the network between its nodes is",
    Feature.DISK: "jobs use the disks that the nodes have; size and type cannot be chosen",
}


# What each way of running images can do.
CONTAINERS: Mapping[str, frozenset[Feature]] = {
    "apptainer": frozenset({Feature.IMAGE, Feature.LOGIN}),
    "podman": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "docker": frozenset({Feature.IMAGE, Feature.LOGIN, Feature.BUILD}),
    "pyxis": frozenset({Feature.IMAGE}),
}


def with_containers(manifest: Manifest, container: str) -> Manifest:
    """The manifest of a cluster whose nodes run images so. Raises Refused."""
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


MANIFEST = Manifest(
    name="slurm",
    title="a Slurm cluster",
    docs="docs/guides/slurm.md",
    unsupported=UNSUPPORTED,
    visibility_delay=timedelta(0),
    settings=(
        *login_node(),
        text(
            "partitions",
            "Names with commas between them; only these are used. Unset: all that the user may "
            "use.",
        ),
        text("account", "The account that jobs are charged to. Unset: the user's default."),
        text("qos", "The quality of service that jobs ask for. Unset: the default."),
        text("sbatch_options", "More options of `sbatch`, such as `--constraint=ib --exclude=n7`."),
        text(
            "python",
            "The Python (3.8 or newer) that nodes and the login node run the agent with.",
            "python3",
        ),
        text(
            "container",
            "What runs images on the nodes: `apptainer`, `podman`, `docker`, or `pyxis`, whose "
            "images bring their own "
            "Python 3.8 or newer. Unset: tasks with an image are refused.",
        ),
        gpu_price(),
        node_price(),
        ProviderSetting(
            name="queue",
            kind=SettingKind.FLAG,
            default=True,
            consequence="`true`: jobs are handed to Slurm's own queue when nothing is free. "
            "`false`: Cavvy keeps them until enough nodes are idle.",
        ),
        ProviderSetting(
            name="warning_s",
            kind=SettingKind.INTEGER,
            unit="seconds",
            default=60,
            minimum=1,
            consequence="So long before Slurm's time limit a job is told to save its state; it "
            "goes on in a new job.",
        ),
    ),
)
