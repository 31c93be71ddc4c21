"""Checks whether nodes of an offer can use the volumes of a task. A cloud's disk can be attached
only in its own zone.
"""

from collections.abc import Collection, Sequence

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind


def explain_misplaced(
    task: TaskSpec, offer: Offer, volumes: Sequence[VolumeLocation], blind: Collection[str] = ()
) -> Objection | None:
    """Return why nodes of the offer cannot use a volume of the task, or None if they can use all of
    its volumes.

    An offer for a whole region can use volumes in any zone of the region, because the provider
    starts the nodes in the volume's zone. A provider in `blind` did not report the locations of its
    volumes. If `blind` contains the offer's provider, the offer is rejected, because Cavvy could
    otherwise create a volume that already exists elsewhere.
    """
    bound: set[str | None] = set()  # the zones that have all volumes that were checked so far
    first = ""
    own = [each for each in volumes if each.provider == offer.provider]
    for name in [v.source for v in task.volumes if v.kind is VolumeKind.NAMED and v.keep]:
        if offer.provider in blind:
            return Objection("volumes", f"the location of {name} is currently unknown")
        known = [each for each in own if name in each.names]
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


def _explain_elsewhere(
    offer: Offer, name: str, known: Sequence[VolumeLocation]
) -> Objection | None:
    if not known or any(_within(offer, each) for each in known):
        return None
    where = ", ".join(dict.fromkeys(each.zone or each.region for each in known))
    return Objection("volumes", f"{name} is in {where} and can be used only there")


def _within(offer: Offer, volume: VolumeLocation) -> bool:
    return volume.region == offer.region and (
        None in (volume.zone, offer.zone) or volume.zone == offer.zone
    )
