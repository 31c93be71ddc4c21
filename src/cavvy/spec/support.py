"""Refuses valid features that Cavvy does not support yet, or that a provider does not support.

`NOT_YET` is used when a file is read. `refusals` is used when a provider's offers are checked for a
task.
"""

import json
from collections.abc import Mapping
from typing import Any

from cavvy.domain.tasks import (
    NetworkNeed,
    Objection,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    VolumeKind,
)

# For each unsupported key, the reason. Nested keys are written with dots.
NOT_YET: Mapping[str, str] = {
    "workdir.ref": "a branch or tag can move, but every attempt must run the same commit; "
    "set `commit` instead",
}


def refusals(task: TaskSpec, unsupported: Mapping[str, str]) -> list[Objection]:
    """The parts of a task that a provider does not support, with reasons. The list is empty if the
    provider supports all parts.

    `unsupported` is the table in the provider's manifest, with the reason for each unsupported
    feature.
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


def read_options(need: ResourceSpec, provider: str) -> dict[str, Any]:
    """The options that the task states for this provider, by name."""
    found = (json.loads(each.values) for each in need.options if each.provider == provider)
    return next(found, {})


def _asks_for_network(need: NetworkNeed | None) -> bool:
    return need is not None and (need.min_mbps is not None or need.fabric is not None or need.named)
