"""Decides whether a new revision of a service, which gets a part of the requests, is worse than the
old one: a sequential test of errors and latency that may be read after any request.

The evidence is an e-process: if the new revision is not worse, it stays below 1 / alpha for ever
with probability 1 - alpha at least, however often one looks (Ville's inequality; Ramdas, Grünwald,
Vovk and Shafer, "Game-theoretic statistics and safe anytime-valid inference", Statistical Science
38, 2023). Requests are compared in blocks of the same time, so that a change of the load, which
meets both revisions, is no evidence.

Errors. Of m errors in a block with n1 requests of the new revision and n0 of the old one, X are of
the new one. If both are equally good, X is hypergeometric, and a binomial number with share
q = n1 / (n1 + n0) is at least as great in convex order (Hoeffding, "Probability inequalities for
sums of bounded random variables", JASA 58, 1963, theorem 4). Therefore the likelihood ratio of
binomial numbers

    (p / q)^X ((1 - p) / (1 - q))^(m - X),  p = q r / (q r + 1 - q),

has a mean of at most 1, exactly and for each r > 1. r = 1 + effect / base makes it sensitive to so
many more errors. The base is the share of errors in the old revision's blocks before, and among the
m errors, which are given; thus r depends on nothing that the ratio tests.

Latency. With the mean logarithm of the latency L of each revision in block b, w = n1 n0 / (n1 + n0)
and the variance v of the logarithm within revisions and blocks,

    exp(d S / v - d^2 W / (2 v)),  S = sum of w (L1 - L0),  W = sum of w,

is the likelihood ratio of a factor exp(d) in the latency against none (Wald, "Sequential Analysis",
1947), and at most 1 on average if the factor is 1 or less. v is estimated, so that this holds
asymptotically (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory
and asymptotic confidence sequences", Annals of Statistics 52, 2024).

Each kind of evidence is a mean over several effects (Robbins, "Statistical methods related to the
law of the iterated logarithm", 1970), and all evidence the mean of both kinds, which is an
e-process again (Vovk and Wang, "E-values", Annals of Statistics 49, 2021).
"""

from collections.abc import Sequence
from math import exp, log

from cavvy.domain.service_updates import CanaryTrial, RevisionSums, UpdateEnd
from cavvy.domain.values import Struct, replace

# What to be sensitive to, and the weight of each.
ERROR_EFFECTS = ((0.01, 0.7), (0.03, 0.1), (0.1, 0.1), (0.5, 0.1))  # more errors of all requests
SLOWER_EFFECTS = ((0.05, 0.7), (0.1, 0.1), (0.3, 0.1), (1.0, 0.1))  # more of the latency
_NO_ERRORS = (0.0,) * len(ERROR_EFFECTS)
_BLOCK = 10  # requests that each revision has in a block, at least
_FIRST_TIMED = 40  # times from which the variance is estimated, at least
_ASSUMED_ERRORS, _ASSUMED_REQUESTS = 0.1, 100  # of the old revision, before any was seen
_LONGEST_LOG = 100.0  # more evidence than anyone needs


class CanaryTerms(Struct, frozen=True, kw_only=True):
    """With `alpha`, at most so large a share of revisions that are not worse is rolled back. After
    `requests` of the new revision without enough evidence, it is promoted.
    """

    alpha: float = 0.01
    requests: int = 2000


class CanaryJudgement(Struct, frozen=True, kw_only=True):
    """`end` is None while neither has been found out: whether the new revision is worse, or that
    it has had enough requests. `evidence` is against it, of the 1 / alpha that roll it back.
    `errors` is the share of each revision's requests that failed, old first; `slower` the factor of
    the latency.
    """

    end: UpdateEnd | None = None
    evidence: float = 1.0
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0


def observe(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    """The trial after what both revisions have answered, if there is enough for a block. `old` and
    `new` only grow, unless the gateway was started again and counts from 0.
    """
    if old.requests < trial.counted_old.requests or new.requests < trial.counted_new.requests:
        trial = replace(trial, counted_old=RevisionSums(), counted_new=RevisionSums())
    block_old, block_new = old - trial.counted_old, new - trial.counted_new
    if block_old.requests < _BLOCK or block_new.requests < _BLOCK:
        return trial
    trial = _observe_errors(trial, block_old, block_new)
    trial = _observe_latency(trial, block_old, block_new)
    return replace(
        trial,
        old=trial.old + block_old,
        new=trial.new + block_new,
        counted_old=old,
        counted_new=new,
    )


def judge(trial: CanaryTrial, terms: CanaryTerms) -> CanaryJudgement:
    """What to do with the new revision."""
    by_errors = _mean(ERROR_EFFECTS, trial.errors or _NO_ERRORS)
    by_latency = _weigh_latency(trial)
    evidence = (by_errors + by_latency) / 2
    end = None
    if evidence >= 1 / terms.alpha:
        end = UpdateEnd.ERRORS if by_errors >= by_latency else UpdateEnd.LATENCY
    elif trial.new.requests >= terms.requests:
        end = UpdateEnd.ENOUGH
    old, new = trial.old, trial.new
    return CanaryJudgement(
        end=end,
        evidence=evidence,
        requests=new.requests,
        errors=(old.errors / max(1, old.requests), new.errors / max(1, new.requests)),
        slower=exp(trial.slower / trial.weight) if trial.weight else 1.0,
    )


def _observe_errors(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    failed = old.errors + new.errors
    if not failed:
        return trial
    share = new.requests / (new.requests + old.requests)
    base = (trial.old.errors + failed * (1 - share) + _ASSUMED_ERRORS) / (
        trial.old.requests + old.requests + _ASSUMED_REQUESTS
    )
    found = []
    for (effect, _), known in zip(ERROR_EFFECTS, trial.errors or _NO_ERRORS, strict=True):
        ratio = 1 + effect / base
        expected = share * ratio / (share * ratio + 1 - share)
        found.append(
            known
            + new.errors * log(expected / share)
            + old.errors * log((1 - expected) / (1 - share))
        )
    return replace(trial, errors=tuple(found))


def _observe_latency(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    if not old.timed or not new.timed:
        return trial
    weight = old.timed * new.timed / (old.timed + new.timed)
    return replace(
        trial,
        slower=trial.slower + weight * (new.logs / new.timed - old.logs / old.timed),
        weight=trial.weight + weight,
        deviation=trial.deviation + old.deviation + new.deviation,
        free=trial.free + old.timed + new.timed - 2,
    )


def _weigh_latency(trial: CanaryTrial) -> float:
    if trial.free < _FIRST_TIMED:
        return 1.0
    variance = max(trial.deviation / trial.free, 1e-9)
    logs = []
    for effect, _ in SLOWER_EFFECTS:
        factor = log(1 + effect)
        logs.append((factor * trial.slower - factor**2 * trial.weight / 2) / variance)
    return _mean(SLOWER_EFFECTS, logs)


def _mean(effects: Sequence[tuple[float, float]], logs: Sequence[float]) -> float:
    """The evidence of all effects, from the logarithm of that of each."""
    found = zip(effects, logs, strict=True)
    return sum(weight * exp(min(each, _LONGEST_LOG)) for (_, weight), each in found)
