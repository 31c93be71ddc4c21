"""What this provider says about itself."""

from collections.abc import Mapping
from datetime import timedelta

from remuda.providers.base import Feature, Manifest, Setting, SettingKind

LACKS: Mapping[Feature, str] = {
    Feature.IMAGE: "a cluster's nodes start the agent as a plain process; load what the task needs in its `setup`",
    Feature.BUILD: "Dockerfiles are built where there is podman or docker; `remuda image build --push NAME` makes one",
    Feature.LOGIN: "jobs run in no images here",
    Feature.VOLUMES: "a cluster has no volumes to attach by name; give the `host` folder or the `nfs` export",
    Feature.NETWORK: "PBS does not say how fast the network between its nodes is",
    Feature.DISK: "jobs use the disks that the nodes have; size and type cannot be chosen",
}


def _text(name: str, consequence: str, default: str | None = None) -> Setting:
    return Setting(name=name, kind=SettingKind.TEXT, default=default, consequence=consequence)


def _price(name: str, of: str) -> Setting:
    return Setting(
        name=name, kind=SettingKind.NUMBER, unit="USD per hour", default=0, minimum=0,
        consequence=f"Jobs are charged this for {of}. Above 0 a job needs consent as on any paid offer.",
    )  # fmt: skip


MANIFEST = Manifest(
    name="pbs",
    title="a PBS cluster",
    docs="docs/guides/pbs.md",
    lacks=LACKS,
    settle=timedelta(0),
    settings=(
        _text(
            "host",
            "The login node, as `ssh` knows it; the connection is made without a password. Unset: this machine is one.",
        ),
        _text("ssh_options", "Options of `ssh`, such as `-J gate -i ~/.ssh/cluster`."),
        _text(
            "folder",
            "A folder that the login node and all nodes see under the same path; only its user may look into it.",
            "~/.remuda-cluster",
        ),
        _text("queues", "Names with commas between them; only these are used. Unset: all that take and start jobs."),
        _text("spot_queues", "Names of queues whose jobs may be preempted; they are offered as spot."),
        _text("gpu", "What the nodes' GPUs are, such as `H100`. Unset: as `gpu_resource` says."),
        _text("gpu_resource", "The resource in which the cluster's nodes name the kind of their GPUs.", "gpu_type"),
        _text("account", "The account that jobs are charged to (`-A`). Unset: none is named."),
        _text("qsub_options", "More options of `qsub`, such as `-P vision`."),
        _text("python", "The Python (3.8 or newer) that nodes and the login node run the agent with.", "python3"),
        _price("price_usd_gpu_hr", "each accelerator that they hold"),
        _price("price_usd_node_hr", "a node of which they hold no accelerators, or the share of it that they hold"),
        Setting(
            name="queue", kind=SettingKind.FLAG, default=True,
            consequence="`true`: jobs are handed to PBS's own queues when nothing is free. "
            "`false`: Remuda keeps them until enough nodes are idle.",
        ),
        Setting(
            name="warning_s", kind=SettingKind.INTEGER, unit="seconds", default=60, minimum=1,
            consequence="So long before the walltime is over a job is told to save its state; it goes on in a new job.",
        ),
        Setting(
            name="kill_delay_s", kind=SettingKind.INTEGER, unit="seconds", default=10, minimum=1,
            consequence="How long the cluster waits between SIGTERM and SIGKILL (its `kill_delay`).",
        ),
    ),
)  # fmt: skip
