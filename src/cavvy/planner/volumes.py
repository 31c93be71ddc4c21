"""Whether an offer can have the volumes that a task names: a cloud's disk can be had in its own
zone alone.
"""

from collections.abc import Collection, Sequence

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, Task, VolumeKind


def explain_misplaced(
    task: Task, offer: Offer, volumes: Sequence[VolumeLocation], blind: Collection[str] = ()
) -> Objection | None:
    """Why nodes of the offer cannot have a volume of the task; None where they can.

    An offer of a whole region can have it: its provider then starts the nodes in the volume's zone.
    It is unknown where volumes of a `blind` provider are, and none is made a second time elsewhere.
    """
    bound: set[str | None] = set()  # the zones in which every volume so far is
    first = ""
    own = [each for each in volumes if each.provider == offer.provider]
    for name in [v.source for v in task.volumes if v.kind is VolumeKind.NAMED and v.keep]:
        if offer.provider in blind:
            return Objection("volumes", f"where {name} is cannot be seen now")
        known = [each for each in own if name in each.names]
        if away := _explain_elsewhere(offer, name, known):
            return away
        zones = {each.zone for each in known if each.region == offer.region}
        if not zones or None in zones:
            continue
        if bound and not bound & zones:
            return Objection(
                "volumes",
                f"{first} and {name} are in different zones of {offer.region}, and a node is in "
                "one",
            )
        bound, first = (bound & zones if bound else zones), first or name
    return None


def _explain_elsewhere(
    offer: Offer, name: str, known: Sequence[VolumeLocation]
) -> Objection | None:
    if not known or any(_within(offer, each) for each in known):
        return None
    where = ", ".join(dict.fromkeys(each.zone or each.region for each in known))
    return Objection("volumes", f"{name} is in {where}, and can be used only there")


def _within(offer: Offer, volume: VolumeLocation) -> bool:
    return volume.region == offer.region and (
        None in (volume.zone, offer.zone) or volume.zone == offer.zone
    )
