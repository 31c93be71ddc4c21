"""What makes the stand-in for EC2 behave: capacity, quotas, prices, who may do what, and what
goes wrong.
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from tests.ec2.grants import Grant, read_policy

CATALOG = Path(__file__).parents[2] / "src/cavvy/catalog/snapshot.db"
TYPES = (
    "t3.medium",
    "m7i.large",
    "g4dn.xlarge",
    "g6.xlarge",
    "p4d.24xlarge",
    "p5.48xlarge",
    "p6-b300.48xlarge",
)
Fault = Callable[
    [str, str], str | None
]  # service, action -> "throttle", "unavailable", "lose", "hang up", "Code: text" or None


class Answer(Exception):
    """An error that AWS would answer with."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrice:
    """A spot price that holds from a time on."""

    type: str
    zone: str
    at: datetime
    usd: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A capacity reservation or block of the account."""

    id: str
    type: str
    zone: str
    total: int
    block: bool = False
    until: datetime | None = None  # blocks have an end always
    state: str = "active"
    platform: str = "Linux/UNIX"
    zone_name: str = ""  # as another account calls it that shares it


@dataclass(slots=True, kw_only=True)
class Rules:
    """The state of the world around one account; tests change it as they go."""

    zones: Mapping[str, Sequence[str]]  # by region
    stock: dict[tuple[str, str, str], int] = field(
        default_factory=dict
    )  # (type, zone, market): how many can be had
    vcpu_quota: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # (class, market), such as ("G", "spot")
    on_demand: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # (region, type): USD per hour
    spot: list[SpotPrice] = field(default_factory=list)
    # hourly price of a reservation without upfront payment, by region and type, then by its length
    commitments: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    reserved: list[Reserved] = field(default_factory=list)
    # USD per GiB and month, by volume type, and per address and hour
    disk_prices: dict[str, str] = field(
        default_factory=lambda: {
            "gp2": "0.1000000000",
            "gp3": "0.0800000000",
            "sc1": "0.0150000000",
        }
    )
    address_price: str = "0.0050000000"
    grants: Sequence[Grant] | None = None  # by IAM; None: everything is allowed
    fault: Fault | None = None
    page: int = 1000  # entries of a list that one answer has
    missing: set[tuple[str, str]] = field(
        default_factory=set
    )  # (type, zone): it is not there at all
    fails_late: dict[str, str] = field(
        default_factory=dict
    )  # zone: the StateReason with which launches there fail while they are pending
    disabled: frozenset[str] = frozenset()  # regions that the account has not enabled
    # what EC2 itself answers in such a region; other services always say
    # UnrecognizedClientException
    disabled_code: str = "AuthFailure"
    unsubscribed: frozenset[str] = frozenset()  # images whose terms the account has not accepted
    profiles: frozenset[str] = frozenset()  # names and ARNs of the account's instance profiles
    picks: str | None = None  # the zone that EC2 chooses if the request names none, rich or poor
    parameters: dict[str, str] = field(default_factory=dict)  # the account's own of Systems Manager
    boot: timedelta = timedelta(seconds=5)
    hidden: timedelta = timedelta(
        seconds=3
    )  # how long DescribeInstances does not show what was launched
    shutting_down: timedelta = timedelta(seconds=10)
    notice: timedelta = timedelta(seconds=120)

    def quota(self, kind: str, market: str) -> int:
        return self.vcpu_quota.get((kind, market), 1_000_000)

    def room(self, kind: str, zone: str, market: str) -> int:
        return self.stock.get((kind, zone, market), 1_000_000)


def class_of(kind: str) -> str:
    """The quota class of an instance type, as AWS groups families."""
    family = kind.partition(".")[0]
    for prefix, name in (
        ("p", "P"),
        ("g", "G"),
        ("vt", "G"),
        ("trn", "Trn"),
        ("inf", "Inf"),
        ("dl", "DL"),
    ):
        if family.startswith(prefix):
            return name
    return "Standard"


def real_prices(rules: Rules, zone_ids: Mapping[str, str], at: datetime) -> None:
    """On-demand and spot prices of the catalog's snapshot; `zone_ids` maps use1-az1 to the
    account's name of it.
    """
    for kind, region, zone, purchase, micros in _read_prices():
        usd = f"{micros / 1_000_000:.6f}"
        if purchase == 0 and zone is None:
            rules.on_demand[region, kind] = usd
        elif purchase == 2 and zone in zone_ids:
            rules.spot.append(SpotPrice(type=kind, zone=zone_ids[zone], at=at, usd=usd))


@cache
def _read_prices() -> list[tuple[str, str, str | None, int, int]]:
    query = (
        "SELECT s.instance_type, p.region, p.zone, o.purchase, MIN(o.rate) FROM offer o JOIN shape "
        "s ON s.id = o.shape "
        "JOIN place p ON p.id = o.place WHERE p.provider = 'aws' AND o.term_months = 0 "
        f"AND s.instance_type IN ({','.join('?' * len(TYPES))}) GROUP BY 1, 2, 3, 4"
    )
    with closing(sqlite3.connect(f"file:{CATALOG}?mode=ro", uri=True)) as catalog:
        return catalog.execute(query, TYPES).fetchall()


def list_extras(rules: Rules, service: str) -> list[str]:
    """The price list's products for disks (AmazonEC2), and for addresses among others
    (AmazonVPC).
    """
    if service == "AmazonEC2":
        return [
            _product({"volumeApiName": kind, "usagetype": f"EBS:VolumeUsage.{kind}"}, "GB-Mo", usd)
            for kind, usd in rules.disk_prices.items()
        ]
    return [
        _product({"usagetype": "USE1-NatGateway-Hours"}, "Hrs", "0.0450000000"),
        _product({"usagetype": "USE1-PublicIPv4:IdleAddress"}, "Hrs", "0.0070000000"),
        _product({"usagetype": "USE1-PublicIPv4:InUseAddress"}, "Hrs", rules.address_price),
    ]


def _product(attributes: Mapping[str, str], unit: str, usd: str) -> str:
    price = {"unit": unit, "pricePerUnit": {"USD": usd}}
    terms = {"OnDemand": {"X.JRTCKXETXF": {"priceDimensions": {"X.JRTCKXETXF.6YS6EN2CT7": price}}}}
    return json.dumps({"product": {"attributes": attributes}, "terms": terms})


def allow_only(rules: Rules, policy: str) -> None:
    """Refuse whatever an IAM policy does not allow."""
    rules.grants = read_policy(policy)


class Hours:
    """The stand-in's clock: real, shifted, or another one's."""

    def __init__(self, now: Callable[[], datetime] | None = None) -> None:
        self._now = now or (lambda: datetime.now(UTC))
        self._shift = timedelta(0)
        self._lock = threading.Lock()

    def now(self) -> datetime:
        return self._now() + self._shift

    def jump(self, length: timedelta) -> None:
        with self._lock:
            self._shift += length
