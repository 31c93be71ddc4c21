"""What this provider says about itself."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.base import Feature, Manifest, ProviderSetting, SettingKind
from cavvy.providers.settings import gpu_price, login_node, node_price, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.IMAGE: "a cluster's nodes start the agent as a plain process; load what the task needs "
    "in its `setup`",
    Feature.BUILD: "Dockerfiles are built where there is podman or docker; "
    "`cavvy image build TASK.YAML --push NAME` makes one",
    Feature.LOGIN: "jobs run in no images here",
    Feature.VOLUMES: "a cluster has no volumes to attach by name; give the `host` folder or the "
    "`nfs` export",
    Feature.NETWORK: "PBS does not say how fast the network between its nodes is",
    Feature.DISK: "jobs use the disks that the nodes have; size and type cannot be chosen",
}


MANIFEST = Manifest(
    name="pbs",
    title="a PBS cluster",
    docs="docs/guides/pbs.md",
    unsupported=UNSUPPORTED,
    visibility_delay=timedelta(0),
    settings=(
        *login_node(),
        text(
            "queues",
            "Names with commas between them; only these are used. Unset: all that take and start "
            "jobs.",
        ),
        text(
            "spot_queues", "Names of queues whose jobs may be preempted; they are offered as spot."
        ),
        text("gpu", "What the nodes' GPUs are, such as `H100`. Unset: as `gpu_resource` says."),
        text(
            "gpu_resource",
            "The resource in which the cluster's nodes name the kind of their GPUs.",
            "gpu_type",
        ),
        text("account", "The account that jobs are charged to (`-A`). Unset: none is named."),
        text("qsub_options", "More options of `qsub`, such as `-P vision`."),
        text(
            "python",
            "The Python (3.8 or newer) that nodes and the login node run the agent with.",
            "python3",
        ),
        gpu_price(),
        node_price(),
        ProviderSetting(
            name="queue",
            kind=SettingKind.FLAG,
            default=True,
            consequence="`true`: jobs are handed to PBS's own queues when nothing is free. "
            "`false`: Cavvy keeps them until enough nodes are idle.",
        ),
        ProviderSetting(
            name="warning_s",
            kind=SettingKind.INTEGER,
            unit="seconds",
            default=60,
            minimum=1,
            consequence="So long before the walltime is over a job is told to save its state; it "
            "goes on in a new job.",
        ),
        ProviderSetting(
            name="kill_delay_s",
            kind=SettingKind.INTEGER,
            unit="seconds",
            default=10,
            minimum=1,
            consequence="How long the cluster waits between SIGTERM and SIGKILL (its "
            "`kill_delay`).",
        ),
    ),
)
