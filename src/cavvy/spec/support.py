"""Valid features that are refused: those that Cavvy does not support yet, and those that a provider
lacks.

The first table is used while a file is read; `refusals` when a provider is considered.
"""

import json
from collections.abc import Mapping
from typing import Any

from cavvy.domain.tasks import NetworkNeed, Objection, Resources, SpotPolicy, Task, VolumeKind

# Dotted key -> why it is not supported yet.
NOT_YET: Mapping[str, str] = {
    "workdir.ref": "a branch or tag can change, but every attempt must run the same commit; set "
    "the commit",
}


def refusals(task: Task, unsupported: Mapping[str, str]) -> list[Objection]:
    """The parts of a task that a provider does not support; [] if it supports all.

    `unsupported` is the manifest's table of features with reasons.
    """
    need = task.resources
    asked = (
        ("spot", "resources.spot", need.spot is SpotPolicy.ONLY),
        ("gang", "nodes", task.nodes > 1),
        ("image", "image", task.image is not None or task.image_build is not None),
        ("build", "image.build", task.image_build is not None),
        ("login", "image.login", task.image_login is not None),
        ("network", "resources.network", _asks_for_network(need.network)),
        ("disk", "resources.disk.type", need.disk_type is not None),
        ("volumes", "volumes", any(each.kind is VolumeKind.NAMED for each in task.volumes)),
        ("mounts", "volumes", any(each.kind is not VolumeKind.NAMED for each in task.volumes)),
    )
    return [
        Objection(field, unsupported[feature])
        for feature, field, wanted in asked
        if wanted and feature in unsupported
    ]


def read_options(need: Resources, provider: str) -> dict[str, Any]:
    """What the task asks of this provider in its own words, by the option's name."""
    found = (json.loads(each.values) for each in need.options if each.provider == provider)
    return next(found, {})


def _asks_for_network(need: NetworkNeed | None) -> bool:
    return need is not None and (need.min_mbps is not None or need.named)
