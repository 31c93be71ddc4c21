"""Adds up the counts of a service from the gateways of several servers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cavvy.control.decide.traffic import ServiceTraffic
from cavvy.domain.request_bills import merge_work
from cavvy.domain.service_loads import BatchFit, PlaceLoad, PlaceLoads
from cavvy.domain.service_updates import RevisionSums, RevisionTraffic
from cavvy.domain.values import Struct, combine, field, replace

_NOTHING = RevisionSums()


class GatewayCount(Struct, frozen=True, kw_only=True):
    """A service's counts at one gateway, and the version of the service that the gateway has
    received. `fresh` means that the server started this gateway; otherwise the server found the
    gateway already running.
    """

    version: int
    traffic: ServiceTraffic
    fresh: bool = False


class GatewayTotals(Struct, frozen=True, kw_only=True):
    """The traffic of all gateways so far, and the last report of each gateway, keyed by its server.
    The totals include gateways that do not answer now. The counters of `sum` only grow, even if
    gateways end or are restarted.
    """

    sum: ServiceTraffic | None = None
    last: Mapping[str, ServiceTraffic] = field(default_factory=dict)


def add_reports(
    totals: GatewayTotals, reports: Mapping[str, GatewayCount], at_s: float, *, whole: bool
) -> GatewayTotals:
    """Return the totals, updated with the newest reports. `at_s` is the time in seconds on the
    caller's clock. `whole` is true if every gateway has reported its requests in flight. If
    `totals` is empty, all reports count in full. If a gateway was already running when its server
    joined, the counts in the gateway's first report are not added, because these counts may cover a
    long time.

    Gateways report quantiles of the waits. The quantile over all gateways cannot be computed from
    these, so the result has the largest value that a gateway reported.
    """
    former = totals.sum or ServiceTraffic(at_s=at_s)
    counters = {name: getattr(former, name) for name in _COUNTERS}
    tried, tokens, prompts = former.tried, former.tokens, former.prompts
    fallbacks, latency = Counter(former.fallbacks), Counter(former.latency)
    for server, report in reports.items():
        new, old = report.traffic, _find_former(totals, server, report)
        for name in _COUNTERS:
            counters[name] += max(getattr(new, name) - getattr(old, name), 0)
        tokens = combine(tokens, combine(new.tokens, old.tokens, -1))
        prompts = combine(prompts, combine(new.prompts, old.prompts, -1))
        fallbacks += Counter(new.fallbacks) - Counter(old.fallbacks)
        latency += Counter(new.latency) - Counter(old.latency)
        tried = _add_tried(tried, new.tried, old.tried)
    told = [each.traffic for each in reports.values()]
    found = replace(
        _add_levels(told, at_s),
        **counters,
        tokens=tokens,
        prompts=prompts,
        fallbacks=dict(fallbacks),
        latency=dict(latency),
        tried=tried,
        whole=whole,
    )
    last = {**totals.last, **{name: each.traffic for name, each in reports.items()}}
    return GatewayTotals(last=last, sum=found)


def _find_former(totals: GatewayTotals, server: str, report: GatewayCount) -> ServiceTraffic:
    """Return the earlier counts that are subtracted from the report."""
    new, nothing = report.traffic, ServiceTraffic(at_s=report.traffic.at_s)
    old = totals.last.get(server)
    if old is None:
        return nothing if totals.sum is None or report.fresh else new
    other = new.process != old.process
    started_again = other or new.at_s < old.at_s or new.arrivals < old.arrivals
    return nothing if started_again else old


def _add_levels(told: Sequence[ServiceTraffic], at_s: float) -> ServiceTraffic:
    """Combine the values of all reports that describe the present, such as the number of requests
    in flight. The counters, such as the total number of requests, are left out.
    """
    return ServiceTraffic(
        at_s=at_s,
        in_flight=sum(each.in_flight for each in told),
        in_flight_s=sum(each.in_flight_s for each in told),
        backlog=sum(each.backlog for each in told),
        backlog_size=sum(each.backlog_size for each in told),
        per_s=sum(each.per_s for each in told),
        p50_s=_find_largest(each.p50_s for each in told),
        p95_s=_find_largest(each.p95_s for each in told),
        p99_s=_find_largest(each.p99_s for each in told),
        replicas=_join([each.replicas for each in told]),
        keys_used=_latest([each.keys_used for each in told]),
        work=merge_work(each.work for each in told),
        places=_add_places([each.places for each in told]),
        batch=_find_slowest(each.batch for each in told),
    )


def _find_slowest(fits: Iterable[BatchFit | None]) -> BatchFit | None:
    """Return the latency fit that predicts the longest time for a full batch. All gateways of a
    service use the same replicas.
    """
    known = (each for each in fits if each is not None)
    return max(known, key=lambda each: each.expect_s(each.most), default=None)


def _find_largest(values: Iterable[float | None]) -> float | None:
    return max((each for each in values if each is not None), default=None)


_COUNTERS = (
    *("arrivals", "answered", "started", "late", "lost", "unserved", "shed", "timed", "slow"),
    *("service_s", "batches", "joined"),
)


def _add_tried(
    total: RevisionTraffic | None, new: RevisionTraffic | None, old: RevisionTraffic | None
) -> RevisionTraffic | None:
    """Return the newest revision that is on trial at any gateway, with its traffic added up over
    all gateways.
    """
    if new is None or (total is not None and total.revision > new.revision):
        return total
    if total is None or total.revision < new.revision:
        total = RevisionTraffic(revision=new.revision, old=_NOTHING, new=_NOTHING)
    if old is None or old.revision != new.revision or old.new.requests > new.new.requests:
        old = RevisionTraffic(revision=new.revision, old=_NOTHING, new=_NOTHING)
    return replace(total, old=total.old + new.old - old.old, new=total.new + new.new - old.new)


def _add_places(parts: Sequence[PlaceLoads]) -> PlaceLoads:
    found: PlaceLoads = {}
    for part in parts:
        for name, load in part.items():
            other = found.get(name, PlaceLoad())
            found[name] = PlaceLoad(
                waiting=other.waiting + load.waiting,
                asked_at=max(other.asked_at, load.asked_at),
            )
    return found


def _join(parts: list[Mapping[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


def _latest(parts: list[Mapping[str, float]]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, at in part.items():
            found[name] = max(found.get(name, 0.0), at)
    return found
