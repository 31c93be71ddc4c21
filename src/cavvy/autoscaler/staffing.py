"""Computes how many replicas a lasting load needs, and how long a decrease of the load must last
before replicas are stopped.
"""

from math import ceil, erf, exp, inf, log10, pi, sqrt

from cavvy.autoscaler.load import ServiceLoad
from cavvy.autoscaler.terms import ScalingTerms, ServiceObservation
from cavvy.domain.service_loads import BatchFit
from cavvy.domain.services import TargetKind
from cavvy.domain.values import replace

# A reading this close to its target changes nothing, as in the autoscaler of Kubernetes.
_TOLERANCE = 0.1
# Requests that take at least this long count as they are. It is about the time between decisions.
_LASTING_S = 1.0
# The smallest share of late requests that is used: no measurement is long enough to verify a
# smaller one.
_SMALLEST_SHARE = 1e-6
# The exponent of the slots in the share of requests that wait for a batch; 1: independent slots
_TOGETHER = 0.75


def count_replicas(
    load: ServiceLoad, seen: ServiceObservation, terms: ScalingTerms, late: float
) -> int:
    """Return the number of replicas that the load needs according to the target of the service.
    `late` is the share of requests that may miss the target.
    """
    match terms.kind:
        case TargetKind.QUEUE_WAIT:
            return _count_for_open_requests(load, seen, terms, late)
        case TargetKind.CONCURRENCY:
            latest = min(load.latest * load.service_s, seen.present)
            return ceil(max(load.erlangs, latest, _count_lasting(load, seen)) / terms.target)
        case TargetKind.RATE:
            return ceil(max(load.rate, load.latest) / terms.target)
        case TargetKind.GPU_UTILISATION | TargetKind.METRIC:
            share = 1.0 if seen.reading is None else seen.reading / terms.target
            return seen.ready if abs(share - 1) <= _TOLERANCE else ceil(seen.ready * share)


def _count_for_open_requests(
    load: ServiceLoad, seen: ServiceObservation, terms: ScalingTerms, late: float
) -> int:
    """Return the replicas for a limit of waits. If only the requests in flight say that requests
    are long, the replicas beyond the need of the completed requests have at most a slot for each
    request: the margin of the formula is for a lasting load, and it is not known that such requests
    will continue to arrive.
    """
    count = count_for_wait(load, terms, late, seen.batch)
    if load.completed_s is None:
        return count
    known = replace(load, service_s=load.completed_s)
    least = count_for_wait(known, terms, late, seen.batch)
    return min(count, max(least, ceil(seen.present / terms.concurrency)))


def _count_lasting(load: ServiceLoad, seen: ServiceObservation) -> int:
    """Return the number of requests that run or wait now, or 0 if they are so short that most will
    have ended before the next decision. In this case, only their average number matters.
    """
    age_s = seen.in_flight_s / seen.in_flight if seen.in_flight else 0.0
    return seen.present if max(load.service_s, age_s) >= _LASTING_S else 0


def count_agreeing(load: ServiceLoad, terms: ScalingTerms) -> int:
    """Return for how many minutes a service must have more replicas than it needs before the
    autoscaler stops some. The number of minutes is:

        log10(1 / (1 - on_time)) * min(most_agree_min, agree_min * sqrt(z)), at least 1

    In the formula, z is the unevenness of arrivals. The formula was found by experiments on
    recorded requests. If arrivals come in bursts, a service that removes replicas too early answers
    many requests late. A steady service with many replicas gains nothing from a delayed removal of
    replicas, but pays for the delay.
    """
    weights = terms.weights
    strictness = log10(1 / max(_SMALLEST_SHARE, 1 - terms.on_time))
    minutes = min(weights.most_agree_min, weights.agree_min * sqrt(load.unevenness))
    return max(1, round(strictness * minutes))


def count_for_wait(
    load: ServiceLoad, terms: ScalingTerms, late: float, batch: BatchFit | None = None
) -> int:
    """Return the smallest number N of replicas for which at most the share `late` of requests waits
    longer than w = `wait_s`. If N is larger than `terms.most`, the result may be too small, but is
    larger than `terms.most`.

    The load is a = rate * S erlangs, S is the service time in seconds, z is the unevenness, and the
    number of slots is s = N * concurrency:

        beta         = (s - a) / sqrt(a * z)
        P(wait > 0)  = 1 / (1 + beta * Phi(beta) / phi(beta))
        P(wait > w)  = P(wait > 0) * exp(-(s - a) * w / (S * z))

    The formulas compute the waiting time of a queue with many servers (Halfin and Whitt, 1981),
    with Hayward's approximation. Hayward's approximation replaces uneven arrivals by even arrivals,
    and divides both the load and the number of slots by z. If the gateway joins requests to
    batches, S is the time of a full batch divided by the number of its requests, and requests also
    wait for running batches: see `_late_share_of_batches`.
    """
    erlangs = load.erlangs
    if erlangs <= 0:
        return 0
    replicas = int(erlangs / terms.concurrency) + 1
    while (
        find_late_share(load, replicas * terms.concurrency, terms.wait_s) > late
        or _late_share_of_batches(load, batch, replicas * terms.concurrency, terms.wait_s) > late
    ):
        replicas += 1
        if replicas > terms.most:
            return replicas
    return replicas


def find_late_share(load: ServiceLoad, slots: int, wait_s: float) -> float:
    """Return the share of requests that wait longer than `wait_s` for one of the slots."""
    spare = slots - load.erlangs
    if spare <= 0:
        return 1.0
    waits = _waiting_share(spare / sqrt(load.erlangs * load.unevenness))
    return waits * exp(-spare * wait_s / (load.service_s * load.unevenness))


def _waiting_share(beta: float) -> float:
    """Return P(wait > 0)."""
    density = exp(-beta * beta / 2) / sqrt(2 * pi)
    below = (1 + erf(beta / sqrt(2))) / 2
    return 1 / (1 + beta * below / density) if density >= 1e-300 else 0.0


def _late_share_of_batches(
    load: ServiceLoad, batch: BatchFit | None, slots: int, wait_s: float
) -> float:
    """Return the share of requests that wait longer than w = `wait_s` for a running batch.

    A batch of n requests takes t(n) = A * n + B. A slot that becomes free starts a batch of all
    waiting requests. In the steady state, all batches have the same size n. With s slots, n is
    computed as follows:

        n = (rate / s) * t(n),  that is  n = rate * B / (s - rate * A),  but at least 1.

    A single slot starts a batch every t(n) seconds. A request arrives at a random time between two
    starts, so it waits t(n) / 2 on average, and P(wait > w) = 1 - w / t(n). With several slots, a
    request waits for the first slot that becomes free. If the s slots became free independently of
    each other, the probability 1 - w / t(n) for one slot would be raised to the power s. However,
    the batches of different slots tend to end at the same time, so the true exponent is smaller
    than s. We use s^0.75, an approximation that was found by simulation. If the slots are fast
    enough to serve the load without batches, some requests find a free slot. The others wait; their
    share P(wait > 0) is computed with S = A + B.
    """
    if batch is None:
        return 0.0
    spare = slots - load.rate * batch.slope_s
    size = max(1.0, load.rate * batch.base_s / spare) if spare > 0 else inf
    if size > batch.most:
        return 1.0
    taken_s = batch.expect_s(size)
    if taken_s <= wait_s:
        return 0.0
    alone = load.rate * batch.expect_s(1)
    waits = _waiting_share((slots - alone) / sqrt(alone)) if alone < slots else 1.0
    share: float = waits * (1 - wait_s / taken_s) ** (slots**_TOGETHER)
    return share
