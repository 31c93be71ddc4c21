"""Computes how many replicas of a language model meet the objectives of a service: the time to the
first token, and the time between two tokens.

The gateway measures answers (`TokenTimes`). Two straight lines are fitted to the last hour:

    time of a prompt of p tokens           s(p) = c + a * p
    time between two tokens, r running     g(r) = b0 + b1 * r

With N replicas, each gets rate / N requests a second. The share u = rate / N * E[s] of its time
goes to prompts, which delay the tokens of the other requests: their gap is g(r) / (1 - u). The mean
number r of requests that a replica serves follows from Little's law, where A is the mean number of
tokens of an answer:

    r = rate / N * (E[s] + A * g(r) / (1 - u))

The gaps of answers vary with the number of running requests and with the prompts that interrupt
them, both as in a Poisson process with the unevenness of arrivals. A prompt waits for the prompts
before it as in a queue with one server (Pollaczek and Khinchine; the tail is exponential with this
mean), and in the gateway for a free slot (`load.py`).
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from math import exp, inf, log, sqrt
from statistics import NormalDist

from cavvy.capabilities.serving.autoscaler.load import ServiceLoad, find_late_share
from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.domain.services import LatencyGoal, ReplicaRole
from cavvy.domain.values import Struct, replace

_ENOUGH = 20  # answers from which a speed is computed
# Until the number of running requests has varied, the gap is assumed to grow by this share of the
# mean gap for each further request. The assumption counts as much as this sum of squares.
_GROWTH, _ASSUMED_SQUARES = 0.02, 2000.0
# An objective that no number of replicas meets is replaced by this multiple of the best value; the
# stricter objective that follows late answers is at least the second multiple of its best value.
_BEYOND_BEST, _NEAR_BEST = 1.5, 1.1
_MOST = 10_000
_LEAST_FACTOR, _MOST_FACTOR = 0.05, 2.0
_MOST_TIMES = 20  # so many times the replicas that keep up: more would hardly be faster
_PRECISION = 0.005  # of quantiles
# the distribution of prompts is replaced by its quantiles at these shares
_QUANTILES = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_MOST_S = 1e6
_NORMAL = NormalDist()
_ANY = LatencyGoal(limit=timedelta(0))  # gives the share at which a value without limit is stated


class TokenSpeeds(Struct, frozen=True, kw_only=True):
    """The measured speed of a language model on a replica, and the lengths of its requests.

    A prompt takes `prompt_s` for each token and `base_s` in addition, with a standard deviation of
    `first_sd_s`. Two tokens are `gap_s` apart, and `running_s` more for each running request; the
    mean gaps of answers have a standard deviation of `gap_sd_s`. `prompt` and `prompt_sd` are the
    mean and the standard deviation of the tokens of a prompt that are not cached, `completion` is
    the mean number of tokens of an answer, and `inverse` the mean of 1 / tokens.
    """

    prompt_s: float
    base_s: float
    first_sd_s: float = 0.0
    gap_s: float
    running_s: float
    gap_sd_s: float = 0.0
    prompt: float
    prompt_sd: float
    completion: float
    inverse: float

    def describe_prompts(self) -> tuple[float, float]:
        """Return the mean and the standard deviation of the time of a prompt."""
        spread_s = sqrt((self.prompt_s * self.prompt_sd) ** 2 + self.first_sd_s**2)
        return self.base_s + self.prompt_s * self.prompt, spread_s


class GoalEstimate(Struct, frozen=True, kw_only=True):
    """What is expected of a service with objectives: `needed` replicas for the present load, with
    which the times to the first token and between tokens have these quantiles. `best_ttft_s` and
    `best_gap_s` are the quantiles with any number of replicas; if they exceed the objective, it
    cannot be met.
    """

    speeds: TokenSpeeds
    needed: int
    ttft_s: float
    gap_s: float
    best_ttft_s: float
    best_gap_s: float


def find_speeds(times: TokenTimes) -> TokenSpeeds | None:
    """Return the speeds, or None if too few answers were measured."""
    if times.answers < _ENOUGH or times.gaps < _ENOUGH:
        return None
    count, mean = times.answers, times.prompt / times.answers
    squares = max(0.0, times.prompt2 - count * mean * mean)
    mean_s = times.first_s / count
    # a line through the origin counts as one more long prompt
    origin = mean * mean
    slope = (times.cross_s - count * mean * mean_s + origin * (mean_s / max(mean, 1.0))) / max(
        squares + origin, 1.0
    )
    prompt_s = min(max(0.0, slope), mean_s / max(mean, 1.0))
    base_s = mean_s - prompt_s * mean
    first_sd_s = _find_rest(times.first2, count, mean_s, prompt_s, squares)
    running, gap_s = times.running / times.gaps, times.gap_s / times.gaps
    squares_r = max(0.0, times.running2 - times.gaps * running * running)
    cross = times.running_gap_s - times.gaps * running * gap_s
    slope = (cross + _ASSUMED_SQUARES * _GROWTH * gap_s) / (squares_r + _ASSUMED_SQUARES)
    running_s = min(max(0.0, slope), gap_s / max(running, 1.0))
    return TokenSpeeds(
        prompt_s=prompt_s,
        base_s=base_s,
        first_sd_s=first_sd_s,
        gap_s=gap_s - running_s * running,
        running_s=running_s,
        gap_sd_s=_find_rest(times.gap2, times.gaps, gap_s, running_s, squares_r),
        prompt=mean,
        prompt_sd=sqrt(squares / count),
        completion=times.completion / count,
        inverse=times.inverse / times.longer,
    )


def estimate_goals(
    times: TokenTimes, load: ServiceLoad, terms: ScalingTerms, factor: float
) -> GoalEstimate | None:
    """Return the number of replicas that meet the objectives, or None if there are no objectives
    or no speeds yet. `factor` is below 1 if too many of the last answers were late; then the share
    of answers that may be late is multiplied by it.
    """
    if not terms.has_objectives:
        return None
    speeds = find_speeds(times)
    if speeds is None:
        return None
    speeds = _take_role(speeds, terms.role)
    model = _Model(speeds=speeds, load=load, slots=terms.concurrency)
    ttft, gap = terms.ttft or _ANY, terms.token_gap or _ANY
    limits = _ReplicaLimits(
        ttft=None if terms.ttft is None else _relax(ttft, factor, model.find_ttft),
        gap=None if terms.token_gap is None else _relax(gap, factor, model.find_gap),
    )
    least = _find_least(model.keeps_up, _MOST)
    high = _find_least(lambda count: model.meets(limits, count), _MOST_TIMES * least)
    return GoalEstimate(
        speeds=speeds,
        needed=high if load.rate else 0,
        ttft_s=model.find_ttft(high, 1 - ttft.share),
        gap_s=model.find_gap(high, 1 - gap.share),
        best_ttft_s=model.find_ttft(_MOST, 1 - ttft.share),
        best_gap_s=model.find_gap(_MOST, 1 - gap.share),
    )


def _take_role(speeds: TokenSpeeds, role: ReplicaRole | None) -> TokenSpeeds:
    """Return the speeds without the work that replicas of other roles do."""
    if role is ReplicaRole.PREFILL:
        return replace(speeds, completion=0.0)
    if role is ReplicaRole.DECODE:
        return replace(speeds, prompt_s=0.0, base_s=0.0, first_sd_s=0.0)
    return speeds


def _find_least(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the smallest number that is enough, or `most`."""
    low, high = 0, 1
    while high < most and not is_enough(high):
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _relax(
    goal: LatencyGoal, factor: float, find: Callable[[int, float], float]
) -> tuple[float, float]:
    """Return the limit in seconds that the number of replicas follows, and the share of answers
    that may exceed it. A limit that no number of replicas meets is replaced.
    """
    best_s = find(_MOST, 1 - goal.share)
    if goal.limit_s < best_s:
        return _BEYOND_BEST * best_s, 1 - goal.share
    late = (1 - goal.share) * min(_MOST_FACTOR, max(_LEAST_FACTOR, factor))
    return max(goal.limit_s, _NEAR_BEST * find(_MOST, late)), late


class _ReplicaLimits(Struct, frozen=True, kw_only=True):
    """The limits of both times, each with the share of answers that may exceed it."""

    ttft: tuple[float, float] | None
    gap: tuple[float, float] | None


class _Model(Struct, frozen=True, kw_only=True):
    """A service under a load, whose replicas serve at most `slots` requests at once."""

    speeds: TokenSpeeds
    load: ServiceLoad
    slots: int

    def keeps_up(self, replicas: int) -> bool:
        """Return whether requests are served as fast as they arrive."""
        return find_running(self.speeds, self.load.rate / replicas) <= self.slots

    def meets(self, limits: _ReplicaLimits, replicas: int) -> bool:
        if not self.keeps_up(replicas):
            return False
        ttft, gap = limits.ttft, limits.gap
        if gap is not None and self.find_gap(replicas, gap[1]) > gap[0]:
            return False
        return ttft is None or self._late_first(replicas, ttft[0]) <= ttft[1]

    def find_ttft(self, replicas: int, late: float) -> float:
        """Return the time that the share `late` of first tokens exceeds."""
        low, high = 0.0, 1.0
        while self._late_first(replicas, high) > late:
            low, high = high, 2 * high
            if high > _MOST_S:
                return _MOST_S
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if self._late_first(replicas, middle) > late:
                low = middle
            else:
                high = middle
        return high

    def find_gap(self, replicas: int, late: float) -> float:
        """Return the mean time between tokens that the share `late` of answers exceeds."""
        speeds, rate = self.speeds, self.load.rate / replicas
        mean_s, spread_s = speeds.describe_prompts()
        running, spare = find_running(speeds, rate), 1 - rate * mean_s
        if running > self.slots:
            return _MOST_S
        # the request itself runs, and the others vary
        gap_s = (speeds.gap_s + speeds.running_s * (1 + running)) / spare
        variance = running * self._thin(replicas) * speeds.running_s**2 + speeds.gap_sd_s**2
        squares = rate * self._thin(replicas) * (mean_s**2 + spread_s**2)
        variance = variance / spare**2 + squares * gap_s * speeds.inverse
        return gap_s + max(0.0, _NORMAL.inv_cdf(1 - late)) * sqrt(variance)

    def _late_first(self, replicas: int, limit_s: float) -> float:
        """Return the share of answers whose first token comes after `limit_s`."""
        speeds, rate = self.speeds, self.load.rate / replicas
        mean_s, spread_s = speeds.describe_prompts()
        busy, running = rate * mean_s, find_running(speeds, rate)
        if busy >= 1 or running > self.slots:
            return 1.0
        wait_s = rate * (mean_s**2 + spread_s**2) * self._thin(replicas) / (2 * (1 - busy))
        whole = ServiceLoad(
            rate=self.load.rate,
            service_s=running / rate if rate else mean_s,
            unevenness=self.load.unevenness,
            burst=False,
        )
        share = below = shorter_s = 0.0
        for quantile, part_s in _list_quantiles(mean_s, spread_s):
            weight, below = quantile - below, quantile
            # the prompts between two quantiles are as long as the longer one, or too long
            within = min(1.0, max(0.0, limit_s - shorter_s) / max(part_s - shorter_s, 1e-9))
            left_s, shorter_s = max(0.0, limit_s - part_s), part_s
            queued = busy * exp(-busy * left_s / wait_s) if wait_s > 0 else 0.0
            held = find_late_share(whole, self.slots * replicas, left_s) if rate else 0.0
            share += weight * (1 - within + within * min(1.0, queued + held))
        return share + 1 - below

    def _thin(self, replicas: int) -> float:
        """Return the unevenness of the arrivals at one of the replicas."""
        return 1 + (self.load.unevenness - 1) / replicas


def find_running(speeds: TokenSpeeds, rate: float) -> float:
    """Return the mean number of requests on a replica that gets `rate` requests a second, or
    infinity if it cannot keep up.
    """
    mean_s, _ = speeds.describe_prompts()
    tokens = rate * speeds.completion / (1 - rate * mean_s) if rate * mean_s < 1 else inf
    if tokens * speeds.running_s >= 1 or tokens == inf:
        return inf
    return (rate * mean_s + tokens * speeds.gap_s) / (1 - tokens * speeds.running_s)


def _list_quantiles(mean_s: float, spread_s: float) -> Iterator[tuple[float, float]]:
    """Yield quantiles of a lognormal distribution, each after its share."""
    if mean_s <= 0:
        yield 1.0, 0.0
        return
    variance = log(1 + (spread_s / mean_s) ** 2)
    middle, width = log(mean_s) - variance / 2, sqrt(variance)
    for share in _QUANTILES:
        yield share, exp(middle + width * _NORMAL.inv_cdf(share))


def _find_rest(
    squares_y: float, count: float, mean_y: float, slope: float, squares: float
) -> float:
    """Return the standard deviation that a line leaves unexplained."""
    return sqrt(max(0.0, squares_y - count * mean_y * mean_y - slope * slope * squares) / count)
