"""Marks the offers on which only a task with a machine image of its own can run, because the
provider maintains no image with a driver for the offer's accelerator.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from cavvy.domain.offers import Offer, RequiredOption
from cavvy.providers.base import Refused

OPTION = "image"


def require_images(
    offers: Iterable[Offer], named: object, find_default: Callable[[Offer], object]
) -> list[Offer]:
    """The offers, each with the option `image` as required if `find_default`, which finds the
    provider's own image for an offer, raises Refused. If the settings name an image (`named`), no
    offer requires the option.
    """
    if named:
        return list(offers)
    known: dict[tuple[str, str | None, str], str] = {}
    found = []
    for each in offers:
        kind = each.instance_type, each.accelerator, each.architecture
        if kind not in known:
            known[kind] = _explain(each, find_default)
        reason = known[kind]
        found.append(replace(each, requires=RequiredOption(OPTION, reason)) if reason else each)
    return found


def _explain(offer: Offer, find_default: Callable[[Offer], object]) -> str:
    try:
        find_default(offer)
    except Refused as error:
        return str(error)
    return ""
