"""The figures of a service, minute by minute: its traffic, its queue and its replicas. They are
stored as those of a rank are, under the service's ID.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from math import nan

from cavvy.control.decide.traffic import ServiceTraffic, find_former
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.service_loads import find_quantile
from cavvy.domain.services import ReplicaState
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct, field, replace

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
