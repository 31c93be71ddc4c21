"""Marks offers for which the task must name a machine image, because the provider has no image with
a driver for the offer's accelerator.
"""

from collections.abc import Callable, Iterable

from cavvy.domain.offers import Offer, RequiredOption
from cavvy.domain.values import replace
from cavvy.providers.base import Refused

OPTION = "image"


def require_images(
    offers: Iterable[Offer], named: object, find_default: Callable[[Offer], object]
) -> list[Offer]:
    """Return the offers. `find_default` finds the provider's own image for an offer. If
    `find_default` raises Refused for an offer, the offer requires the option `image`. If the
    settings name an image (`named`), no offer requires the option `image`.
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
