"""The bills of replicas, and their division among the requests of their services."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import sha256

from cavvy.domain.ledger import EntryKind, TokenUse, combine_tokens
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field


def name_api(url: str, model: str) -> str:
    """Return the name under which the tokens of an API are counted, in place of a replica's ID."""
    return f"api-{sha256(f'{url} {model}'.encode()).hexdigest()[:16]}"


def name_api_bill(service_id: str, api: str) -> str:
    """Return the name of the bill of an API for a service; see `name_api`."""
    return f"{service_id}:{api}"


class KeyWork(Struct, frozen=True, kw_only=True):
    """The number of started requests of a client's key ("" for requests without a key), their share
    of a replica's time, and their tokens by model.
    """

    requests: int
    work_us: int
    tokens: dict[str, TokenUse] = field(default_factory=dict)


# The counts of each gateway for a replica: keyed by the epoch, then by the client's key. The counts
# of an epoch only grow, also when the gateway is restarted.
RequestCounts = Mapping[str, Mapping[str, KeyWork]]
# The same for all replicas of a service: keyed by epoch, replica and client's key
RequestWork = Mapping[str, Mapping[str, Mapping[str, KeyWork]]]


def merge_work(parts: Iterable[RequestWork]) -> RequestWork:
    """Return the union of the gateways' reports. Two reports with the same epoch come from the same
    gateway. Its counts only grow, so the larger count of each key is the newer one and is used.
    """
    found: dict[str, dict[str, dict[str, KeyWork]]] = {}
    for part in parts:
        for epoch, work in part.items():
            known = found.setdefault(epoch, {})
            for replica, counts in work.items():
                known[replica] = merge_counts(known.get(replica, {}), counts)
    return found


def find_counts(work: RequestWork, replica: str) -> RequestCounts:
    return {epoch: counts[replica] for epoch, counts in work.items() if replica in counts}


def share_counts(work: RequestWork, routers: Iterable[str]) -> dict[str, dict[str, KeyWork]]:
    """Return the counts of a worker, which works while its routers have requests. The requests and
    tokens themselves count only once, for the routers.
    """
    return {
        f"{epoch}/{router}": {
            key: KeyWork(requests=0, work_us=each.work_us) for key, each in counts[router].items()
        }
        for router in routers
        for epoch, counts in work.items()
        if router in counts
    }


def merge_counts(one: Mapping[str, KeyWork], other: Mapping[str, KeyWork]) -> dict[str, KeyWork]:
    """For each client's key, return the larger of the counts in `one` and `other`."""
    found = dict(one)
    for key, count in other.items():
        known = found.get(key)
        if known is not None:
            count = KeyWork(
                requests=max(known.requests, count.requests),
                work_us=max(known.work_us, count.work_us),
                tokens=combine_tokens(max, known.tokens, count.tokens),
            )
        found[key] = count
    return found


class DividedBill(Struct, frozen=True, kw_only=True):
    """The part of an attempt's bill that is already divided among requests. `moved` contains, for
    each kind of charge, the sum of the charges up to the time `until` that are already divided.
    `counted` contains the numbers of requests that were used for the division. Its first key is the
    gateway's epoch, and its second key is the client's key.
    """

    attempt_id: str
    until: datetime
    moved: dict[EntryKind, int] = field(default_factory=dict)
    counted: dict[str, dict[str, KeyWork]] = field(default_factory=dict)
    ready_at: datetime | None = None
    version: int = 0


class ReplicaBill(Struct, frozen=True, kw_only=True):
    """The charges of a replica's attempt, added up by kind, and the part of the charges that is
    already divided among requests.
    """

    attempt_id: str
    job_id: str
    since: datetime
    until: datetime
    amounts: Mapping[EntryKind, int]
    rate: HourlyRate  # of all its nodes, by the newest charges
    divided: DividedBill | None
