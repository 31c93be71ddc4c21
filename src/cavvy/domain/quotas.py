"""A quota is a limit that a provider sets for an account, such as the vCPUs of running machines."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cavvy.domain.offers import Offer, Purchase

NEW_LIMIT = "NEW_LIMIT"  # stands for the wanted limit in `Quota.request`


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """One quota. `limit` and `used` are numbers of `unit`; `used` is None if it is unknown.

    `name` is the provider's own name of the quota, and `family` says which machines count.
    `request` is the provider's own command that requests a higher limit.
    """

    provider: str
    name: str
    family: str
    unit: str
    region: str = ""  # "" if the quota holds for all regions together
    purchase: Purchase | None = None  # None if on-demand and spot machines count
    limit: float
    used: float | None = None
    request: str = ""

    @property
    def left(self) -> float | None:
        return None if self.used is None else max(0.0, self.limit - self.used)

    def __str__(self) -> str:
        where = f" in {self.region}" if self.region else ""
        use = f"{self.limit:g} {self.unit}"
        if self.left is not None:
            use = f"{self.used:g} of {use} used, {self.left:g} left"
        return f"the quota {self.name}{where} ({use})"


def limit_offer(offer: Offer, needs: Iterable[tuple[Quota, float]]) -> Offer:
    """The offer, with its capacity reduced to what quotas leave. `needs` are the quotas for which
    machines of the offer count, each with the amount that one node uses. An unknown use counts as
    0.

    The offers that one quota limits share a pool, because a node of one offer leaves less for the
    others. A quota for all regions together limits the offers of each region on its own.
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
    pool = offer.pool or f"quota {tightest.name}"
    return replace(limited, capacity=room, pool=pool, limited_by=str(tightest))
