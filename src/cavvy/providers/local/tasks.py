"""Checks whether this machine can run a task."""

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from cavvy.agent.work.hide import is_hidden
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind

_DOCKER_SOCKET = "/var/run/docker.sock"


def find_engine() -> str | None:
    """Return the container engine for agents on this machine: podman, or docker if its daemon can
    be reached, or None if neither is available.
    """
    if shutil.which("podman"):
        return "podman"
    return (
        "docker"
        if shutil.which("docker") and _daemon_answers(os.environ.get("DOCKER_HOST"))
        else None
    )


def _daemon_answers(address: str | None) -> bool:
    """Return whether a daemon listens at the address to which docker's client would connect. A
    remote daemon is not checked.
    """
    if address is not None and not address.startswith("unix://"):
        return True
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1)
            line.connect((address or _DOCKER_SOCKET).removeprefix("unix://"))
    except OSError:
        return False
    return True


def check_task(
    task: TaskSpec, engine: Callable[[], str | None], hides: Path | None
) -> Sequence[Objection]:
    """Return the objections that result from the state of this machine rather than from the
    manifest. `engine` finds the container engine. `engine` is called only for a task with an image,
    because searching PATH at every attempt to place a task would take too long. `hides` is the
    folder that containers must not be able to read.
    """
    if task.image is None and task.image_build is None:
        return []
    if engine() is None:
        reason = (
            "needs podman, or docker with a running daemon; install or start one, or leave `image` "
            "out"
        )
        return [Objection("image", reason)]
    return [
        Objection(
            "volumes",
            f"with the mount of {each.source}, the container would see {hides}, the folder of "
            "Cavvy's server; choose another folder, or set `hide_server = false` in "
            "`[providers.local]`",
        )
        for each in task.volumes
        if hides is not None
        and each.kind is VolumeKind.HOST
        and is_hidden(str(hides), [], each.source)
    ]
