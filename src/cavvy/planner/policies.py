"""Rejects offers and images that the policies of a project forbid."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from cavvy.catalog.accelerators import is_match
from cavvy.catalog.regions import is_region
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy, name_key
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import format_rate

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
