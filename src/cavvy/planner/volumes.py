"""Whether an offer can have the volumes that a task names: a cloud's disk can be had in its own
zone alone.
"""

from collections.abc import Collection, Sequence

from cavvy.domain.offers import Offer
from cavvy.domain.places import VolumePlace
from cavvy.domain.tasks import Task, VolumeKind


def explain_misplaced(
    task: Task, offer: Offer, volumes: Sequence[VolumePlace], blind: Collection[str] = ()
) -> str:
    """Why nodes of the offer cannot have a volume of the task, as "field: reason"; "" where nothing
    speaks against it.

    An offer of a whole region can have it: its provider then starts the nodes in the volume's zone.
    Of a `blind` provider nobody knows where volumes are, and none is made a second time elsewhere.
    """
    bound: set[str | None] = set()  # the zones in which every volume so far is
    first = ""
    for name in (
        each.source for each in task.volumes if each.kind is VolumeKind.NAMED and each.keep
    ):
        if offer.provider in blind:
            return f"volumes: where {name} is cannot be seen now"
        known = [each for each in volumes if each.provider == offer.provider and name in each.names]
        if known and not any(_within(offer, each) for each in known):
            where = ", ".join(dict.fromkeys(each.zone or each.region for each in known))
            return f"volumes: {name} is in {where}, and can be used only there"
        zones = {each.zone for each in known if each.region == offer.region}
        if not zones or None in zones:
            continue
        if bound and not bound & zones:
            return (
                f"volumes: {first} and {name} are in different zones of {offer.region}, and a "
                "node is in one"
            )
        bound, first = (bound & zones if bound else zones), first or name
    return ""


def _within(offer: Offer, volume: VolumePlace) -> bool:
    return volume.region == offer.region and (
        None in (volume.zone, offer.zone) or volume.zone == offer.zone
    )
