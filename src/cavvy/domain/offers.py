"""An offer is one machine type in one location, with one purchase option and one price. A quota is
a limit that a provider sets for an account, such as the total number of vCPUs of the running
machines; it limits the capacity of offers.
"""

from collections.abc import Collection, Iterable
from datetime import date, datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from typing import Any

from cavvy.domain.events import ChargeKind
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace

# The Kubernetes services of clouds whose names can stand for a provider, with the provider whose
# offers they are. Each offer names its service, because a provider can have clusters of several.
CLUSTER_SERVICES = {
    "aks": "kubernetes",
    "coreweave": "kubernetes",
    "eks": "kubernetes",
    "gke": "kubernetes",
}


def list_sellers(names: Iterable[str]) -> frozenset[str]:
    """Return the providers that may have the offers of these providers and services."""
    return frozenset(
        each for name in names for each in (name, CLUSTER_SERVICES.get(name)) if each is not None
    )


class Purchase(StrEnum):
    """The purchase option of a machine."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    RESERVED = "reserved"


class Readiness(StrEnum):
    """Whether a job can run on an offer."""

    READY = "ready"  # the offer's provider is configured and answered
    # the provider is configured, but `cavvy check` reports a problem with it or with the host
    FAILS = "fails"
    CONFIGURABLE = "configurable"  # Cavvy has a driver for the provider, but it is not set up
    PRICE_ONLY = "price-only"  # Cavvy has no driver for the provider


class ExtraPrice(Struct, frozen=True, kw_only=True):
    """The price of a disk or a public address that a provider bills in addition to a node's
    machine.

    The price of an ADDRESS is per public address and hour. The price of a DISK is per GiB and
    month. If a provider sells disks in fixed sizes, a type of disk has several prices, each per
    whole disk and month. The price with the smallest sufficient `up_to_gib` applies. `name` is the
    provider's name of the type of disk. If the task does not say otherwise, `usual` is the size of
    a node's disk in GiB, or the number of its public addresses. If a task requests a disk, the disk
    has at least `least` GiB. `minimum` is the shortest time that is billed.
    """

    kind: ChargeKind
    name: str = ""
    price: Money
    up_to_gib: int = 0
    usual: int = 0
    least: int = 0
    minimum: timedelta = timedelta(0)
    source: str = ""
    as_of: date | None = None


class RequiredOption(Struct, frozen=True):
    """An option of the offer's provider that a task must set in `resources.options` to run on the
    offer, and the reason.
    """

    name: str
    reason: str


class NodeHardware(Struct, frozen=True, kw_only=True):
    """The hardware of a provider's type of machine, in fields of the same names as in `Offer`."""

    accelerator: str | None = None
    accelerator_count: int = 0
    accelerator_memory_mib: int = 0
    accelerator_part: float = 1.0
    vcpus: int = 0
    memory_mib: int = 0
    network_mbps: int | None = None
    architecture: str = "x86_64"

    def offered(self) -> dict[str, Any]:
        """Return the fields for an `Offer`."""
        return {each: getattr(self, each) for each in NodeHardware.__struct_fields__}


class Offer(Struct, frozen=True, kw_only=True):
    """A node that can be rented at one price.

    `rate` is for the whole node per hour. `accelerator` is a canonical name from the catalog's
    table, or None. If the node has a part of one accelerator, such as 1/6 of an A10,
    `accelerator_part` is below 1, the count is 1, and the memory is the memory of the part.
    `term_months` is how long a reserved offer must be paid for. `capacity` is the number of
    available nodes, or None if the provider does not report it. Offers of a region with the same
    `pool` share their capacity: a node rented from one of these offers is no longer available from
    the other offers. The pool is "" if the offer shares no capacity. `credential` is the project
    whose credential was used to list the offer, or "" if the installation's credential was used.
    `hosts` is above 1 if the node is one of several hosts that are rented together, such as the
    hosts of a TPU slice. The number of a gang's nodes is a multiple of `hosts`, and all amounts are
    for one host. `shared` means that several jobs share the host's devices; a job then holds only
    the devices that it requests. `payers` is the number of nodes of a gang that run on one
    machine, which is paid once: each node pays its part until the last one ends. It is 0 in an
    offer of such a machine, whose `rate` is for all nodes, until their number is known. `owned`
    means that the node is one of the user's own machines or
    of an own cluster, and is not rented for the job. `by_user` means that the node runs as the Unix
    user of the job's user, so that it is not handed on to a job of another user. `service` is the
    cloud's Kubernetes service that runs the node, such as gke, or "".
    """

    provider: str
    service: str = ""
    credential: str = ""
    region: str
    zone: str | None = None
    instance_type: str
    accelerator: str | None = None
    accelerator_count: int = 0
    accelerator_memory_mib: int = 0  # memory of each accelerator
    accelerator_part: float = 1.0
    vcpus: float = 0
    memory_mib: int = 0
    disk_gib: int | None = None
    network_mbps: int | None = None
    purchase: Purchase = Purchase.ON_DEMAND
    rate: HourlyRate
    term_months: int = 0
    # shortest time that is billed, even if the node ends earlier
    minimum_charge: timedelta = timedelta(0)
    # the time from the launch to the agents' first reports, as the provider documents it; None if
    # this time is typical
    boot: timedelta | None = None
    capacity: int | None = None
    pool: str = ""
    hosts: int = 1
    shared: bool = False
    payers: int = 1
    reserved: bool = False
    owned: bool = False
    by_user: bool = False
    architecture: str = ""  # CPU architecture, such as x86_64 or arm64; "" if the provider omits it
    # when the node ends by itself, as a notebook of Colab does; None if it does not
    ends_at: datetime | None = None
    limited_by: str = ""  # the quota that limits the capacity, with its usage; "" if none
    extras: tuple[ExtraPrice, ...] = ()  # what is billed in addition to `rate`
    # the number of nodes that the account's quotas allow if nothing else uses the quotas; None if
    # unknown
    quota_nodes: int | None = None
    quota_text: str = ""  # the quota that `quota_nodes` comes from, with its usage
    requires: RequiredOption | None = None  # options that a task must state to use the offer
    source: str = ""
    as_of: date | None = None

    @property
    def key(self) -> str:
        """The text that identifies the offer, regardless of its price:
        provider/region[/zone]/type:accelerators/purchase. For a commitment, the number of months is
        appended to the purchase, as in reserved-12m. If the offer belongs to a project's account,
        the project is appended to the provider's name.
        """
        zone = f"/{self.zone}" if self.zone else ""
        machine = f"{self.instance_type}:{self.accelerator_count}"
        term = f"-{self.term_months}m" if self.term_months else ""
        return f"{self.account}/{self.region}{zone}/{machine}/{self.purchase}{term}"

    def is_of(self, names: Collection[str]) -> bool:
        """Return whether `names` contains the offer's provider or Kubernetes service."""
        return self.provider in names or (self.service in names if self.service else False)

    @property
    def account(self) -> str:
        """The name of the account that rents the offer."""
        if not self.credential:
            return self.provider
        from cavvy.domain.credentials import name_account  # imports hashlib

        return name_account(self.provider, self.credential)

    @property
    def accelerators_text(self) -> str:
        """The number of accelerators, or the part of one accelerator, as text: "8" or "1/6"."""
        if self.accelerator_part == 1:
            return str(self.accelerator_count)
        return str(Fraction(self.accelerator_part).limit_denominator(64))


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
