"""Builds the manifest of a batch system's provider. This module imports no module that opens
connections.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    EXPORTS_TASKS,
    RELAYS_AGENTS,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest, ProviderSetting
from cavvy.providers.settings import flag, gpu_price, login_node, node_price, number, text


def make_manifest(
    name: str,
    title: str,
    *,
    cloud: str,
    image: str,
    limit: str,
    settings: Sequence[ProviderSetting],
    options: Mapping[str, str] = {},
) -> Manifest:
    """Return the manifest of one batch system. For `cloud`, see `Manifest`. `image` is the
    reason why tasks with an image are refused; `limit` is the system's term for a job's time limit.
    """
    return Manifest(
        name=name,
        title=f"a {title} cluster",
        no_project_accounts="the server connects to the login node with SSH keys of the "
        "user that runs the server, and an SSH configuration can start programs",
        cloud=cloud,
        unsupported=_list_unsupported(title, image),
        abilities=(WHO_AM_I, CHECKS_TASKS, EXPORTS_TASKS, RELAYS_AGENTS, CLOSEABLE),
        keeps_topology=True,
        reports_cancelled=True,
        visibility_delay=timedelta(0),
        options=options,
        docs=f"docs/guides/{name}.md",
        settings=(
            *login_node(),
            text(
                "unix_users",
                "Submit each job as the Unix user of its Cavvy user, such as `ann=amueller "
                "bob@example.org=bob`; jobs of other users are refused. The login must be root or "
                "be allowed to run `sudo -n -u UNIX_USER`, and `folder` needs `~` or `%u`. "
                "Members of a project can run commands in its jobs, also in those of other "
                "users. Without this setting, all jobs run as the user of the login.",
            ),
            *settings,
            text(
                "python",
                "The Python interpreter (3.8 or newer) that runs the agent on the nodes and on "
                "the login node.",
                "python3",
            ),
            gpu_price(),
            node_price(),
            flag(
                "queue",
                f"If `true`, jobs wait in {title}'s own queue when nothing is free. If `false`, "
                "Cavvy queues jobs until enough nodes are idle.",
                default=True,
            ),
            seconds(
                "warning_s",
                60,
                f"The time before {limit} at which Cavvy asks a job to save its state. The work "
                "then continues in a new job.",
            ),
        ),
    )


def _list_unsupported(title: str, image: str) -> dict[Feature, str]:
    """Return why a batch system cannot do what it cannot do."""
    return {
        Feature.IMAGE: image,
        Feature.BUILD: "Dockerfiles can be built only with podman or docker; `cavvy image "
        "build TASK.YAML --push NAME` builds an image and pushes it",
        Feature.LOGIN: "jobs cannot run in container images",
        Feature.VOLUMES: "a cluster has no named volumes to attach; use a `host` folder or an "
        "`nfs` export",
        Feature.REPAIR: f"a job of {title} that loses a node gets no other node: its nodes are "
        "one allocation",
        Feature.TUNNEL: "jobs run as an ordinary user, who may not configure the network for "
        "WireGuard",
        Feature.NETWORK: f"{title} does not report the speed of the network between its nodes",
        Feature.DISK: "jobs use the nodes' existing disks, whose size and type cannot be chosen",
    }


def seconds(name: str, default: int, consequence: str) -> ProviderSetting:
    """Return a setting that is a number of seconds, at least 1."""
    return number(name, consequence, default=default, minimum=1, unit="seconds", whole=True)
