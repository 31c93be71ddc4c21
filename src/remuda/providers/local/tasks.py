"""What of a task this machine can honour."""

import shutil
from collections.abc import Sequence

from remuda.domain.tasks import SpotPolicy, Task
from remuda.providers.base import Feature
from remuda.providers.local.manifest import LACKS


def find_engine() -> str | None:
    """The container engine that agents here will use."""
    return next((engine for engine in ("podman", "docker") if shutil.which(engine)), None)


def check_task(task: Task, engine: str | None) -> Sequence[str]:
    """What of a task this machine cannot honour, each reason naming its field."""
    need = task.resources
    reasons = []
    if task.image is not None and engine is None:
        reasons.append("image: needs podman or docker, and neither is installed here; install one or leave `image` out")
    if need.spot is SpotPolicy.ONLY:
        reasons.append(f"resources.spot: only: {LACKS[Feature.SPOT]}")
    if need.disk_type is not None:
        reasons.append(f"resources.disk.type: {LACKS[Feature.DISK]}")
    if need.network is not None and need.network.min_mbps is not None:
        reasons.append(f"resources.network: {LACKS[Feature.NETWORK]}")
    return reasons
