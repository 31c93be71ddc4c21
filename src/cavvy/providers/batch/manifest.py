"""The manifest of a batch system's provider; imports nothing that connects."""

from collections.abc import Sequence
from datetime import timedelta

from cavvy.providers.abilities import CLOSEABLE, EXPORTS_TASKS, RELAYS_AGENTS, WHO_AM_I
from cavvy.providers.base import Feature, Manifest, ProviderSetting
from cavvy.providers.settings import flag, gpu_price, login_node, node_price, number, text


def make_manifest(
    name: str, title: str, *, image: str, limit: str, settings: Sequence[ProviderSetting]
) -> Manifest:
    """The manifest of one batch system. `image`: why tasks with an image are refused; `limit`:
    what the system calls the end of a job's time.
    """
    return Manifest(
        name=name,
        title=f"a {title} cluster",
        docs=f"docs/guides/{name}.md",
        unsupported={
            Feature.IMAGE: image,
            Feature.BUILD: "Dockerfiles are built where there is podman or docker; "
            "`cavvy image build TASK.YAML --push NAME` makes one",
            Feature.LOGIN: "jobs run in no images here",
            Feature.VOLUMES: "a cluster has no volumes to attach by name; give the `host` folder "
            "or the `nfs` export",
            Feature.NETWORK: f"{title} does not say how fast the network between its nodes is",
            Feature.DISK: "jobs use the disks that the nodes have; size and type cannot be chosen",
        },
        abilities=(WHO_AM_I, EXPORTS_TASKS, RELAYS_AGENTS, CLOSEABLE),
        visibility_delay=timedelta(0),
        settings=(
            *login_node(),
            *settings,
            text(
                "python",
                "The Python (3.8 or newer) that nodes and the login node run the agent with.",
                "python3",
            ),
            gpu_price(),
            node_price(),
            flag(
                "queue",
                f"`true`: jobs wait in {title}'s own queue when nothing is free. "
                "`false`: Cavvy keeps them until enough nodes are idle.",
                default=True,
            ),
            seconds(
                "warning_s",
                60,
                f"A job is told to save its state this long before {limit}; it goes on in a new "
                "job.",
            ),
        ),
    )


def seconds(name: str, default: int, consequence: str) -> ProviderSetting:
    """A setting that is a number of seconds, at least one."""
    return number(name, consequence, default=default, minimum=1, unit="seconds", whole=True)
