"""Computes the service level that a service has reached over the last hour and the last day, from
the counts of its gateways. The request counts are stored with the service.
"""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from cavvy.control.decide.traffic import ServiceTraffic, find_former
from cavvy.domain.services import ServiceLevel
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct, combine, field, replace

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
    counts = _count(find_former(before, traffic), traffic, timed=level.p95 is not None)
    if counts == LevelCounts():
        return service
    history, at_s = _read(service), int(now.timestamp())
    history = LevelHistory(
        steps=_add(history.steps, counts, at_s // _STEP_S, _STEPS),
        hours=_add(history.hours, counts, at_s // _HOUR_S, _HOURS),
    )
    return replace(service, level=msgspec.json.encode(history).decode())


def measure_level(service: StoredService, now: datetime) -> tuple[LevelCounts, LevelCounts]:
    """Return the counts of the last hour and of the last day. The counts include the step and the
    hour that are still in progress.
    """
    history, at_s = _read(service), int(now.timestamp())
    return (
        _sum(_list_recent(history.steps, at_s // _STEP_S, _STEPS).values()),
        _sum(_list_recent(history.hours, at_s // _HOUR_S, _HOURS).values()),
    )


def _read(service: StoredService) -> LevelHistory:
    return _decode(service.level) if service.level else LevelHistory()


def _count(before: ServiceTraffic, traffic: ServiceTraffic, *, timed: bool) -> LevelCounts:
    failed = traffic.lost + traffic.unserved - before.lost - before.unserved
    return LevelCounts(
        answered=max(traffic.answered - before.answered, 0),
        failed=max(failed, 0),
        timed=max(traffic.timed - before.timed, 0) if timed else 0,
        slow=max(traffic.slow - before.slow, 0) if timed else 0,
    )


def _add(
    periods: dict[int, LevelCounts], counts: LevelCounts, number: int, kept: int
) -> dict[int, LevelCounts]:
    recent = _list_recent(periods, number, kept)
    return {**recent, number: recent.get(number, LevelCounts()) + counts}


def _list_recent(periods: dict[int, LevelCounts], number: int, kept: int) -> dict[int, LevelCounts]:
    return {each: counts for each, counts in periods.items() if each >= number - kept}


def _sum(parts: Iterable[LevelCounts]) -> LevelCounts:
    return sum(parts, LevelCounts())
