"""Finds the image of a job: the image in the task, in the task's options, or in the settings."""

import json
from collections.abc import Mapping, Sequence

from cavvy.domain.tasks import Objection, Scalar, TaskSpec
from cavvy.providers.base import Feature, GangSpec, Manifest, Refused


def find_image(provider: str, gang: GangSpec, settings: Mapping[str, Scalar]) -> str:
    """Return the image of a gang. Raises Refused if neither the task, its options nor the settings
    name an image."""
    image = gang.image or gang.options.get("image") or settings.get("image")
    if not image:
        raise Refused(
            f"[providers.{provider}] image: no image is set; set one here, or in the task's `image`"
        )
    return str(image)


def object_to_missing_image(
    manifest: Manifest, task: TaskSpec, settings: Mapping[str, Scalar]
) -> Sequence[Objection]:
    """Return the objection to a task without a named image, or () if an image is named or the
    service has its own image.
    """
    stated = [each for each in task.resources.options if each.provider == manifest.name]
    if task.image or settings.get("image") or Feature.IMAGE in manifest.unsupported:
        return ()
    if any(json.loads(each.values).get("image") for each in stated):
        return ()
    reason = f"{manifest.title} needs an image; set `image`, or [providers.{manifest.name}] image"
    return [Objection("image", reason)]
