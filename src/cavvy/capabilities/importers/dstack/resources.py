"""Translates dstack's `resources` and the keys for the location. Missing keys get dstack's
defaults.
"""

import json
import re

from cavvy.capabilities.importers.common_fields import find_needs, read_price
from cavvy.capabilities.importers.dstack.rules import is_set
from cavvy.capabilities.importers.dstack.scalars import (
    GpuRequest,
    Range,
    range_of,
    read_gpu,
    read_range,
    read_size_mib,
    split_cpu,
    to_int,
)
from cavvy.capabilities.importers.readers import as_text, child, flag_at, items, text_at
from cavvy.domain.tasks import AcceleratorNeed, ProviderOptions, ResourceSpec, SpotPolicy
from cavvy.domain.values import Struct, replace
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.problems import listed
from cavvy.spec.tree import MapNode, Node, ScalarNode

# dstack's defaults for missing keys: CPUs, MiB of memory, MiB of disk, and number of accelerators
CPUS, MEMORY_MIB, DISK_MIB, COUNT = (2.0, None), (8 * 1024.0, None), (100 * 1024.0, None), "1.."
# keys of `resources`, and the fields that get dstack's defaults without these keys
_IMPLIED = (("cpu", "cpus_min"), ("memory", "memory_min_mib"), ("disk", "disk_gib"))
_PRIVILEGES = {
    "docker": "the job runs only on Kubernetes, the only provider that can give a job a Docker "
    "engine of its own",
    "privileged": "the job runs only on Kubernetes, the only provider that can make a container "
    "privileged",
}
# Names of dstack's backends that Cavvy's providers do not have.
_PROVIDERS = {"vastai": "vast", "datacrunch": "verda", "remote": "ssh"}
_SPOT = {"spot": SpotPolicy.ONLY, "auto": SpotPolicy.AUTO}
# Patterns of the catalog's names, with the compute capability of NVIDIA's GPUs
# (developer.nvidia.com/cuda-gpus), for dstack's key `compute_capability`. The first pattern that
# matches counts.
_CAPABILITIES = (
    (r"RTX-PRO-\d+|RTX50[5-9]\d\w*", (12, 0)),
    (r"G?B300", (10, 3)),
    (r"G?B200", (10, 0)),
    (r"G?H\d+(-\w+)?", (9, 0)),
    (r"L4|L40S?|RTX\d+-Ada|RTX40[5-9]\d\w*", (8, 9)),
    (r"A100|A800|A30", (8, 0)),
    (r"A\d+G?|RTX30\d\d\w*", (8, 6)),
    (r"T4G?|RTX[4568]000|RTX20\d\d\w*|GTX16\d\d\w*", (7, 5)),
    (r"V100", (7, 0)),
    (r"P100", (6, 0)),
    (r"P\d+|GTX10\d\d\w*", (6, 1)),
    (r"M\d+", (5, 2)),
    (r"K80", (3, 7)),
    (r"K520", (3, 0)),
)


def read_resources(table: Node, kept_keys: TranslationNotes) -> ResourceSpec:
    """Translate the resources of a configuration that has been checked."""
    needs = child(table, "resources")
    cpus = _read_cpus(needs, kept_keys)
    memory = _as_mib(range_of(child(needs, "memory"), read_size_mib) or MEMORY_MIB)
    if child(needs, "shm_size") is not None:
        reason = "the job can use all of a node's shared memory"
        kept_keys.note_at(needs, "resources.shm_size", reason)
    place = _read_place(table, kept_keys)
    request = ResourceSpec(
        accelerators=_read_accelerators(child(needs, "gpu"), _usual_vendor(table), kept_keys),
        cpus_min=cpus[0],
        cpus_max=cpus[1],
        memory_min_mib=memory[0],
        memory_max_mib=memory[1],
        disk_gib=_read_disk(needs, kept_keys),
        spot=_SPOT.get(text_at(table, "spot_policy") or "", SpotPolicy.NEVER),
        providers=place.providers,
        regions=place.regions,
        options=place.options,
        max_rate=read_price(table, "max_price"),
        implied=tuple(
            name
            for key, name in _IMPLIED
            if not isinstance(needs, MapNode) or needs.get(key) is None
        ),
    )
    types = dict.fromkeys(_texts(table, "instance_types"))
    named = tuple(replace(request, instance=each) for each in types) or (request,)
    return named[0] if len(named) == 1 else replace(named[0], any_of=named)


class _Place(Struct, frozen=True, kw_only=True):
    """Where a run may be placed, and its options for the provider there."""

    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    options: tuple[ProviderOptions, ...] = ()


def _read_place(table: Node, kept_keys: TranslationNotes) -> _Place:
    place = _Place(
        providers=_read_backends(table, kept_keys),
        # a zone is in a region, so the zones alone restrict the place
        regions=_texts(table, "availability_zones") or _texts(table, "regions"),
    )
    if child(table, "instances") is not None:
        place = _find_hosts(table, place, kept_keys)
    if child(table, "reservation") is not None:
        place = _reserve(table, place, kept_keys)
    options: dict[str, object] = {}
    if is_set(table, "docker"):
        options["docker"] = "all"
    elif is_set(table, "privileged"):
        options["pod"] = {"spec": {"containers": [{"securityContext": {"privileged": True}}]}}
    for key, reason in _PRIVILEGES.items():
        if is_set(table, key):
            place = _restrict(table, key, ("kubernetes",), reason, place, kept_keys)
    if not options:
        return place
    return replace(
        place,
        options=(
            *place.options,
            ProviderOptions(provider="kubernetes", values=json.dumps(options)),
        ),
    )


def _read_backends(table: Node, kept_keys: TranslationNotes) -> tuple[str, ...]:
    """Return the providers that `backends` permits. As in dstack, a backend that is not there is
    passed over, unless there is no other.
    """
    from cavvy.providers import registry

    named = dict.fromkeys(_PROVIDERS.get(each, each) for each in _texts(table, "backends"))
    found = tuple(each for each in named if each in registry.list_known())
    if missing := [each for each in named if each not in found]:
        reason = f"Cavvy has no provider {' or '.join(missing)}"
        if found:
            kept_keys.note_at(table, "backends", f"{reason}; the job may use {', '.join(found)}")
        else:
            kept_keys.refuse_at(table, "backends", f"{reason}; name another, or delete the key")
    return found


def _restrict(
    table: Node,
    key: str,
    able: tuple[str, ...],
    reason: str,
    place: _Place,
    kept_keys: TranslationNotes,
) -> _Place:
    """Restrict the place to the providers that are able to do what `key` says. If the file permits
    none of these providers, the key is refused.
    """
    there = tuple(each for each in able if each in (place.providers or able))
    if there:
        kept_keys.note_at(table, key, reason)
        return replace(place, providers=there)
    kept_keys.refuse_at(table, key, f"{reason}, and `backends` does not name it")
    return place


def _find_hosts(table: Node, place: _Place, kept_keys: TranslationNotes) -> _Place:
    """Restrict the place to hosts: the names of instances are the names of SSH hosts and joined
    machines.
    """
    names: list[str] = []
    for each in items(child(table, "instances")):
        name = (
            as_text(each)
            if isinstance(each, ScalarNode)
            else text_at(each, "name") or text_at(each, "hostname")
        )
        if name is not None:
            names.append(name)
            continue
        reason = "Cavvy has no fleets; write the `name` or `hostname` of the instance"
        if len(items(child(table, "instances"))) > 1:
            kept_keys.note(each.mark, "instances", f"this instance is not used: {reason}")
        else:
            kept_keys.refuse(each.mark, "instances", reason)
    reason = "the job runs only on SSH hosts and joined machines with these names"
    place = _restrict(table, "instances", ("ssh", "join"), reason, place, kept_keys)
    return replace(place, regions=tuple(names)) if names else place


def _reserve(table: Node, place: _Place, kept_keys: TranslationNotes) -> _Place:
    name = text_at(table, "reservation") or ""
    if name.startswith("cr-") or "gcp" not in (place.providers or ("gcp",)):
        reason = (
            "Cavvy uses the reservations and capacity blocks that the setting "
            "`providers.aws.reservations` names; add it there, and delete the key"
        )
        kept_keys.refuse_at(table, "reservation", reason)
        return place
    values = json.dumps({"reservation": name})
    place = replace(place, options=(ProviderOptions(provider="gcp", values=values),))
    reason = "the job runs only in this reservation of Google Cloud"
    return _restrict(table, "reservation", ("gcp",), reason, place, kept_keys)


def _texts(table: Node, key: str) -> tuple[str, ...]:
    return tuple(each.text for each in items(child(table, key)) if isinstance(each, ScalarNode))


def _as_mib(bounds: Range) -> tuple[int | None, int | None]:
    low, high = bounds
    return (round(low) if low is not None else None), (round(high) if high is not None else None)


def _read_cpus(needs: Node | None, kept_keys: TranslationNotes) -> Range:
    node = child(needs, "cpu")
    if node is None:
        return CPUS
    if isinstance(node, ScalarNode):
        arch, count = split_cpu(str(node.value)) or ("", "")
        bounds = read_range(count, to_int) if count else CPUS
    else:
        arch = (text_at(node, "arch") or "").lower()
        table = child(node, "count")
        plain = isinstance(node, MapNode) and any(
            key.text in ("min", "max") for key, _ in node.entries
        )
        bounds = range_of(node if plain else table, to_int) or CPUS
    if arch == "arm":
        kept_keys.refuse_at(needs, "resources.cpu", "a CPU architecture cannot be requested yet")
    return bounds or CPUS


def _read_disk(needs: Node | None, kept_keys: TranslationNotes) -> int | None:
    node = child(needs, "disk")
    if node is None and isinstance(needs, MapNode) and needs.get("disk") is not None:
        return None  # An empty value means that any size is accepted.
    size = child(node, "size") if isinstance(node, MapNode) else node
    low, high = range_of(size, read_size_mib) or DISK_MIB
    if high is not None and high != low:
        kept_keys.note_at(
            needs,
            "resources.disk",
            "the upper limit is ignored; the minimum size is used",
        )
    return None if low is None else -(-round(low) // 1024)


def _usual_vendor(table: Node) -> str:
    """Return the vendor of accelerators without a name and a vendor, or "" for any vendor. dstack's
    own image, which is used if the configuration names no image, supports only NVIDIA's.
    """
    is_own = child(table, "image") is None and not flag_at(table, "docker")
    return "nvidia" if is_own else ""


def _read_accelerators(
    node: Node | None, usual: str, kept_keys: TranslationNotes
) -> tuple[AcceleratorNeed, ...]:
    """Return the accelerators of each node. `usual` is the vendor if the file states neither a name
    nor a vendor.
    """
    gpu = read_gpu(node)
    if gpu is None or node is None:
        return ()
    if child(node, "total_memory") is not None:
        kept_keys.refuse(
            mark_of(node, "total_memory"),
            "resources.gpu.total_memory",
            "the memory of all accelerators together cannot be requested; write `memory` and "
            "`count`",
        )
    names = gpu.names
    if child(node, "compute_capability") is not None:
        names = _find_capable(node, gpu, kept_keys)
    count = _as_count(gpu.count)
    if count is None:
        return ()
    if not (read_range(gpu.count or COUNT, to_int) or (1, None))[0]:
        kept_keys.note(
            node.mark,
            "resources.gpu",
            "dstack would also accept a node without an accelerator; Cavvy requires at least one",
        )
    names = names or (gpu.vendor or usual,)
    found = [find_needs(name, count, _as_memory(gpu)) for name in names]
    problems = [each.problem for each in found if each.problem]
    for problem in problems:
        if len(problems) < len(found):
            kept_keys.note(node.mark, "resources.gpu", f"{problem}. Only the other names are used")
        else:
            kept_keys.refuse(node.mark, "resources.gpu", problem)
    return tuple(need for each in found for need in each.needs)


def _find_capable(node: Node, gpu: GpuRequest, kept_keys: TranslationNotes) -> tuple[str, ...]:
    """Return the names of NVIDIA's accelerators that have at least the compute capability."""
    asked = child(node, "compute_capability")
    parts = [each for each in (*items(asked), asked) if isinstance(each, ScalarNode)]
    major, minor = (int(each) for each in ".".join(map(as_text, parts)).strip().split("."))
    least = (major, minor)
    if gpu.names:
        names = tuple(each for each in gpu.names if (find_capability(each) or (0, 0)) >= least)
    else:
        names = list_capable(least) if gpu.vendor in ("", "nvidia") else ()
    where = mark_of(node, "compute_capability")
    if names:
        reason = f"the capability is at least {major}.{minor}: {listed(names, 'and')}"
        kept_keys.note(where, "resources.gpu.compute_capability", reason)
    else:
        reason = f"no accelerator of the file has at least the capability {major}.{minor}"
        kept_keys.refuse(where, "resources.gpu.compute_capability", reason)
    return names


def _as_count(text: str) -> str | None:
    """Return the number of accelerators in Cavvy's syntax, or None if no accelerator is needed.
    dstack's default is "one or more".
    """
    low, high = read_range(text or COUNT, to_int) or (1.0, None)
    if high == 0:
        return None
    least = max(1, int(low or 0))
    return (
        f"{least}.." if high is None else str(least) if least == high else f"{least}..{int(high)}"
    )


def _as_memory(gpu: GpuRequest) -> str:
    """Return the memory of an accelerator as a range in Cavvy's syntax, or "" if no amount is
    required.
    """
    if not gpu.memory:
        return ""
    low, high = read_range(gpu.memory, read_size_mib) or (None, None)
    ends = [f"{round(end)}MB" if end is not None else "" for end in (low, high)]
    return "..".join(ends)


def find_capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability of an accelerator of the catalog, or None if it is unknown."""
    found = (
        capability
        for pattern, capability in _CAPABILITIES
        if re.fullmatch(pattern, name, re.IGNORECASE)
    )
    return next(found, None)


def list_capable(least: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of NVIDIA's accelerators with at least this capability, one for each
    family.
    """
    from cavvy.catalog.accelerators import Vendor, list_accelerators

    return tuple(
        dict.fromkeys(
            each.family or each.name
            for each in list_accelerators()
            if each.vendor is Vendor.NVIDIA and (find_capability(each.name) or (0, 0)) >= least
        )
    )
