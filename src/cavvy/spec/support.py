"""Refuses valid features that Cavvy does not support yet, or that a provider does not support.

The parser refuses the keys of a task file that `NOT_YET` contains. When Cavvy checks a provider's
offers for a task, `refusals` lists the features that the provider does not support.
"""

import json
from collections.abc import Mapping
from typing import Any

from cavvy.catalog.regions import locate
from cavvy.domain.services import HERE, ServiceSpec, TargetKind
from cavvy.domain.tasks import (
    NetworkNeed,
    Objection,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    VolumeKind,
    find_router,
    take_role,
)

# For each unsupported key, the reason. Nested keys are written with dots.
NOT_YET: Mapping[str, str] = {
    "workdir.ref": "a branch or tag can move, but every attempt must run the same commit; "
    "set `commit` instead",
}


def refusals(task: TaskSpec, unsupported: Mapping[str, str]) -> list[Objection]:
    """Return the parts of a task that a provider does not support, with reasons. The list is empty
    if the provider supports all parts.

    `unsupported` is the table in the provider's manifest, with the reason for each unsupported
    feature.
    """
    need = task.resources
    asked = (
        ("spot", "resources.spot", need.spot is SpotPolicy.ONLY),
        ("gang", "nodes", task.nodes > 1),
        ("gang", "service.groups", find_router(task) is not None),
        ("image", "image", task.image is not None or task.image_build is not None),
        ("build", "image.build", task.image_build is not None),
        ("login", "image.login", task.image_login is not None),
        ("tunnel", "encrypt", task.encrypt and task.nodes > 1),
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
    """Return the options that the task states for this provider, by name."""
    found = (json.loads(each.values) for each in need.options if each.provider == provider)
    return next(found, {})


def _asks_for_network(need: NetworkNeed | None) -> bool:
    return need is not None and (need.min_mbps is not None or need.fabric is not None or need.named)


def object_to_service(task: TaskSpec) -> Objection | None:
    """Return why Cavvy cannot run this service yet, or None if it can."""
    spec = task.service
    assert spec is not None
    for key, given in (
        ("after", task.after or None),
        ("group", task.group),
        ("machine", task.machine),
        ("pool", task.pool),
        ("schedule", task.schedule),
        ("window", task.window),
        ("limits.deadline", task.limits.deadline or task.limits.deadline_after),
    ):
        if given is not None:
            return Objection(key, "a service cannot have this key")
    for group in task.replica_groups:
        alone = take_role(task, group)
        if alone.service and (found := _object_to_section(alone, alone.service)):
            return Objection(f"{found.field} (group {group.name})", found.reason)
    return None if task.replica_groups else _object_to_section(task, spec)


def _object_to_section(task: TaskSpec, spec: ServiceSpec) -> Objection | None:
    gpu = spec.replicas.target.kind is TargetKind.GPU_UTILISATION
    if gpu and not any(each.accelerators or each.instance for each in task.resources.choices):
        return Objection(
            "service.replicas.target",
            "the use of GPUs cannot be measured, because the replicas have no GPU",
        )
    if spec.fixed_port and spec.replicas.most > 1 and task.resources.providers == (HERE,):
        return Objection(
            "service.replicas",
            f"the program listens on port {spec.port}, so only one replica fits on the server's "
            "machine; in a Cavvy file, replicas that listen on $PORT have ports of their own",
        )
    if spec.budget:
        return Objection(
            "service.budget",
            "Cavvy cannot limit a price per hour; `cavvy cost budget set NAME DOLLARS --service "
            "SERVICE --hard 100%` limits what a service costs in a month",
        )
    return _object_to_regions(task, spec)


def _object_to_regions(task: TaskSpec, spec: ServiceSpec) -> Objection | None:
    """Return why the regions of a service contradict each other, or None if they do not."""
    named = {region for each in task.resources.choices for region in each.regions}
    if spec.regions and named:
        return Objection("service.regions", "the regions are already stated in `resources.regions`")
    for region in (*spec.regions, *sorted(named)):
        if spec.residency and spec.residency not in (region, locate("", region)[1]):
            return Objection(
                "resources.regions" if region in named else "service.regions",
                _explain_outside(region, spec.residency),
            )
    return None


def _explain_outside(region: str, area: str) -> str:
    found = locate("", region)[1]
    if found is not None:
        return f"{region} is in {found}, outside the residency {area}"
    return (
        f"Cavvy does not know the region {region}, so it cannot ensure that requests stay in the "
        "residency "
        f"{area}; `cavvy offers` lists regions"
    )
