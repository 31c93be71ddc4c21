"""What operators see and change: own hosts, reservations, shares and policies, as immutable values.
Money is in US dollars, as exact decimals. Times are in UTC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.structs import asdict

from cavvy.domain.units import HourlyRate, Money, UnitError, parse_rate
from cavvy.sdk.errors import InvalidArgument

if TYPE_CHECKING:
    from msgspec import Struct

    from cavvy.client.policy_wire import PolicyAsk, ProjectPolicyView

# the ends of the names of fields on the wire, and here
_PRICE, _PRICE_USD = "micros_per_hour", "usd_per_hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHolder:
    """What one rank of a job holds of a host: whole `devices`, or `part` of one, CPUs and memory.
    The names are "" if the job belongs to a project that you may not see.

    `until` is when it ends: when its nodes are taken (`until_from` is "notice"), when nodes without
    work are released ("kept"), when its time limit ends it ("limit"), or when jobs like it ended
    ("estimate"). None means that it is not known. `lost` is the work that the job would repeat if
    it left now, and `lost_usd` the cost of this work.
    """

    project: str
    job: str
    job_id: str
    user: str
    rank: int
    phase: str
    devices: tuple[str, ...]
    part: float
    cpus: float
    memory_mib: int
    since: datetime
    until: datetime | None
    until_from: str
    lost: timedelta
    lost_usd: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReservation:
    """Parts of hosts that only jobs of `project` (and of `user`, if it is not "") use from
    `begins_at` to `ends_at`. `hosts` maps each host to its reserved devices; no devices mean the
    whole host. `gpus` counts the reserved devices.
    """

    name: str
    project: str
    user: str
    hosts: Mapping[str, tuple[str, ...]]
    gpus: int
    begins_at: datetime
    ends_at: datetime
    made_by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHost:
    """An own host of the server. `state` is ready, cordoned, draining, drained or unreachable, and
    `why` says more. A host that is drained is to be empty at `drain_by`. `sick` maps each device
    that gets no work to its fault.
    """

    name: str
    state: str
    why: str
    since: datetime | None
    drain_by: datetime | None
    cpus: float
    memory_mib: int
    devices: tuple[str, ...]
    kinds: tuple[str, ...]
    sick: Mapping[str, str]
    holders: tuple[HostHolder, ...]
    reservations: tuple[HostReservation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLoan:
    """What one project holds of another project's quota. `project` is the other one, and
    `accelerator` the name that the quota counts, or None if it counts all GPUs.
    """

    project: str
    accelerator: str | None
    gpus: float
    usd_per_hour: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareStatus:
    """Where a project stands in the queue; numbers include the projects below it. `part` is the
    fraction of all use that the project should have by its weight, and `used_part` the fraction
    that it has. `used_gpu_hours` decays, and `debt_gpu_hours` is what it has used beyond its part.
    `lent` is what others hold of its quota, and `borrowed` what it holds of theirs.
    """

    project: str
    parent: str | None
    weight: float
    part: float
    used_part: float
    used_gpu_hours: float
    debt_gpu_hours: float
    gpus: float
    jobs: int
    waiting_gpus: float
    waiting_jobs: int
    accelerators: Mapping[str, float]
    usd_per_hour: Decimal
    quota_gpus: float | None
    max_gpus: float | None
    quota_accelerators: Mapping[str, float]
    max_accelerators: Mapping[str, float]
    quota_usd_per_hour: Decimal | None
    max_usd_per_hour: Decimal | None
    lent: tuple[ShareLoan, ...]
    borrowed: tuple[ShareLoan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """The limits of one user, which replace those that a policy has for each user: the most GPUs,
    running jobs, waiting jobs, GPUs by their names, and US dollars an hour. None and absent names
    leave the limit of each user.
    """

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: Mapping[str, float] = field(default_factory=dict)
    usd_per_hour: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The policy of a project, or of the server if `project` is "": what its jobs may use. Empty
    lists and None permit everything. `max_rate_usd_per_hour` is the highest price of one node, and
    the other prices are those of all nodes together.
    """

    project: str
    providers: tuple[str, ...]
    regions: tuple[str, ...]
    accelerators: tuple[str, ...]
    max_rate_usd_per_hour: Decimal | None
    images: tuple[str, ...]
    image_digests: bool
    signed_by: tuple[str, ...]
    keep_jobs_days: int | None
    share: float | None
    quota_gpus: float | None
    max_gpus: float | None
    user_gpus: float | None
    user_jobs: int | None
    user_waiting: int | None
    quota_accelerators: Mapping[str, float]
    max_accelerators: Mapping[str, float]
    user_accelerators: Mapping[str, float]
    quota_usd_per_hour: Decimal | None
    max_usd_per_hour: Decimal | None
    user_usd_per_hour: Decimal | None
    users: Mapping[str, UserLimits]


def read_host(view: "Struct") -> OwnHost:
    return convert(_to_fields(view), OwnHost)


def read_reservation(view: "Struct") -> HostReservation:
    return convert(_to_fields(view), HostReservation)


def read_share(view: "Struct") -> ShareStatus:
    return convert(_to_fields(view), ShareStatus)


def read_policy(view: "Struct") -> PolicyStatus:
    return convert(_to_fields(view), PolicyStatus)


def change_policy(before: "ProjectPolicyView | None", limits: Mapping[str, object]) -> "PolicyAsk":
    """Return the project's policy with these limits instead of its own. Raises InvalidArgument."""
    from cavvy.client.policy_wire import PolicyAsk

    known = {name: _PRICE.join(name.rsplit(_PRICE_USD, 1)) for name in _list_limits()}
    if unknown := sorted(limits.keys() - known.keys()):
        raise InvalidArgument(f"a policy has no {', '.join(unknown)}; it has {', '.join(known)}")
    wanted = {} if before is None else asdict(before)
    wanted.pop("project", None)
    for name, value in limits.items():
        if name.endswith(_PRICE_USD):
            value = _read_price(name, value)
        if name == "users":
            value = _read_users(value)
        wanted[known[name]] = list(value) if isinstance(value, tuple) else value
    return PolicyAsk(**wanted)


def _read_price(name: str, value: object) -> int | None:
    try:
        return None if value is None else parse_rate(str(value)).micros_per_hour
    except UnitError as error:
        raise InvalidArgument(f"{name}: {error}") from error


def _read_users(users: object) -> object:
    from cavvy.client.policy_wire import UserLimitsAsk

    if not isinstance(users, Mapping) or not all(
        isinstance(each, UserLimits) for each in users.values()
    ):
        raise InvalidArgument("users: expected a mapping from names to UserLimits")
    return {
        name: UserLimitsAsk(
            gpus=each.gpus,
            jobs=each.jobs,
            waiting=each.waiting,
            accelerators=dict(each.accelerators),
            micros_per_hour=_read_price(f"users: {name}: usd_per_hour", each.usd_per_hour),
        )
        for name, each in users.items()
    }


def _list_limits() -> list[str]:
    return [name for name in PolicyStatus.__dataclass_fields__ if name != "project"]


def _to_fields(view: Any) -> dict[str, Any]:
    """Return the fields of an answer with our names and types."""
    found = {}
    for name, value in asdict(view).items():
        if name.endswith(_PRICE):
            name = f"{name.removesuffix(_PRICE)}{_PRICE_USD}"
            value = None if value is None else HourlyRate(value).usd
        elif name.endswith("_micros"):
            name, value = f"{name.removesuffix('_micros')}_usd", Money(value).usd
        elif name.endswith("_s"):
            name, value = name.removesuffix("_s"), timedelta(seconds=value)
        elif name == "parts":
            name, value = "hosts", {each.host: each.devices for each in value}
        elif isinstance(value, list):
            value = [
                _to_fields(each) if hasattr(each, "__struct_fields__") else each for each in value
            ]
        elif name == "users":
            value = {user: _to_fields(each) for user, each in value.items()}
        found[name] = value
    return found
