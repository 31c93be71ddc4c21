"""The load of a service: how often requests arrive, how evenly, and how long they take. Computes
how many replicas a lasting load needs, and how long a decrease of the load must last before
replicas are stopped."""

from math import ceil, erf, exp, inf, log10, pi, sqrt
from typing import TypeVar

from cavvy.capabilities.serving.autoscaler.terms import (
    ScalingTerms,
    ScalingWeights,
    ServiceObservation,
)
from cavvy.capabilities.serving.loads import BatchFit, PromptSums
from cavvy.domain.services import TargetKind
from cavvy.domain.values import Struct, asdict, combine, replace

# The number of last requests over which the service time is averaged, approximately.
_REMEMBERED_REQUESTS = 500.0
# The configured service time counts as this many measurements.
_ASSUMED_REQUESTS = 2.0
_MOST_UNEVEN = 50.0
_HOUR_S = 3600.0
# When times of service are fitted to the sizes of prompts, a line without a slope counts as this
# many requests; in the mean size of arriving requests, that of completed ones counts as so many.
_LEVEL_REQUESTS = 20.0
_MEAN_REQUESTS = 20.0
# The least share of the mean time of service that a request is expected to take.
_LEAST_SHARE = 0.2
# The unevenness before an increase is the one that was measured this many long steps ago.
_STEPS_BEFORE = 3


_S = TypeVar("_S", bound=Struct)


class CountRecord(Struct, frozen=True, kw_only=True):
    """Counts arrivals in steps of equal length, to compute how uneven the arrivals are.

    `counted` requests arrived in the first `counted_s` seconds of the current step. `squares` is a
    sum over `steps` earlier steps, in which older steps have less weight. Each step adds (a - e)^2
    / e to this sum, where a is the number of arrivals in the step and e is the number of expected
    arrivals. `latest` is the number of arrivals per second in the last complete step.
    """

    counted: int = 0
    counted_s: int = 0
    squares: float = 0.0
    steps: float = 0.0
    latest: float = 0.0

    def add(self, arrived: int, rate: float, step_s: int, keep: float) -> "CountRecord":
        """Return the record, extended by the arrivals of one second."""
        counted, counted_s = self.counted + arrived, self.counted_s + 1
        if counted_s < step_s:
            return replace(self, counted=counted, counted_s=counted_s)
        expected = rate * step_s
        square = (counted - expected) ** 2 / max(1.0, expected)
        return CountRecord(
            squares=keep * self.squares + square,
            steps=keep * self.steps + 1,
            latest=counted / step_s,
        )

    def unevenness(self, weights: ScalingWeights) -> float:
        """Return the variance of the counts divided by their mean (1 for a Poisson process)."""
        assumed = weights.assumed_counts
        return (self.squares + assumed * weights.assumed_uneven) / (self.steps + assumed)


class LoadRecord(Struct, frozen=True, kw_only=True):
    """Sums over the past, in which older values have less weight.

    `slow` and `fast` are numbers of requests, and `slow_span_s` and `fast_span_s` are the seconds
    in which the requests arrived. `short` counts the arrivals in short steps, and `long` counts the
    arrivals in long steps. `uneven` contains the unevenness at the end of the last long steps,
    oldest first. `completed` is the number of completed requests, which took `service_s` seconds
    and had `size` tokens in their prompts on average. `sizes` are sums over about the last hour's
    requests by the sizes of their prompts, and `slow_size` and `fast_size` the tokens of the
    prompts of `slow` and `fast` requests.
    """

    slow: float = 0.0
    slow_span_s: float = 0.0
    fast: float = 0.0
    fast_span_s: float = 0.0
    short: CountRecord = CountRecord()
    long: CountRecord = CountRecord()
    uneven: tuple[float, ...] = ()
    completed: float = 0.0
    service_s: float = 0.0
    size: float = 0.0
    sizes: PromptSums = PromptSums()
    slow_size: float = 0.0
    fast_size: float = 0.0

    @property
    def rate(self) -> float:
        """The average number of arrivals per second."""
        return self.slow / self.slow_span_s if self.slow_span_s else 0.0

    @property
    def slope_s(self) -> float:
        """The time of service that a token of a prompt adds, at least 0."""
        sums = self.sizes
        if sums.ended <= 0 or sums.size <= 0:
            return 0.0
        mean, mean_s = sums.size / sums.ended, sums.time_s / sums.ended
        squares = max(0.0, sums.size2 - sums.ended * mean * mean)
        cross = sums.cross_s - sums.ended * mean * mean_s
        slope = cross / (squares + _LEVEL_REQUESTS * mean * mean)
        return min(max(0.0, slope), mean_s / mean)

    def expect_size(self, burst: bool) -> float:
        """Return the expected number of tokens in the prompts of the next requests."""
        count, size = (self.fast, self.fast_size) if burst else (self.slow, self.slow_size)
        return (size + _MEAN_REQUESTS * self.size) / (count + _MEAN_REQUESTS)

    def unevenness(self, weights: ScalingWeights) -> float:
        """Return the variance of the number of arrivals divided by their mean."""
        return _find_unevenness(self.short, self.long, weights)


class ServiceLoad(Struct, frozen=True, kw_only=True):
    """The expected load: arrivals per second, seconds of service per request, the unevenness of the
    arrivals, and whether the arrivals are a burst. `backlog_s` are the expected seconds of service
    of all requests that wait. The unevenness is the variance of the number of
    arrivals in a period divided by the mean of this number (1 for a Poisson process). `latest` is
    the rate of the last seconds in a burst, otherwise 0. `completed_s` is the service time without
    regard to the requests in flight, or None if they do not raise it.
    """

    rate: float
    service_s: float
    unevenness: float
    burst: bool
    latest: float = 0.0
    completed_s: float | None = None
    backlog_s: float = 0.0

    @property
    def erlangs(self) -> float:
        """The average number of requests that are served at the same time, if no request waits."""
        return self.rate * self.service_s


def record_load(record: LoadRecord, seen: ServiceObservation, terms: ScalingTerms) -> LoadRecord:
    """Return the record, extended by the observations since the last decision."""
    weights = terms.weights
    slow, slow_span_s, fast, fast_span_s = (
        record.slow,
        record.slow_span_s,
        record.fast,
        record.fast_span_s,
    )
    short, long, uneven = record.short, record.long, record.uneven
    keep_slow, keep_fast = exp(-1 / weights.slow_s), exp(-1 / weights.fast_s)
    keep_short = exp(-weights.short_s / weights.uneven_s)
    keep_long = exp(-weights.long_s / weights.uneven_s)
    arrivals = sum(seen.arrivals)
    each_size = seen.prompts.arrived / arrivals if arrivals else 0.0
    slow_size, fast_size = record.slow_size, record.fast_size
    for arrived in seen.arrivals:
        slow, slow_span_s = keep_slow * slow + arrived, keep_slow * slow_span_s + 1
        fast, fast_span_s = keep_fast * fast + arrived, keep_fast * fast_span_s + 1
        slow_size = keep_slow * slow_size + arrived * each_size
        fast_size = keep_fast * fast_size + arrived * each_size
        rate = slow / slow_span_s
        short = short.add(arrived, rate, weights.short_s, keep_short)
        long = long.add(arrived, rate, weights.long_s, keep_long)
        if not long.counted_s:
            uneven = (*uneven, _find_unevenness(short, long, weights))[-_STEPS_BEFORE:]
    kept = exp(-seen.completed / _REMEMBERED_REQUESTS) * record.completed
    completed = kept + seen.completed
    return LoadRecord(
        slow=slow,
        slow_span_s=slow_span_s,
        fast=fast,
        fast_span_s=fast_span_s,
        short=short,
        long=long,
        uneven=uneven,
        completed=completed,
        service_s=(kept * record.service_s + seen.completed_s) / completed if completed else 0.0,
        size=(kept * record.size + seen.prompts.size) / completed if completed else 0.0,
        sizes=add_to_hour(record.sizes, seen.prompts, len(seen.arrivals)),
        slow_size=slow_size,
        fast_size=fast_size,
    )


def add_to_hour(before: _S, seen: _S, elapsed_s: float) -> _S:
    """Return sums over about the last hour, in which older values have less weight: `before`, and
    what was seen in the `elapsed_s` seconds since.
    """
    keep = exp(-max(0.0, elapsed_s) / _HOUR_S)
    return combine(type(before)(**{k: keep * value for k, value in asdict(before).items()}), seen)


def estimate_load(record: LoadRecord, seen: ServiceObservation, terms: ScalingTerms) -> ServiceLoad:
    """Return the expected load.

    The rate is the average rate, or the recent rate during a burst. The service time is the mean
    over the completed requests, corrected if prompts are now longer or shorter than theirs, unless
    the requests in flight have run longer than this mean. Of these, it is only known that they take
    longer than the time so far. Therefore this time is added to the total, but the requests are not
    added to the number of completed requests, as in the maximum-likelihood estimate for such
    measurements. The load that follows from requests in flight is at most the number of requests
    that are present: a few requests that never end do not make the others longer. In a batch, the
    time so far is not the time of one request; the measured time of batches is used instead.
    """
    weights = terms.weights
    unevenness = record.unevenness(weights)
    burst = _is_burst(record, weights, unevenness)
    rate = record.fast / record.fast_span_s if burst else record.rate
    requests = record.completed + _ASSUMED_REQUESTS
    total_s = record.completed * record.service_s + _ASSUMED_REQUESTS * terms.service_s
    mean_s = total_s / requests
    slope_s, size = record.slope_s, record.expect_size(burst)
    mean_s = max(_LEAST_SHARE * mean_s, mean_s + slope_s * (size - record.size))
    excess_s = max(0.0, seen.in_flight_s - seen.in_flight * mean_s) if seen.batch is None else 0.0
    longest_s = seen.present / rate if rate else inf
    service_s = max(mean_s, min(longest_s, mean_s + excess_s / requests))
    return ServiceLoad(
        rate=rate,
        service_s=service_s,
        unevenness=unevenness,
        burst=burst,
        latest=record.short.latest if burst else 0.0,
        completed_s=mean_s if service_s > mean_s else None,
        backlog_s=max(
            _LEAST_SHARE * seen.backlog * service_s,
            seen.backlog * service_s + slope_s * (seen.backlog_size - seen.backlog * size),
        ),
    )


def _find_unevenness(short: CountRecord, long: CountRecord, weights: ScalingWeights) -> float:
    return min(_MOST_UNEVEN, max(1.0, short.unevenness(weights), long.unevenness(weights)))


def _is_burst(record: LoadRecord, weights: ScalingWeights, unevenness: float) -> bool:
    """Return whether the recent arrivals exceed the average by more than chance explains, or exceed
    the average before them by more than the unevenness before them explains. An increase raises
    both the average and the measured unevenness, so the first condition alone would explain a
    lasting increase by chance.
    """
    if _exceeds(record.fast, record.rate * record.fast_span_s, unevenness, weights):
        return True
    before_s = record.slow_span_s - record.fast_span_s
    if before_s <= 0 or len(record.uneven) < _STEPS_BEFORE:
        return False
    before = (record.slow - record.fast) / before_s * record.fast_span_s
    return _exceeds(record.fast, before, record.uneven[0], weights)


def _exceeds(count: float, expected: float, unevenness: float, weights: ScalingWeights) -> bool:
    return count > expected + weights.burst * sqrt(max(1.0, expected) * unevenness)


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


_MOST_REPLICAS = 2_000  # that are tried one by one; task files permit 1,000


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
    each = max(1, terms.concurrency)
    replicas = int(erlangs / each) + 1
    while (
        find_late_share(load, replicas * each, terms.wait_s) > late
        or _late_share_of_batches(load, batch, replicas * each, terms.wait_s) > late
    ):
        replicas += 1
        if replicas > min(terms.most, _MOST_REPLICAS):
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
