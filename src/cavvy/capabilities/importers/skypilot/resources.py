"""Translates SkyPilot's `resources`. If possible, the alternatives in `resources` are merged into
one set of resources; otherwise the result has several alternatives.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product

from cavvy.capabilities.importers.common_fields import (
    BARE_SIZES,
    TranslatedNeeds,
    find_needs,
    read_price,
    read_tags,
)
from cavvy.capabilities.importers.readers import (
    as_text,
    child,
    entries,
    flag_at,
    int_at,
    items,
    text_at,
)
from cavvy.capabilities.importers.skypilot.needs import (
    DEFAULT_DISK_GIB,
    read_cpus,
    read_memory,
    read_size,
    split_accelerator,
)
from cavvy.domain.tasks import (
    AcceleratorNeed,
    ProviderOptions,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
)
from cavvy.domain.values import Struct, field, replace
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.problems import SourceMark
from cavvy.spec.support import read_options
from cavvy.spec.tree import MapNode, Node, ScalarNode, to_value

# Keys that do not affect the work, with the reasons
_NOTED = {
    "ports": "ports are not public; `cavvy forward NAME PORT` forwards one to this machine",
    "network_tier": "this is only a preference; Cavvy uses the provider's usual network",
    "autostop": "nodes are released when the job ends; `--machine NAME --keep TIME` keeps them",
    "ephemeral_storage": "SkyPilot no longer reads this key",
    "_no_missing_accel_warnings": "the key only concerns SkyPilot itself",
    "_is_image_managed": "the key only concerns SkyPilot itself",
    "_requires_fuse": "the key only concerns SkyPilot itself",
}
_REFUSED = {
    "volumes": "volumes are not attached yet",
    "local_disk": "a local disk cannot be requested yet",
    "priority_class": "a Kubernetes priority class is not passed on yet",
    "_docker_login_config": "registry credentials are not passed on yet",
    "_cluster_config_overrides": "SkyPilot's settings have no meaning in Cavvy",
}

# The region within the name of an AWS zone (us-east-1a) or a Google Cloud zone (us-east1-b)
_REGION_OF_ZONE = re.compile(r"^([a-z]+(?:-[a-z]+)+-?\d+)(?:[a-z]|-[a-z])$")
# Clouds whose nodes are containers, so that an image's name without `docker:` is a container image
_CONTAINER_CLOUDS = {"kubernetes", "runpod", "vast", "yotta"}
_DISK_TYPES = {"low": "standard", "high": "gp3"}


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """The translation of `resources`, including the parts that are in other sections of a Cavvy
    task.
    """

    resources: ResourceSpec = field(default_factory=ResourceSpec)
    image: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    retry: RetryPolicy = field(default_factory=RetryPolicy)


def read_request(node: Node | None, kept_keys: TranslationNotes) -> ResourceRequest:
    """Translate a `resources` table that has been checked."""
    if not isinstance(node, MapNode):
        return ResourceRequest()
    alternatives = _list_alternatives(node)
    spare = any(_is_known(each) for each in alternatives)
    wishes = [_read_one(each, kept_keys, spare=spare) for each in alternatives]
    ordered = len(wishes) > 1 and _has_order(node)
    combined = None if ordered else _combine([request.resources for request in wishes])
    if combined is None:
        found = tuple(dict.fromkeys(request.resources for request in wishes))
        combined = found[0] if len(found) < 2 else replace(found[0], any_of=found, ordered=ordered)
    first = wishes[0]
    if any(request.image != first.image for request in wishes):
        kept_keys.refuse(
            node.mark,
            "resources.image_id",
            "alternatives cannot have different images",
        )
    if any(
        (request.tags, request.priority, request.retry) != (first.tags, first.priority, first.retry)
        for request in wishes
    ):
        kept_keys.refuse(
            node.mark,
            "resources",
            "labels, priority and recovery belong to the job, not to an alternative",
        )
    return replace(first, resources=combined)


def add_options(needs: ResourceSpec, options: tuple[ProviderOptions, ...]) -> ResourceSpec:
    """Add options to every alternative of the resources."""
    found = tuple(replace(each, options=(*each.options, *options)) for each in needs.any_of)
    return replace(needs, options=(*needs.options, *options), any_of=found)


def list_clouds(needs: ResourceSpec) -> set[str]:
    """Return the clouds that the resources permit, under the names that SkyPilot uses. For
    SkyPilot, both of Google's APIs are one cloud.
    """
    named = {name for each in needs.choices for name in each.providers}
    return {"gcp" if name == "tpu" else name for name in named}


def _list_alternatives(node: MapNode) -> list[MapNode]:
    base = MapNode(
        mark=node.mark, entries=tuple(each for each in node.entries if each[0].text not in _CHOICES)
    )
    for key in _CHOICES:
        choices = [each for each in items(child(node, key)) if isinstance(each, MapNode)]
        if choices:
            tables = [single for each in choices for single in _split(_overlay(base, each))]
            break
    else:
        tables = list(_split(base))
    return [single for each in tables for single in _split_by_region(each)]


def _has_order(node: MapNode) -> bool:
    """Return whether the alternatives are ordered. The entries of `ordered` and of a YAML list of
    accelerators are ordered; the entries of a YAML set (in braces) are not.
    """
    return bool(items(child(node, "ordered"))) or len(items(child(node, "accelerators"))) > 1


_CHOICES = ("any_of", "ordered")


def _overlay(base: MapNode, over: MapNode) -> MapNode:
    """Return a table with the keys of `base` and of `over`, the table of one alternative. If both
    tables have a key, the value comes from `over`. Labels are merged.
    """
    labels, more = child(base, "labels"), child(over, "labels")
    table = {key.text: (key, value) for key, value in (*base.entries, *over.entries)}
    if isinstance(labels, MapNode) and isinstance(more, MapNode):
        table["labels"] = (table["labels"][0], _overlay(labels, more))
    return MapNode(mark=over.mark, entries=tuple(table.values()))


def _split(table: MapNode) -> Iterator[MapNode]:
    """Yield a separate table for each accelerator that the given table accepts."""
    node = child(table, "accelerators")
    mark = mark_of(table, "accelerators")
    match node:
        case MapNode():
            names = [
                key.text if value.value is None else f"{key.text}:{as_text(value)}"
                for key, value in node.entries
                if isinstance(value, ScalarNode)
            ]
        case ScalarNode():
            names = [node.text]
        case _:
            names = [each.text for each in items(node) if isinstance(each, ScalarNode)]
    rest = tuple(each for each in table.entries if each[0].text != "accelerators")
    if not names:
        yield MapNode(mark=table.mark, entries=rest)
    for name in names:
        pair = (_scalar("accelerators", mark), _scalar(name, node.mark if node else mark))
        yield MapNode(mark=table.mark, entries=(*rest, pair))


def _split_by_region(table: MapNode) -> Iterator[MapNode]:
    """Yield one table for each region that has a separate machine image. A table whose own region
    has no image is yielded unchanged, and refused later.
    """
    cloud, region, zone = _list_place(table)
    images = [
        (key, value)
        for key, value in entries(child(table, "image_id"))
        if isinstance(value, ScalarNode) and not value.text.startswith(("docker:", "skypilot:"))
    ]
    docker = [pair for pair in images if pair[0].text == "docker"]
    fitting = [pair for pair in images if pair[0].text != "docker" and region in ("", pair[0].text)]
    if not fitting:
        yield table
        return
    gone = ("cloud", "region", "zone", "infra", "image_id")
    others = tuple(each for each in table.entries if each[0].text not in gone)
    for key, value in fitting:
        where = _scalar(f"{cloud}/{key.text}" + (f"/{zone}" if zone else ""), key.mark)
        image = MapNode(mark=key.mark, entries=(*docker, (key, value)))
        here = ((_scalar("infra", key.mark), where), (_scalar("image_id", key.mark), image))
        yield MapNode(mark=table.mark, entries=(*others, *here))


def _list_place(table: MapNode) -> tuple[str, str, str]:
    """Return the cloud, the region and the zone as the file states them, or "" for each."""
    infra = text_at(table, "infra") or text_at(table, "cloud") or ""
    cloud, region, zone = [*infra.split("/", 2), "", ""][:3]
    region, zone = text_at(table, "region") or region, text_at(table, "zone") or zone
    return cloud, region.strip("*"), zone.strip("*")


def _scalar(text: str, mark: SourceMark) -> ScalarNode:
    return ScalarNode(mark=mark, text=text, value=text)


def _read_one(table: MapNode, kept_keys: TranslationNotes, *, spare: bool) -> ResourceRequest:
    """Translate one alternative. If `spare` is true, the file lists another alternative, so an
    unknown accelerator causes only a note.
    """
    kept_keys.keep_listed((key for key, _ in entries(table)), _REFUSED, _NOTED, "resources.")
    providers, regions, zone = _read_location(table, kept_keys)
    cpus, memory, per_cpu = _read_amounts(table)
    image, machine = _read_image(table, providers, regions, kept_keys)
    options = {"image": machine, "zone": zone, **_read_tpu(table, kept_keys)}
    resources = ResourceSpec(
        instance=text_at(table, "instance_type"),
        accelerators=_read_accelerators(table, kept_keys, spare=spare),
        cpus_min=cpus[0],
        cpus_max=cpus[1],
        memory_min_mib=memory[0],
        memory_max_mib=memory[1],
        memory_per_cpu_mib=per_cpu,
        disk_gib=_read_disk(table),
        disk_type=_read_tier(table, kept_keys),
        spot=SpotPolicy.ONLY if flag_at(table, "use_spot") else SpotPolicy.NEVER,
        providers=providers,
        regions=regions,
        max_rate=read_price(table, "max_hourly_cost"),
        options=_make_options(providers, options),
    )
    return ResourceRequest(
        resources=_add_tpu_provider(resources),
        image=image,
        tags=read_tags(table, "labels"),
        priority=_read_priority(table, kept_keys),
        retry=_read_recovery(table, kept_keys),
    )


def _make_options(
    providers: tuple[str, ...], options: Mapping[str, object]
) -> tuple[ProviderOptions, ...]:
    """Return the options of each provider. Unset options are left out."""
    values = json.dumps({name: value for name, value in options.items() if value is not None})
    if values == "{}":
        return ()
    return tuple(ProviderOptions(provider=name, values=values) for name in providers)


def _read_location(
    table: MapNode, kept_keys: TranslationNotes
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Return the providers, the regions, and the zone."""
    infra = text_at(table, "infra")
    if infra is None:
        cloud, region, zone = (text_at(table, key) or "" for key in ("cloud", "region", "zone"))
    else:
        cloud, _, region = infra.partition("/")
        zone = ""
        if cloud.lower() not in ("k8s", "kubernetes", "ssh"):
            region, _, zone = region.partition("/")
    cloud = {"k8s": "kubernetes", "*": ""}.get(cloud.lower(), cloud.lower())
    region, zone = region.strip("*"), zone.strip("*")
    if zone and cloud in ("slurm", "gcp"):
        # Offers of Slurm are for one partition, and offers of Google for one zone; `regions`
        # accepts both.
        region, zone = f"{region}/{zone}" if cloud == "slurm" else zone, ""
    elif zone and not cloud:
        key = "resources.zone" if infra is None else "resources.infra"
        kept_keys.refuse_at(
            table,
            key,
            f"the zone {zone} is set without its cloud; add the cloud, as in `infra: aws`",
        )
    elif zone and not region:
        region = "".join(_REGION_OF_ZONE.findall(zone))
    cloud = cloud or _find_tpu_cloud(table)
    return ((cloud,) if cloud else ()), ((region,) if region else ()), zone or None


def _find_tpu_cloud(table: MapNode) -> str:
    """Return the cloud that the name of a TPU implies, as in SkyPilot: names with one of two
    endings belong to GKE. Returns "" if there is no TPU.
    """
    name = (text_at(table, "accelerators") or "").lower()
    if "tpu" not in name:
        return ""
    at_gke = name.partition(":")[0].endswith(("slice", "device"))
    return "kubernetes" if at_gke else "gcp"


def _add_tpu_provider(needs: ResourceSpec) -> ResourceSpec:
    """If the resources request TPUs at Google, add the provider of the Cloud TPU API, and return
    the result. Compute Engine has no machine types for most slices.
    """
    if needs.providers != ("gcp",) or not any(map(_is_tpu, needs.accelerators)):
        return needs
    runtime = read_options(needs, "gcp").get("runtime_version")
    options = () if runtime is None else _make_options(("tpu",), {"runtime": runtime})
    return replace(needs, providers=("gcp", "tpu"), options=(*needs.options, *options))


def _is_tpu(need: AcceleratorNeed) -> bool:
    return (need.name or "").startswith("TPU-")


_Bounds = tuple[float | None, float | None]


def _read_amounts(table: MapNode) -> tuple[_Bounds, tuple[int | None, int | None], int | None]:
    """Return the bounds of the number of CPUs, the bounds of the memory in MiB, and the minimum
    memory per CPU in MiB.
    """
    cpus = read_cpus(text_at(table, "cpus") or "")
    memory = read_memory(text_at(table, "memory") or "")
    many: _Bounds = (None, None) if cpus is None else (cpus[0], None if cpus[1] else cpus[0])
    if memory is None:
        return many, (None, None), None
    mib = round(memory[0] * 1024)
    if memory[1] == "x":
        return many, (None, None), mib
    return many, (mib, None if memory[1] else mib), None


def _read_tier(table: MapNode, kept_keys: TranslationNotes) -> str | None:
    """Return the disk type that SkyPilot chooses on AWS for this disk tier, or None if there is
    none.
    """
    tier = (text_at(table, "disk_tier") or "").lower()
    kind = _DISK_TYPES.get(tier)
    if tier == "ultra":
        reason = "a disk with provisioned IOPS cannot be requested"
        kept_keys.refuse_at(table, "resources.disk_tier", reason)
    elif kind:
        reason = f"the disk type is {kind}, which only AWS has; its default speed is used"
        kept_keys.note_at(table, "resources.disk_tier", reason)
    elif tier:
        kept_keys.note_at(table, "resources.disk_tier", "the provider's default disk is used")
    return kind


def _read_disk(table: MapNode) -> int | None:
    size = read_size(text_at(table, "disk_size") or "")
    return None if size == DEFAULT_DISK_GIB else size


def _read_accelerators(
    table: MapNode, kept_keys: TranslationNotes, *, spare: bool
) -> tuple[AcceleratorNeed, ...]:
    text = text_at(table, "accelerators") or ""
    split = split_accelerator(text)
    if split is None:
        return ()
    mark, key = mark_of(table, "accelerators"), "resources.accelerators"
    if not split[2].is_integer():
        kept_keys.note(
            mark,
            key,
            f"{text} is rounded up to {math.ceil(split[2])}; to share a GPU, write it in Cavvy's "
            "own format, as in `gpu: A100:0.5`",
        )
    found = _find(*split)
    if found.problem and spare:
        kept_keys.note(
            mark, key, f"{found.problem}. Cavvy ignores this alternative and uses the others"
        )
    elif found.problem:
        kept_keys.refuse(mark, key, found.problem)
    return found.needs


def _read_tpu(table: MapNode, kept_keys: TranslationNotes) -> dict[str, object]:
    """Return the options for Google's TPUs."""
    options = {
        key.text: to_value(value) for key, value in entries(child(table, "accelerator_args"))
    }
    if options.pop("tpu_vm", True) is False:
        key = "resources.accelerator_args"
        kept_keys.refuse_at(table, key, "Google offers only TPU VMs now, no TPU nodes")
    return options


def _find(name: str, size: str, count: float) -> TranslatedNeeds:
    # For SkyPilot, `80GB` without a product is an exact size; for Cavvy, it is a minimum.
    memory = "" if not size else f"{size[:-1]}.." if size.endswith("+") else f"{size}..{size}"
    if not size and name.upper() in BARE_SIZES:
        memory = f"{BARE_SIZES[name.upper()]}GB"
    return find_needs(name, str(math.ceil(count)), memory)


def _is_known(table: MapNode) -> bool:
    """Return whether an alternative requests no accelerator or a supported accelerator."""
    split = split_accelerator(text_at(table, "accelerators") or "")
    return split is None or not _find(*split).problem


def _names(node: Node | None) -> list[str]:
    return [key.text for key, _ in entries(node)]


def _read_image(
    table: MapNode,
    providers: tuple[str, ...],
    regions: tuple[str, ...],
    kept_keys: TranslationNotes,
) -> tuple[str | None, str | None]:
    """Return the container image and the machine image."""
    node = child(table, "image_id")
    if node is None:
        return None, None
    values = _list_images(node)
    docker = values.pop("docker", "")
    boxes = [each for each in (docker, *values.values()) if each.startswith("docker:")]
    images = {each.removeprefix("docker:") for each in (docker, *boxes) if each}
    machines = [each for each in values.values() if each not in boxes]
    if machines and _CONTAINER_CLOUDS.intersection(providers) and not images:
        images, machines = set(machines), []
    mark, key = mark_of(table, "image_id"), "resources.image_id"
    if len(images) > 1:
        kept_keys.refuse(mark, key, "images cannot differ by region")
    image = min(images) if images else None
    usual = [each for each in machines if each.startswith("skypilot:")]
    if usual:
        kept_keys.note(
            mark, key, f"{usual[0]} is SkyPilot's own image; the provider's usual image is used"
        )
    elif machines and (problem := _find_image_problem(values, machines[0], providers, regions)):
        kept_keys.refuse(mark, key, problem)
    elif machines:
        return image, machines[0]
    return image, None


def _find_image_problem(
    values: Mapping[str, str], image: str, providers: tuple[str, ...], regions: tuple[str, ...]
) -> str:
    """Return why a machine image cannot be used, or "". The keys of `values` are regions."""
    if len(providers) != 1:
        return f"the machine image {image} exists in only one cloud: name the cloud in `infra`"
    if regions and not any(each.startswith(place) for each in regions for place in values):
        return f"no image is for {regions[0]}; add an entry for the region"
    return ""


def _list_images(node: Node) -> dict[str, str]:
    """Return the images by region. If the file names a single image, the key of the image is ""."""
    if isinstance(node, ScalarNode):
        return {"": node.text.strip()}
    pairs = entries(node)
    return {key.text: each.text.strip() for key, each in pairs if isinstance(each, ScalarNode)}


def _read_priority(table: MapNode, kept_keys: TranslationNotes) -> int:
    priority = int_at(table, "priority") or 0
    if abs(priority) > 100:
        kept_keys.note_at(
            table,
            "resources.priority",
            "priorities range from -100 to 100; the nearest valid value is used",
        )
        return 100 if priority > 0 else -100
    return priority


def _read_recovery(table: MapNode, kept_keys: TranslationNotes) -> RetryPolicy:
    node = child(table, "job_recovery")
    mark, key = mark_of(table, "job_recovery"), "resources.job_recovery"
    if node is None:
        return RetryPolicy()
    strategy = node.text if isinstance(node, ScalarNode) else text_at(node, "strategy")
    if strategy and strategy.lower() != "none":
        kept_keys.note(
            mark, key, "Cavvy chooses the next offer by price and capacity, for every strategy"
        )
    codes = child(node, "recover_on_exit_codes")
    values = [
        each.value
        for each in items(codes) or ((codes,) if codes else ())
        if isinstance(each, ScalarNode)
    ]
    tries = int_at(node, "max_restarts_on_errors")
    for name in _names(node):
        if name not in ("strategy", "max_restarts_on_errors", "recover_on_exit_codes"):
            kept_keys.refuse(mark, f"{key}.{name}", "a SkyPilot plugin defines this key")
    plain = (
        RetryPolicy(preemption=0, node=0)
        if strategy and strategy.lower() == "none"
        else RetryPolicy()
    )
    if not values:
        return replace(plain, exit=tries or 0)
    if tries:
        reason = (
            f"Cavvy restarts the job at most {tries} times after errors. Restarts after the exit "
            "codes in `recover_on_exit_codes` are included in this number"
        )
        kept_keys.note(mark, key, reason)
        return replace(plain, exit=tries)
    return replace(
        plain,
        exit=None,
        exit_codes=tuple(int(each) for each in values if isinstance(each, int | float)),
    )


# Merging alternatives into one


def _combine(found: list[ResourceSpec]) -> ResourceSpec | None:
    """Merge the alternatives into one set of resources that accepts exactly the same offers as the
    alternatives. Returns None if no single set of resources accepts exactly these offers.
    """
    plain = {
        replace(each, accelerators=(), providers=(), regions=(), spot=SpotPolicy.NEVER)
        for each in found
    }
    if len(plain) > 1:
        return None
    needs = list(dict.fromkeys(each.accelerators for each in found))
    places = list(dict.fromkeys((each.providers, each.regions) for each in found))
    spots = list(dict.fromkeys(each.spot for each in found))
    there = {(each.accelerators, (each.providers, each.regions), each.spot) for each in found}
    if there != set(product(needs, places, spots)) or (len(needs) > 1 and () in needs):
        return None
    if len(places) > 1 and not _is_product(places):
        return None
    return _join(found)


def _join(found: list[ResourceSpec]) -> ResourceSpec:
    """Merge the alternatives into one specification that accepts the accelerators, providers,
    regions and spot or on-demand instances of every alternative.
    """
    spots = {each.spot for each in found}
    return replace(
        found[0],
        accelerators=tuple(dict.fromkeys(need for each in found for need in each.accelerators)),
        providers=tuple(dict.fromkeys(name for each in found for name in each.providers)),
        regions=tuple(dict.fromkeys(name for each in found for name in each.regions)),
        spot=found[0].spot if len(spots) == 1 else SpotPolicy.AUTO,
    )


def _is_product(places: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> bool:
    """Return whether the alternatives contain every pair of a provider and a region. If a pair of a
    provider and a region is missing, a list of providers and a list of regions would also allow
    pairs that the file does not name. If some alternatives state a provider and others do not,
    return False. Regions are checked in the same way.
    """
    providers, regions = ({place[at] for place in places} for at in (0, 1))
    whole = all(len(names) == 1 or () not in names for names in (providers, regions))
    return whole and set(places) == set(product(providers, regions))
