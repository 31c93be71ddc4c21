"""Rejects offers whose quotas, options, software or volumes do not suit a task, and offers and
images that the policies of a project forbid.

Handles machines with several hosts that are rented together, such as slices of TPUs: requests a
node for each host, rejects offers if the task's nodes do not use whole machines, and describes the
hosts to users.
"""

import json
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from cavvy.agent.images import vendors
from cavvy.catalog.accelerators import AcceleratorKind, find_accelerator, is_match
from cavvy.catalog.needs import NeedError, parse_accelerator
from cavvy.catalog.regions import is_region
from cavvy.catalog.tpu_slices import find_requested, find_slice, spread_slices
from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer, list_sellers
from cavvy.domain.policies import BoundPolicy, name_key
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind
from cavvy.domain.units import format_rate
from cavvy.domain.values import replace


def explain_unsuitable(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return why the offer does not suit the task wherever its volumes are, or None if it does."""
    return (
        explain_slice(task, offer)
        or explain_missing_option(task, offer)
        or explain_software(task, offer)
        or explain_quota(task, offer)
    )


def explain_quota(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return why the quotas are too small for the task's nodes on this offer even if nothing else
    runs, or None if the quotas are large enough. An offer whose quota is too small only because of
    current use is not rejected.
    """
    if offer.quota_nodes is None or task.nodes <= offer.quota_nodes:
        return None
    nodes = "a node needs" if task.nodes == 1 else f"{task.nodes} nodes need"
    return Objection(
        "nodes" if offer.quota_nodes else "resources",
        f"{nodes} more {offer.instance_type} than {offer.quota_text or 'the quota'} allows; "
        f"`cavvy nodes quota {offer.provider} --request` prints the command that requests more",
    )


def explain_missing_option(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return the reason why the offer cannot run the task. Return None if the offer requires no
    option, or if the task states the required option.
    """
    required = offer.requires
    if required is None:
        return None
    stated = (each for each in task.resources.options if each.provider == offer.provider)
    if any(json.loads(each.values).get(required.name) for each in stated):
        return None
    return Objection(f"resources.options.{offer.provider}.{required.name}", required.reason)


_find_packages = lru_cache(maxsize=256)(vendors.find_packages)


def explain_software(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return why the task's setup or image cannot use the offer's accelerators. Returns None if
    they can, as far as the task shows. Only the node can check the driver and the files that the
    setup reads.
    """
    known = find_accelerator(offer.accelerator) if offer.accelerator else None
    if known is None or known.accelerator.kind is AcceleratorKind.FPGA:
        return None
    chip = known.accelerator
    reason = vendors.explain_packages(
        _find_packages(task.setup or ""), chip.vendor, inf1=chip.name == "Inferentia"
    )
    if reason:
        return Objection("setup", f"{chip.name}: {reason}")
    if task.image and (reason := vendors.explain_image(task.image, chip.vendor)):
        return Objection("image", f"{chip.name}: {reason}")
    return None


def explain_misplaced(
    task: TaskSpec,
    offer: Offer,
    volumes: Sequence[VolumeLocation],
    blind: Collection[str] = (),
    *,
    unlisted: Collection[str] = (),
    makers: Collection[str] = (),
) -> Objection | None:
    """Return why nodes of the offer cannot use a volume of the task, or None if they can use all of
    its volumes.

    An offer for a whole region can use volumes in any zone of the region, because the provider
    starts the nodes in the volume's zone. A provider in `blind` did not report the locations of its
    volumes. If `blind` contains the offer's provider, the offer is rejected, because Cavvy could
    otherwise create a volume that already exists elsewhere. `unlisted` are the providers that have
    volumes and never report them, and `makers` those that make a volume although the task states no
    size, which says that it exists: their offers are rejected if another provider that the task may
    use has it, or may have it. Volumes of other projects do not count.
    """
    bound: set[str | None] = set()  # the zones that have all volumes that were checked so far
    first = ""
    volumes = [each for each in volumes if each.project in ("", task.project)]
    own = [each for each in volumes if each.provider == offer.provider]
    for volume in [v for v in task.volumes if v.kind is VolumeKind.NAMED and v.keep]:
        name = volume.source
        if offer.provider in blind:
            return Objection("volumes", f"the location of {name} is currently unknown")
        known = [each for each in own if name in each.names]
        if volume.size_gib is None and offer.provider in makers:
            having = {each.provider for each in volumes if name in each.names}
            if known:
                if doubt := _explain_twice(task, name, having):
                    return doubt
            elif doubt := _explain_made(task, offer, name, having, blind, unlisted):
                return doubt
        if away := _explain_elsewhere(offer, name, known):
            return away
        zones = {each.zone for each in known if each.region == offer.region}
        if not zones or None in zones:
            continue
        if bound and not bound & zones:
            return Objection(
                "volumes",
                f"{first} and {name} are in different zones of {offer.region}, but a node can use "
                "only the volumes of its own zone",
            )
        bound, first = (bound & zones if bound else zones), first or name
    return None


def _explain_twice(task: TaskSpec, name: str, having: Collection[str]) -> Objection | None:
    """Return why the task must state which of the volumes of one name it means, or None if the
    providers that it may use have only one."""
    named = list_sellers(task.resources.providers)
    found = sorted(each for each in having if not named or each in named)
    if len(found) < 2:
        return None
    return Objection(
        "volumes",
        f"{' and '.join(found)} each have a volume {name}; name one of them in "
        "`resources.providers`",
    )


def _explain_made(
    task: TaskSpec,
    offer: Offer,
    name: str,
    having: Collection[str],
    blind: Collection[str],
    unlisted: Collection[str],
) -> Objection | None:
    """Return why a volume must not be made where it does not exist, or None if no other provider
    that the task may use has it, or may have it."""
    named = list_sellers(task.resources.providers)

    def find(providers: Collection[str]) -> list[str]:
        return sorted(each for each in providers if not named or each in named)

    if others := find(having):
        return Objection(
            "volumes",
            f"{name} is a volume of {' and '.join(others)}; state its `size` for another one of "
            f"this name at {offer.provider}",
        )
    if find(blind):
        return Objection("volumes", f"the location of {name} is currently unknown")
    if others := find(unlisted):
        return Objection(
            "volumes",
            f"{name} may be a volume of {' or '.join(others)}; for a new one here, name only "
            f"`{offer.provider}` in `resources.providers`, or state the volume's `size`",
        )
    return None


def say_bound(task: TaskSpec, offers: Sequence[Offer], volumes: Sequence[VolumeLocation]) -> str:
    """Return which hosts the task's volumes bind it to, such as "only h1 has the volume models";
    "" if it has no volume that is on one of the offers' hosts."""
    hosts = {(each.provider, each.zone) for each in offers if each.shared and each.zone}
    if not hosts:
        return ""
    names = [each.source for each in task.volumes if each.kind is VolumeKind.NAMED and each.keep]
    told = [
        f"only {each.zone} has the volume {name}"
        for name in names
        for each in volumes
        if name in each.names
        and each.project in ("", task.project)
        and (each.provider, each.zone) in hosts
    ]
    return " and ".join(dict.fromkeys(told))


def _explain_elsewhere(
    offer: Offer, name: str, known: Sequence[VolumeLocation]
) -> Objection | None:
    if not known or any(_within(offer, each) for each in known):
        return None
    if problem := next((each.problem for each in known if each.problem), ""):
        return Objection("volumes", f"{name} is on {problem}")
    where = ", ".join(dict.fromkeys(each.zone or each.region for each in known))
    return Objection("volumes", f"{name} is in {where} and can be used only there")


def _within(offer: Offer, volume: VolumeLocation) -> bool:
    return volume.region == offer.region and (
        None in (volume.zone, offer.zone) or volume.zone == offer.zone
    )


def explain_slice(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return an objection if the task's number of nodes does not fill whole machines of the offer;
    otherwise return None. A machine, such as a slice of TPUs, may have several hosts.
    """
    if task.nodes % offer.hosts == 0:
        return None
    return Objection(
        "nodes",
        f"{offer.instance_type} has {offer.hosts} hosts, which are rented together; set `nodes` "
        f"to {offer.hosts} or a multiple of {offer.hosts}",
    )


def spread_task(task: TaskSpec) -> TaskSpec:
    """Return the task with one node for each host, if each node of the task stands for a TPU slice
    that has several hosts. Otherwise return the task unchanged.
    """
    found = spread_slices(task.resources)
    if found.hosts == 1:
        return task
    work = task.work and replace(task.work, measured_on=_spread_device(task.work.measured_on))
    return replace(task, resources=found.needs, nodes=task.nodes * found.hosts, work=work)


def _spread_device(measured_on: str | None) -> str | None:
    """If `measured_on` is a whole slice, such as TPU-v5e:16, return the accelerators of one of its
    nodes, such as TPU-v5e:4. Return other values unchanged.
    """
    try:
        needs = parse_accelerator(measured_on) if measured_on else ()
    except NeedError:  # CPUs
        needs = ()
    kind = find_requested(needs[0]) if len(needs) == 1 else None
    return f"{kind.accelerator}:{kind.chips // kind.hosts}" if kind else measured_on


def describe_slice(task: TaskSpec) -> str:
    """Describe the slices whose hosts are the task's nodes, such as "the 4 hosts of a TPU slice
    v5litepod-16 (16 chips)". The result is "" if the task does not name a slice of several hosts.
    """
    kinds = [find_slice(each.instance or "") for each in task.resources.choices]
    known = [each for each in kinds if each is not None and each.hosts > 1]
    if len(known) < len(kinds) or len({each.hosts for each in known}) != 1:
        return ""
    hosts, count = known[0].hosts, task.nodes // known[0].hosts
    names = " or ".join(f"{each.type} ({each.chips} chips)" for each in known)
    if count == 1:
        return f"the {hosts} hosts of a TPU slice {names}"
    return f"the hosts of {count} TPU slices {names}, {hosts} hosts each"


def note_slice(offer: Offer) -> str:
    """Return a note about an offer of a host that is rented together with other hosts; "" for other
    offers.
    """
    if offer.hosts == 1:
        return ""
    chips = offer.accelerator_count * offer.hosts
    return (
        f"a host of a slice of {chips} {offer.accelerator} chips; the slice's {offer.hosts} hosts "
        f"are nodes and cost {format_rate(offer.rate.times(offer.hosts))} together"
    )


_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
# the registry and the folder that container engines add to a name without them
_HUB, _OFFICIAL = "docker.io", "library"


def explain_policy(
    policies: Sequence[BoundPolicy], task: TaskSpec, offer: Offer
) -> Objection | None:
    """Return why the policies forbid the task on this offer, or None if the policies allow it."""
    for bound in policies:
        if refusal := _explain_offer(bound, task, offer):
            return refusal
    return explain_image(policies, task) or explain_signatures(policies, task)


def explain_image(policies: Sequence[BoundPolicy], task: TaskSpec) -> Objection | None:
    """Return why the policies forbid the task's image, or None if they permit the image or the task
    has no image.
    """
    for bound in policies:
        policy, image = bound.policy, task.image
        restricts = policy.images or policy.image_digests or policy.signed_by
        if task.image_build is not None and restricts:
            return Objection("image", f"{bound.owner} permits no images that a node builds")
        if image is None:
            continue
        if policy.images and not _is_listed(image, policy.images):
            return Objection(
                "image", f"{bound.owner} permits only the images {_join(policy.images)}"
            )
        if policy.image_digests and not _DIGEST.fullmatch(image):
            return Objection(
                "image",
                f"{bound.owner} permits only images named by their digest, such as "
                f"{name_image(image)}@sha256:…",
            )
    return None


def explain_signatures(policies: Sequence[BoundPolicy], task: TaskSpec) -> Objection | None:
    """Return why the policies reject the verified signatures of the task's image, or None if the
    policies accept the signatures or the task has no image. Signatures are verified when a task is
    submitted, not by this function.
    """
    for bound in policies:
        keys = [name_key(each) for each in bound.policy.signed_by]
        if not keys or task.image is None:
            continue
        if not _DIGEST.fullmatch(task.image) or set(keys).isdisjoint(task.image_signers):
            return Objection(
                "image",
                f"{bound.owner} permits only images that are signed with the key "
                f"{' or '.join(keys)}; when the task was submitted, no such signature of "
                f"{task.image} was verified",
            )
    return None


def name_image(image: str) -> str:
    """Return the image's registry and repository, without its tag and digest. A name without a
    registry belongs to Docker Hub, as for container engines.
    """
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    name = f"{head}{slash}{last.partition(':')[0]}"
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        if first not in (_HUB, f"index.{_HUB}"):
            return name
        name = rest
    return f"{_HUB}/{name}" if "/" in name else f"{_HUB}/{_OFFICIAL}/{name}"


def _is_listed(image: str, patterns: Sequence[str]) -> bool:
    name = name_image(image)
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns
    )


def _explain_offer(bound: BoundPolicy, task: TaskSpec, offer: Offer) -> Objection | None:
    policy = bound.policy
    if policy.providers and not offer.is_of(policy.providers):
        return Objection(
            "resources.providers",
            f"{bound.owner} permits only the providers {_join(policy.providers)}",
        )
    if policy.regions and not any(
        is_region(each, offer.provider, offer.region, offer.zone) for each in policy.regions
    ):
        return Objection(
            "resources.regions", f"{bound.owner} permits only the regions {_join(policy.regions)}"
        )
    if policy.max_rate is not None and offer.rate > policy.max_rate:
        return Objection(
            "resources", f"{bound.owner} permits at most {format_rate(policy.max_rate)} a node"
        )
    whole = not offer.shared or task.resources.uses_accelerators(offer.shared)
    device = offer.accelerator if whole else None
    if (
        policy.accelerators
        and device is not None
        and not any(is_match(device, each) for each in policy.accelerators)
    ):
        return Objection(
            "resources.gpu", f"{bound.owner} permits only the GPUs {_join(policy.accelerators)}"
        )
    return None


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
