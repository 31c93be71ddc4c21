"""Whether enough requests are on time and, if they are not, why, and how many replicas would be
enough."""

from enum import StrEnum
from statistics import median

from cavvy.capabilities.serving.autoscaler.decide import ScalingState
from cavvy.capabilities.serving.autoscaler.load import ServiceLoad, count_for_wait
from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.domain.services import TargetKind
from cavvy.domain.values import Struct, replace

_LEAST_REQUESTS = 50.0  # of the last hour, from which on a share of late ones says something
_RECENT_S = 86_400.0
_LAST = 10  # bursts whose heights count
_UNBOUND = 100_000  # replicas


class AimCause(StrEnum):
    """Why too few requests are on time."""

    MOST = "most"  # the service may not have more replicas
    LEARNT = "learnt"  # bursts came that are expected from now on
    IRREGULAR = "irregular"  # bursts come at times that cannot be foreseen
    START = "start"  # the load grows faster than replicas start


class MissedAim(Struct, frozen=True, kw_only=True):
    """Of about the last hour's requests, the share `on_time` waited at most `wait_s`, and `aim` was
    wanted. `needed` replicas would have been enough; with LEARNT, they are expected to start before
    the next burst, at `next_s`. `ratio` is the median of the bursts' heights to the load before
    them, or 0, and `start_s` how long a replica takes to start."""

    on_time: float
    aim: float
    wait_s: float
    cause: AimCause
    needed: int
    start_s: float
    bursts: int = 0
    ratio: float = 0.0
    next_s: float | None = None


def find_missed_aim(terms: ScalingTerms, state: ScalingState, now_s: float) -> MissedAim | None:
    """Return why too few requests were on time in about the last hour, or None if enough were, or
    if the service has another target than a wait."""
    served = state.served
    if terms.kind is not TargetKind.QUEUE_WAIT or terms.has_objectives:
        return None
    if served.started < _LEAST_REQUESTS or served.late <= (1 - terms.on_time) * served.started:
        return None
    starts_s = [each.mean_s for each in state.cold_starts.values()]
    found = MissedAim(
        on_time=max(0.0, 1 - served.late / served.started),
        aim=terms.on_time,
        wait_s=terms.wait_s,
        cause=AimCause.START,
        needed=max((need for _, need in state.needs), default=1) + 1,
        start_s=max(starts_s, default=terms.cold_start_s),
    )
    if state.wanted is not None and state.wanted >= terms.most:
        return replace(found, cause=AimCause.MOST, needed=max(found.needed, terms.most + 1))
    bursts = [each for each in state.bursts.bursts if now_s - each.at_s < _RECENT_S][-_LAST:]
    if not bursts:
        return found
    ratios = [each.height / each.base for each in bursts if each.base > 0]
    height = median(each.height for each in bursts)
    found = replace(
        found,
        cause=AimCause.IRREGULAR,
        bursts=len(bursts),
        ratio=median(ratios) if ratios else 0.0,
        needed=_count_for(terms, state, height),
    )
    coming = [each for each in state.bursts.expected if each.until_s >= now_s]
    if not coming:
        return found
    first = min(coming, key=lambda each: each.at_s)
    rate = first.ratio * state.bursts.usual or first.height
    needed = _count_for(terms, state, rate)
    if needed > terms.most:
        return replace(found, cause=AimCause.MOST, needed=needed)
    return replace(found, cause=AimCause.LEARNT, needed=needed, next_s=first.at_s)


def _count_for(terms: ScalingTerms, state: ScalingState, rate: float) -> int:
    """Return the number of replicas at a rate of arrivals, without the limit of the service."""
    load = ServiceLoad(
        rate=rate,
        service_s=state.load.service_s or terms.service_s,
        unevenness=state.load.unevenness(terms.weights),
        burst=False,
    )
    return count_for_wait(load, replace(terms, most=_UNBOUND), 1 - terms.on_time)
