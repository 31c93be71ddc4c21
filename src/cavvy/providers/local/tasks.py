"""Checks if this machine can run a task."""

import os
import shutil
import socket
from collections.abc import Sequence

from cavvy.domain.tasks import Objection, Task

_DOCKER_SOCKET = "/var/run/docker.sock"


def find_engine() -> str | None:
    """The container engine for agents on this machine: podman, or docker if its daemon can be
    reached; None if there is neither.
    """
    if shutil.which("podman"):
        return "podman"
    return (
        "docker"
        if shutil.which("docker") and _daemon_answers(os.environ.get("DOCKER_HOST"))
        else None
    )


def _daemon_answers(address: str | None) -> bool:
    """True if a daemon listens where docker's client would connect. A remote daemon is not
    checked.
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


def check_task(task: Task, engine: str | None) -> Sequence[Objection]:
    """Objections beyond those from the manifest."""
    if (task.image is None and task.image_build is None) or engine is not None:
        return []
    reason = (
        "needs podman, or docker with a running daemon; install or start one, or leave `image` out"
    )
    return [Objection("image", reason)]
