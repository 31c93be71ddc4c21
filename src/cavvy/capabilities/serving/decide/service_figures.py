"""The figures of a service, minute by minute: its traffic, its queue and its replicas. They are
stored as those of a rank are, under the service's ID.

Computes the service level that a service has reached over the last hour and the last day, from the
counts of its gateways. The request counts are stored with the service.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from math import nan

import msgspec

from cavvy.capabilities.serving.decide.traffic import ServiceTraffic, find_former
from cavvy.capabilities.serving.loads import find_quantile
from cavvy.capabilities.serving.replicas import ReplicaState
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.services import ServiceLevel
from cavvy.domain.values import Struct, combine, field, replace

_MINUTE_S = 60
_LEAST_S = 0.001  # of a level, so that a minute with one look at it has a mean


class LevelSum(Struct, frozen=True, kw_only=True):
    """A value that was looked at several times in a minute. `weighted` is the sum of the values
    times the seconds since the look before.
    """

    low: float
    high: float
    weighted: float = 0.0
    seconds: float = 0.0


class ServiceMinute(Struct, frozen=True, kw_only=True):
    """What was counted of a service (an ID) in a minute, which is numbered from 1970. `seconds` is
    how long was counted, by the clock of the gateways. `latency` has the answers by bucket, and
    `starts_s` how long replicas took from their order until they were ready. `follows` means that
    the minute before had figures other than 0.
    """

    service: str
    number: int
    follows: bool = False
    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, LevelSum] = field(default_factory=dict)
    latency: Mapping[int, int] = field(default_factory=dict)
    starts_s: tuple[float, ...] = ()

    @property
    def is_idle(self) -> bool:
        return not any(self.counts.values()) and not any(each.high for each in self.levels.values())


def count_minute(
    minute: ServiceMinute | None,
    service: StoredService,
    before: ServiceTraffic | None,
    traffic: ServiceTraffic,
    now: datetime,
) -> ServiceMinute:
    """Return the minute with the traffic since `before` added, or the next one if it is over. If
    `before` is None, nothing is counted, because the counts could then cover a long time. Each
    start of a replica is counted once, while `service` has no mark that the autoscaler knows it.
    """
    number = int(now.timestamp()) // _MINUTE_S
    if minute is None or minute.service != service.id:
        minute = ServiceMinute(service=service.id, number=number)
    elif minute.number != number:
        minute = ServiceMinute(service=service.id, number=number, follows=not minute.is_idle)
    starts = () if before is None else _list_starts(service)
    before = traffic if before is None else find_former(before, traffic)
    seconds = traffic.at_s - before.at_s
    return replace(
        minute,
        seconds=minute.seconds + seconds,
        counts={
            name: minute.counts.get(name, 0.0) + more
            for name, more in _count(before, traffic).items()
        },
        levels=_add_levels(minute.levels, _read_levels(service, traffic), seconds),
        latency=Counter(minute.latency) + (Counter(traffic.latency) - Counter(before.latency)),
        starts_s=(*minute.starts_s, *starts),
    )


def make_block(minute: ServiceMinute) -> FigureBlock | None:
    """Return the figures of the minute; None if they are all 0 and were so in the minute before."""
    if minute.is_idle and not minute.follows:
        return None
    seconds = minute.seconds or _MINUTE_S
    levels = {name: _column_of(each) for name, each in minute.levels.items()}
    per_s = levels.pop("per_s", _alone(0.0))
    requests = minute.counts.get("requests", 0.0) / seconds
    columns = {
        "requests_per_s": FigureColumns(
            low=[min(requests, *per_s.low)], mean=[requests], high=[max(requests, *per_s.high)]
        ),
        "failed_per_s": _alone(minute.counts.get("failed", 0.0) / seconds),
        **levels,
    }
    if tokens := minute.counts.get("tokens"):
        columns["tokens_per_s"] = _alone(tokens / seconds)
    for name, share in (("latency_p50_s", 0.5), ("latency_p95_s", 0.95)):
        if (found := find_quantile(minute.latency, share)) is not None:
            columns[name] = _alone(found)
    if starts := minute.starts_s:
        mean = sum(starts) / len(starts)
        columns["cold_start_s"] = FigureColumns(low=[min(starts)], mean=[mean], high=[max(starts)])
    return FigureBlock(attempt_id=minute.service, rank=0, minutes=[minute.number], columns=columns)


def _count(before: ServiceTraffic, traffic: ServiceTraffic) -> Mapping[str, float]:
    failed = traffic.lost + traffic.unserved - before.lost - before.unserved
    return {
        "requests": max(0, traffic.arrivals - before.arrivals),
        "failed": max(0, failed),
        "tokens": max(0.0, traffic.tokens.completion - before.tokens.completion),
    }


def _read_levels(service: StoredService, traffic: ServiceTraffic) -> Mapping[str, float]:
    return {
        "per_s": traffic.per_s,
        "waiting": traffic.backlog,
        "in_flight": traffic.in_flight,
        "replicas_ready": sum(each.state is ReplicaState.READY for each in service.replicas),
        "replicas_wanted": service.target,
    }


def _add_levels(
    known: Mapping[str, LevelSum], seen: Mapping[str, float], seconds: float
) -> Mapping[str, LevelSum]:
    weight, found = max(seconds, _LEAST_S), {}
    for name, value in seen.items():
        old = known.get(name, LevelSum(low=value, high=value))
        found[name] = LevelSum(
            low=min(old.low, value),
            high=max(old.high, value),
            weighted=old.weighted + value * weight,
            seconds=old.seconds + weight,
        )
    return found


def _list_starts(service: StoredService) -> tuple[float, ...]:
    return tuple(
        (each.ready_at - each.ordered_at).total_seconds()
        for each in service.replicas
        if each.state is ReplicaState.READY and each.ready_at is not None and not each.measured
    )


def _column_of(level: LevelSum) -> FigureColumns:
    mean = level.weighted / level.seconds if level.seconds else nan
    return FigureColumns(low=[level.low], mean=[mean], high=[level.high])


def _alone(value: float) -> FigureColumns:
    return FigureColumns(low=[value], mean=[value], high=[value])


_STEP_S, _STEPS = 300, 12  # the last hour is counted in steps
_HOUR_S, _HOURS = 3600, 24


class LevelCounts(Struct, frozen=True, kw_only=True):
    """Counts the requests of a period by their outcome. `failed` counts three kinds of requests:
    those whose replica ended, those that got no replica within their time limit, and those that the
    full queue refused. `timed` answers were compared with the service's `p95`, and `slow` of these
    answers took longer than `p95`.
    """

    answered: int = 0
    failed: int = 0
    timed: int = 0
    slow: int = 0

    def __add__(self, other: "LevelCounts") -> "LevelCounts":
        return combine(self, other)

    @property
    def availability(self) -> float | None:
        """The share of requests that were answered, or None if there were no requests."""
        total = self.answered + self.failed
        return self.answered / total if total else None

    @property
    def in_time(self) -> float | None:
        """The share of answers that arrived within `p95`; None if no answer was compared with
        `p95`.
        """
        return (self.timed - self.slow) / self.timed if self.timed else None


class LevelHistory(Struct, frozen=True, kw_only=True):
    """The counts of each step and of each hour that had requests, keyed by the number of the step
    or hour since 1970.
    """

    steps: dict[int, LevelCounts] = field(default_factory=dict)
    hours: dict[int, LevelCounts] = field(default_factory=dict)


_decode = msgspec.json.Decoder(LevelHistory).decode


def record_level(
    service: StoredService, before: ServiceTraffic | None, traffic: ServiceTraffic, now: datetime
) -> StoredService:
    """Return the service with the requests since `before` added to its history. Nothing is added if
    the service has no `slo`. Nothing is added either if `before` is None, because the counts could
    then cover a long time.
    """
    level = service.spec.slo
    if before is None or level == ServiceLevel():
        return service
    counts = _count_level(find_former(before, traffic), traffic, timed=level.p95 is not None)
    if counts == LevelCounts():
        return service
    history, at_s = _read_history(service), int(now.timestamp())
    history = LevelHistory(
        steps=_add_counts(history.steps, counts, at_s // _STEP_S, _STEPS),
        hours=_add_counts(history.hours, counts, at_s // _HOUR_S, _HOURS),
    )
    return replace(service, level=msgspec.json.encode(history).decode())


def measure_level(service: StoredService, now: datetime) -> tuple[LevelCounts, LevelCounts]:
    """Return the counts of the last hour and of the last day. The counts include the step and the
    hour that are still in progress.
    """
    history, at_s = _read_history(service), int(now.timestamp())
    return (
        _sum_counts(_list_recent(history.steps, at_s // _STEP_S, _STEPS).values()),
        _sum_counts(_list_recent(history.hours, at_s // _HOUR_S, _HOURS).values()),
    )


def _read_history(service: StoredService) -> LevelHistory:
    return _decode(service.level) if service.level else LevelHistory()


def _count_level(before: ServiceTraffic, traffic: ServiceTraffic, *, timed: bool) -> LevelCounts:
    failed = traffic.lost + traffic.unserved - before.lost - before.unserved
    return LevelCounts(
        answered=max(traffic.answered - before.answered, 0),
        failed=max(failed, 0),
        timed=max(traffic.timed - before.timed, 0) if timed else 0,
        slow=max(traffic.slow - before.slow, 0) if timed else 0,
    )


def _add_counts(
    periods: dict[int, LevelCounts], counts: LevelCounts, number: int, kept: int
) -> dict[int, LevelCounts]:
    recent = _list_recent(periods, number, kept)
    return {**recent, number: recent.get(number, LevelCounts()) + counts}


def _list_recent(periods: dict[int, LevelCounts], number: int, kept: int) -> dict[int, LevelCounts]:
    return {each: counts for each, counts in periods.items() if each >= number - kept}


def _sum_counts(parts: Iterable[LevelCounts]) -> LevelCounts:
    return sum(parts, LevelCounts())
