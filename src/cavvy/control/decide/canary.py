"""Decides whether a new revision of a service, which receives a part of the requests, is worse than
the old revision. The decision is a sequential test of errors and latency. The test analyzes the
data after each block of requests; one such analysis is called a look. The trial ends with a last
look, after a number of requests (`CanaryTerms.requests`) or when its time is over.

If both revisions are equally good, the probability that the test ever rolls back the new revision
is at most alpha. Alpha is divided among the looks: a look may roll back an equally good revision
with a probability that is its part of alpha (Lan and DeMets, "Discrete sequential boundaries for
clinical trials", Biometrika 70, 1983). The probabilities come from the distribution that the
statistic has if both revisions are equally good and the new revision was not rolled back earlier
(`Increment`). The last look may spend all of alpha that earlier looks have not spent,
except for a reserve. A block contains the requests to both revisions in the same period. A change
of the load affects both revisions, and so does an outage. Therefore neither event makes the test
find that the new revision is worse.

Errors. A block has n1 requests of the new revision, n0 requests of the old revision, and m errors.
Suppose that both revisions are equally good and that m is known. Then the number of the new
revision's errors has a hypergeometric distribution. The statistic is the sum of the new revision's
errors over the blocks, and its distribution is exact: with a single block and a single look, the
test would be Fisher's exact test. The distribution is conditional on n1, n0 and m. Therefore the
part of alpha of a look may depend on these numbers.

Latency. In a block, L1 is the mean logarithm of the latency of the new revision, and L0 is that of
the old revision. The block has the weight w = n1 * n0 / (n1 + n0), where n1 and n0 are the numbers
of requests of the two revisions. The variance of the logarithm within revisions and blocks is v.
The statistic is

    S / sqrt(v),  S = sum of w (L1 - L0).

Each block adds one term to S. The test treats this term as normally distributed with the variance w
v. Because v is estimated and the logarithms are not always normal, the statistic is only
asymptotically normal. The distribution is stored as a histogram with cells of equal width. Requests
that a replica answers at the same time depend on each other if other work on the node delays them
together. Therefore the test computes two other variances: of the means of groups of successive
requests, and of L1 - L0. If one of them is larger than v, the test uses it instead of v. While the
new revision has few requests, a larger variance of the new revision's latency also increases v.

How large this part of alpha is depends on how much information the trial has collected. Here,
information means the square of an effect's size, measured in standard deviations of the statistic.
The test looks for two effects: 1 % more errors and 5 % more latency. A fixed part of alpha is
reserved for the detection of larger effects, which needs less information. The information depends
on the total number of errors and on v, not on the revision to which the errors belong. Therefore
the last look may divide the rest of alpha between the tests of errors and latency according to the
power of each test.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, floor, inf, log, log1p, sqrt
from statistics import NormalDist

from cavvy.domain.service_updates import CanaryTrial, NullDistribution, RevisionSums, UpdateEnd
from cavvy.domain.values import Struct, replace

# The effects for which the test is made: the increase of the share of failed requests, and the
# relative increase of the latency
MORE_ERRORS, SLOWER = 0.01, 0.05
_BLOCK = 10  # minimum number of requests of each revision in a block
_FIRST_TIMED = 40  # minimum number of times from which the variance is estimated
_FEW = 50  # times of the new revision from which its own variance counts for less than half
# The shares of alpha that the looks before the last may spend on errors and on latency
_EARLY_ERRORS, _EARLY_LATENCY = 0.35, 0.2
_FIRST_SPENT = 0.005  # the share of alpha that the first look may spend in any case
_SPENT = 0.025  # the share of alpha that the first unit of information permits to spend
# The part of an early share that is for larger effects, and their information in relation to that
# of the smallest effect
_FOR_LARGE, _TIMES = 0.25, 25
# The share of alpha that no look spends, because the distribution of the latency is asymptotic
_RESERVE = 0.25
_CELLS = 16  # of the latency's distribution per standard deviation at the end
_LEAST_ERRORS = 0.0005  # the old revision's assumed share of failed requests is not less
_ROUNDING = 1e-9  # of sums of the same probabilities in another order
_MOST_EVIDENCE = 1e6
_NORMAL = NormalDist()


class CanaryTerms(Struct, frozen=True, kw_only=True):
    """`alpha` is the maximum probability that a new revision is rolled back although it is as good
    as the old revision. If there is not enough evidence against the new revision after a number of
    requests (`requests`), the revision is promoted.
    """

    alpha: float = 0.01
    requests: int = 2000


class CanaryJudgement(Struct, frozen=True, kw_only=True):
    """`end` is None until the trial ends: either the evidence shows that the new revision is worse
    than the old revision, or the new revision has received enough requests. `evidence` is the
    evidence against the new revision; the revision is rolled back if the evidence reaches 1 /
    alpha. `errors` is each revision's share of failed requests, with the old revision first;
    `slower` is the factor by which the latency has grown.
    """

    end: UpdateEnd | None = None
    evidence: float = 0.0
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0


def observe(
    trial: CanaryTrial, old: RevisionSums, new: RevisionSums, terms: CanaryTerms
) -> CanaryTrial:
    """Return the trial with one more block if both revisions have received enough responses since
    the last block. The counts `old` and `new` only grow, unless the gateway was restarted and
    counts from 0.
    """
    if trial.found is not None:
        return trial
    if _is_less(old, trial.counted_old) or _is_less(new, trial.counted_new):
        trial = replace(trial, counted_old=RevisionSums(), counted_new=RevisionSums())
    block_old, block_new = old - trial.counted_old, new - trial.counted_new
    if min(block_old.requests, block_new.requests) < max(_BLOCK, trial.new.requests // 200):
        return trial
    trial = replace(
        trial,
        old=trial.old + block_old,
        new=trial.new + block_new,
        counted_old=old,
        counted_new=new,
    )
    trial = _observe_errors(trial, block_old, block_new)
    trial = _observe_latency(trial, block_old, block_new, terms)
    if trial.new.requests >= terms.requests:
        return trial
    return _look(trial, terms)


def _is_less(counts: RevisionSums, before: RevisionSums) -> bool:
    """Return whether any count is smaller than the same count in `before`."""
    fewer = counts.requests < before.requests or counts.errors < before.errors
    return fewer or counts.timed < before.timed


def judge(trial: CanaryTrial, terms: CanaryTerms, *, last: bool = False) -> CanaryJudgement:
    """Decide whether the trial of the new revision ends, and how. If `last` is set, no further
    request will be observed.
    """
    end, evidence = trial.found, trial.evidence
    if end is None and trial.new.requests and (last or trial.new.requests >= terms.requests):
        end, evidence = _look_last(trial, terms)
        if end is None and trial.new.requests >= terms.requests:
            end = UpdateEnd.ENOUGH
    old, new = trial.old, trial.new
    return CanaryJudgement(
        end=end,
        evidence=evidence,
        requests=new.requests,
        errors=(old.errors / max(1, old.requests), new.errors / max(1, new.requests)),
        slower=exp(trial.shift / trial.information) if trial.information else 1.0,
    )


def _observe_errors(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    failed = old.errors + new.errors
    if not failed:
        return trial
    return replace(
        trial,
        failed=trial.failed + new.errors,
        failures=add(trial.failures, draw_failed(new.requests, old.requests, failed)),
    )


def _observe_latency(
    trial: CanaryTrial, old: RevisionSums, new: RevisionSums, terms: CanaryTerms
) -> CanaryTrial:
    if not old.timed or not new.timed:
        return trial
    information = old.timed * new.timed / (old.timed + new.timed)
    variance = information / _cell(terms) ** 2
    slower = new.logs / new.timed - old.logs / old.timed
    return replace(
        trial,
        shift=trial.shift + information * slower,
        information=trial.information + information,
        deviation=trial.deviation + old.deviation + new.deviation,
        free=trial.free + old.timed + new.timed - 2,
        deviation_new=trial.deviation_new + new.deviation,
        free_new=trial.free_new + new.timed - 1,
        blocks=trial.blocks + 1,
        spread=trial.spread + information * slower**2,
        deviation_of_groups=trial.deviation_of_groups
        + old.deviation_of_groups
        + new.deviation_of_groups,
        free_groups=trial.free_groups + max(0, old.groups - 1) + max(0, new.groups - 1),
        shifts=add(trial.shifts, draw_normal(variance)),
    )


def _look(trial: CanaryTrial, terms: CanaryTerms) -> CanaryTrial:
    """Make an interim analysis of the trial, and return the trial with the result. The result may
    be that the new revision is worse.
    """
    found: list[tuple[float, UpdateEnd]] = []
    allowed = terms.alpha * _allow(_EARLY_ERRORS, _inform_errors(trial)) - trial.failures.spent
    bound = find_bound(trial.failures, allowed)
    found.append((_weigh(trial.failures, trial.failed, allowed, terms), UpdateEnd.ERRORS))
    end = UpdateEnd.ERRORS if trial.failed >= bound else None
    failures = remove_from(trial.failures, bound)
    shifts = trial.shifts
    if _is_timed(trial):
        allowed = terms.alpha * _allow(_EARLY_LATENCY, _inform_latency(trial)) - shifts.spent
        bound, value = find_bound(shifts, allowed), _value_latency(trial, terms)
        found.append((_weigh(shifts, value, allowed, terms), UpdateEnd.LATENCY))
        if end is None and value >= bound:
            end = UpdateEnd.LATENCY
        shifts = remove_from(shifts, bound)
    return replace(trial, failures=failures, shifts=shifts, evidence=max(found)[0], found=end)


def _look_last(trial: CanaryTrial, terms: CanaryTerms) -> tuple[UpdateEnd | None, float]:
    """Return the result and the evidence of the last look, which may spend the rest of alpha."""
    spent = trial.failures.spent + trial.shifts.spent
    left = terms.alpha * (1 - _RESERVE) - spent
    for_errors, for_latency = _divide(trial, left)
    by_errors = _weigh(trial.failures, trial.failed, for_errors, terms)
    by_latency = 0.0
    if _is_timed(trial):
        by_latency = _weigh(trial.shifts, _value_latency(trial, terms), for_latency, terms)
    if max(by_errors, by_latency) < 1 / terms.alpha:
        return None, max(by_errors, by_latency)
    if by_errors >= by_latency:
        return UpdateEnd.ERRORS, by_errors
    return UpdateEnd.LATENCY, by_latency


def _divide(trial: CanaryTrial, left: float) -> tuple[float, float]:
    """Divide the rest of alpha between the test of errors and the test of latency. The division
    maximises the sum of the two tests' powers; a test's power is its probability of detecting a
    worse revision. The power of a test depends on how many errors both revisions have in total and
    on the variance, but not on which of the revisions is worse.
    """
    requests = trial.old.requests + trial.new.requests
    failed = trial.old.errors + trial.new.errors
    share = trial.new.requests / requests
    base = max(_LEAST_ERRORS, failed / requests - MORE_ERRORS * share)
    tails = list_tails(trial.failures)
    powers = list_tails(tilt(trial.failures, 1 + MORE_ERRORS / base))
    latency = sqrt(_inform_latency(trial))
    best, found = _power(latency, left), 0.0
    for tail, power in zip(tails, powers, strict=True):
        if tail < left and (both := power + _power(latency, left - tail)) > best:
            best, found = both, tail
    return found * (1 + _ROUNDING), left - found


def _power(effect: float, alpha: float) -> float:
    return _NORMAL.cdf(effect + _NORMAL.inv_cdf(alpha)) if alpha > 0 else 0.0


def _allow(most: float, information: float) -> float:
    """Return the share of alpha that all looks up to now may spend together. The last look of a
    trial may exceed this limit.
    """
    large, small = most * _FOR_LARGE, most * (1 - _FOR_LARGE)
    soon = _FIRST_SPENT + _SPENT * _TIMES * information
    return large * (1 - exp(-soon / large)) + small * (1 - exp(-_SPENT * information / small))


def _inform_errors(trial: CanaryTrial) -> float:
    """Return the statistical information on the error rate. The information is the square of
    MORE_ERRORS / d, where d is the standard deviation of the difference between the error rates of
    the two revisions.
    """
    requests = trial.old.requests + trial.new.requests
    rate = (trial.old.errors + trial.new.errors + 0.5) / (requests + 1)
    spread = 1 / trial.old.requests + 1 / trial.new.requests
    return MORE_ERRORS**2 / (rate * (1 - rate) * spread)


def _is_timed(trial: CanaryTrial) -> bool:
    """Return whether the latency can be judged. If an earlier version of Cavvy began the trial,
    `information` is still 0.
    """
    return trial.free >= _FIRST_TIMED and trial.information > 0


def _inform_latency(trial: CanaryTrial) -> float:
    return log(1 + SLOWER) ** 2 * trial.information / _variance(trial)


def _variance(trial: CanaryTrial) -> float:
    return max(trial.deviation / max(1, trial.free), 1e-9)


def _variance_of_shift(trial: CanaryTrial) -> float:
    """Return the variance v of the latency test. While the new revision has few requests, the
    result is increased if its latencies vary more than those of the old revision. Therefore a
    single long request does not count as evidence.
    """
    known = _variance(trial)
    own = trial.deviation_new / max(1, trial.free_new)
    few = _FEW / (_FEW + trial.free_new)
    share = trial.old.timed / (trial.old.timed + trial.new.timed)
    return known + share * few * max(0.0, own - known)


def _variance_of_groups(trial: CanaryTrial) -> tuple[float, int]:
    """Return a second estimate of the variance per unit of information, and its degrees of freedom.
    The estimate is computed from the means of groups of successive requests and from the
    differences of the revisions in the blocks. Requests that a replica answers at the same time
    have similar latencies. The variance of groups accounts for this correlation, and the variance
    of single requests does not.
    """
    free = trial.free_groups + trial.blocks - 1
    if free < 1:
        return 0.0, 0
    between = trial.spread - trial.shift**2 / trial.information
    return (trial.deviation_of_groups + between) / free, free


def _cell(terms: CanaryTerms) -> float:
    """Return the width of one cell in the histogram of the latency statistic."""
    return sqrt(terms.requests) / _CELLS


def _value_latency(trial: CanaryTrial, terms: CanaryTerms) -> int:
    """Return the histogram cell of the latency statistic: the sum S of the latency differences,
    divided by the standard deviation of S. Wallace's approximation converts Student's t to a normal
    number.
    """
    variance, free = max((_variance_of_shift(trial), trial.free), _variance_of_groups(trial))
    value = trial.shift / sqrt(variance * trial.information)
    size = (8 * free + 1) / (8 * free + 3) * sqrt(free * log1p(value * value / free))
    size *= sqrt(trial.information) / _cell(terms)
    return floor((size if value > 0 else -size) + 0.5)


def _weigh(known: NullDistribution, value: int, allowed: float, terms: CanaryTerms) -> float:
    """Return the evidence against the new revision from an interim analysis that may spend the
    probability `allowed`. The new revision is rolled back if the evidence is at least 1 / alpha.
    """
    tail = max(find_tail(known, value), allowed / _MOST_EVIDENCE, 1e-300)
    return max(0.0, allowed) / tail / terms.alpha


_SMALLEST = 1e-8  # a smaller probability at the lower end is added to the next value's
_SMALLEST_RATIO = 1e-13  # of an increment's probability to that of the most probable one
_REACH = 5.0  # standard deviations of an increment that are considered
_NARROW = 0.5  # the variance below which an increment has three values


class Increment:
    """The distribution of an increment of a statistic: `masses[i]` is the probability of
    `first + i`.

    A sequential test of a fixed length updates its null distribution at each look (Armitage,
    McPherson and Rowe, "Repeated significance tests on accumulating data", Journal of the Royal
    Statistical Society A 132, 1969): the new observations are added to the distribution, and then
    the outcomes are removed in which the statistic is so large that this look rejects the
    hypothesis. What remains are the outcomes in which the test still runs; the total probability
    of the removed ones is the probability of a false alarm.
    """

    __slots__ = ("first", "masses")

    def __init__(self, first: int, masses: Sequence[float]) -> None:
        total = sum(masses)
        self.first, self.masses = first, [each / total for each in masses]


def draw_failed(new: int, old: int, failed: int) -> Increment:
    """Return a hypergeometric distribution. There are `new` and `old` requests, of which `failed`,
    chosen at random, fail; the distribution is that of the number of failures among the `new`
    requests.
    """
    most, least = min(failed, new), max(0, failed - old)
    mode = min(most, max(least, (failed + 1) * (new + 1) // (new + old + 2)))
    above, below, mass = [1.0], [], 1.0
    for each in range(mode, most):
        mass *= (failed - each) * (new - each) / ((each + 1) * (old - failed + each + 1))
        if mass < _SMALLEST_RATIO:
            break
        above.append(mass)
    first, mass = mode, 1.0
    for each in range(mode, least, -1):
        mass *= each * (old - failed + each) / ((failed - each + 1) * (new - each + 1))
        if mass < _SMALLEST_RATIO:
            break
        below.append(mass)
        first = each - 1
    return Increment(first, below[::-1] + above)


def draw_normal(variance: float) -> Increment:
    """Return the distribution of a normal increment with this variance, rounded to integers."""
    if variance < _NARROW:
        return Increment(-1, [variance / 2, 1 - variance, variance / 2])
    reach = int(_REACH * sqrt(variance)) + 1
    masses = [exp(-each * each / (2 * variance)) for each in range(reach + 1)]
    return Increment(-reach, masses[:0:-1] + masses)


def add(known: NullDistribution, increment: Increment) -> NullDistribution:
    """Return the distribution of the statistic after an independent increment."""
    size = len(known.masses)
    found = [0.0] * (size + len(increment.masses) - 1)
    for at, mass in enumerate(increment.masses):
        part = found[at : at + size]
        found[at : at + size] = [
            each + mass * other for each, other in zip(part, known.masses, strict=True)
        ]
    start, low = 0, 0.0
    while low + found[start] < _SMALLEST:
        low += found[start]
        start += 1
    found[start] += low
    return replace(known, first=known.first + increment.first + start, masses=tuple(found[start:]))


def list_tails(known: NullDistribution) -> list[float]:
    """Return, for each value, the probability that the statistic is at least that value."""
    return list(accumulate(reversed(known.masses)))[::-1]


def find_tail(known: NullDistribution, value: int) -> float:
    """Return the probability that the statistic is at least `value`."""
    return sum(known.masses[max(0, value - known.first) :])


def find_bound(known: NullDistribution, allowed: float) -> int:
    """Return the smallest number for which the probability that the statistic is at least this
    number is at most `allowed`.
    """
    tail, at = 0.0, len(known.masses)
    while at and tail + known.masses[at - 1] <= allowed:
        at -= 1
        tail += known.masses[at]
    return known.first + at


def remove_from(known: NullDistribution, bound: int) -> NullDistribution:
    """Return the distribution without the outcomes in which the statistic reaches the bound. In
    these outcomes, the look has rejected the hypothesis, and the test has ended.
    """
    size = max(1, bound - known.first)
    return replace(known, masses=known.masses[:size], spent=known.spent + sum(known.masses[size:]))


def tilt(known: NullDistribution, odds: float) -> NullDistribution:
    """Return the distribution (noncentral hypergeometric) that `known` becomes if the new revision
    is worse: a failed request then belongs to the new revision with `odds` times the odds.
    """
    # in logarithms, because a product of thousands of odds, or a mass of a tail, is 0 as a float
    step = log(odds)
    weights = [
        log(mass) + step * index if mass > 0 else -inf for index, mass in enumerate(known.masses)
    ]
    most = max(weights)
    found = [exp(each - most) for each in weights]
    total = sum(found)
    return replace(known, masses=tuple(each / total for each in found))
