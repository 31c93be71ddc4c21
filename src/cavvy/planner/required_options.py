"""Rejects offers that require a provider's option that the task does not state."""

import json

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec


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
