"""A quota is a limit that a provider sets for an account, such as the total number of vCPUs of the
running machines.
"""

from collections.abc import Iterable

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct, replace

NEW_LIMIT = "NEW_LIMIT"  # stands for the wanted limit in `Quota.request`


class Quota(Struct, frozen=True, kw_only=True):
    """One quota. `limit` and `used` are numbers of `unit`; `used` is None if it is unknown.

    `name` is the provider's name of the quota. `family` names the machines that count toward the
    quota. `zone` is the part of the region to which the quota applies, such as an availability
    domain. `request` is the provider's command that requests a higher limit.
    """

    provider: str
    name: str
    family: str
    unit: str
    region: str = ""  # "" if the quota is one limit for all regions together
    zone: str = ""  # "" if the quota is for the whole region
    purchase: Purchase | None = None  # None if both on-demand and spot machines count
    limit: float
    used: float | None = None
    request: str = ""

    @property
    def left(self) -> float | None:
        return None if self.used is None else max(0.0, self.limit - self.used)

    def __str__(self) -> str:
        place = self.zone or self.region
        where = f" in {place}" if place else ""
        use = f"{self.limit:g} {self.unit}"
        if self.left is not None:
            use = f"{self.used:g} of {use} used, {self.left:g} left"
        return f"the quota {self.name}{where} ({use})"


def limit_offer(offer: Offer, needs: Iterable[tuple[Quota, float]]) -> Offer:
    """Return the offer, with its capacity reduced to the capacity that its quotas allow. `needs`
    lists the quotas toward which machines of the offer count, each with the amount of the quota
    that one node uses. A quota whose current use is unknown counts as unused.

    Offers that are limited by the same quota share a pool, because a node of one offer leaves less
    of the quota for the other offers. A quota for all regions together is applied to the offers of
    each region separately.
    """
    known = [(quota, amount) for quota, amount in needs if amount > 0]
    if not known:
        return offer
    rooms = [
        (int((quota.limit if quota.left is None else quota.left) // amount), quota.name, quota)
        for quota, amount in known
    ]
    room, _, tightest = min(rooms, key=lambda each: each[:2])
    most, _, lowest = min(
        ((int(quota.limit // amount), quota.name, quota) for quota, amount in known),
        key=lambda each: each[:2],
    )
    limited = replace(offer, quota_nodes=most, quota_text=str(lowest))
    if offer.capacity is not None and offer.capacity <= room:
        return limited
    pool = offer.pool or " ".join(filter(None, ("quota", tightest.name, tightest.zone)))
    return replace(limited, capacity=room, pool=pool, limited_by=str(tightest))
