"""Decides whether a new revision of a service, which receives a part of the requests, is worse than
the old one. The decision is a sequential test of errors and latency that may be evaluated after any
request.

The evidence is an e-process: if the new revision is not worse, the evidence stays below 1 / alpha
for ever with probability at least 1 - alpha, however often it is evaluated (Ville's inequality;
Ramdas, Grünwald, Vovk and Shafer, "Game-theoretic statistics and safe anytime-valid inference",
Statistical Science 38, 2023). Requests are compared in blocks of the same time, so that a change of
the load, which affects both revisions, does not count as evidence.

Errors. A block has n1 requests of the new revision, n0 requests of the old one, and m errors, of
which X are the new revision's. If both revisions are equally good, X is hypergeometric, and a
binomial number with share q = n1 / (n1 + n0) is at least as great in convex order (Hoeffding,
"Probability inequalities for sums of bounded random variables", JASA 58, 1963, theorem 4).
Therefore the likelihood ratio of binomial numbers

    (p / q)^X ((1 - p) / (1 - q))^(m - X),  p = q r / (q r + 1 - q),

has a mean of at most 1, exactly and for each r > 1. With r = 1 + effect / base, the ratio is
sensitive to an increase of the error rate by `effect`. The base is computed from the old revision's
earlier blocks and from m, which is given; thus r does not depend on what the ratio tests.

Latency. With the mean logarithm of the latency L of each revision in block b, w = n1 n0 / (n1 + n0)
and the variance v of the logarithm within revisions and blocks,

    exp(d S / v - d^2 W / (2 v)),  S = sum of w (L1 - L0),  W = sum of w,

is the likelihood ratio of a factor exp(d) in the latency against none (Wald, "Sequential Analysis",
1947), and at most 1 on average if the factor is 1 or less. Because v is estimated, this bound holds
asymptotically (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory
and asymptotic confidence sequences", Annals of Statistics 52, 2024).

Each kind of evidence is a mean over several effects (Robbins, "Statistical methods related to the
law of the iterated logarithm", 1970). The total evidence is the mean of both kinds, which is again
an e-process (Vovk and Wang, "E-values", Annals of Statistics 49, 2021).
"""

from collections.abc import Sequence
from math import exp, log

from cavvy.domain.service_updates import CanaryTrial, RevisionSums, UpdateEnd
from cavvy.domain.values import Struct, replace

# The effects to which the test is sensitive, and the weight of each effect.
# increase of the share of failed requests
ERROR_EFFECTS = ((0.01, 0.7), (0.03, 0.1), (0.1, 0.1), (0.5, 0.1))
# relative increase of the latency
SLOWER_EFFECTS = ((0.05, 0.7), (0.1, 0.1), (0.3, 0.1), (1.0, 0.1))
_NO_ERRORS = (0.0,) * len(ERROR_EFFECTS)
_BLOCK = 10  # minimum number of requests of each revision in a block
_FIRST_TIMED = 40  # minimum number of times from which the variance is estimated
# assumed error rate of the old revision before any error was seen
_ASSUMED_ERRORS, _ASSUMED_REQUESTS = 0.1, 100
_LONGEST_LOG = 100.0  # limit of the evidence; larger values make no difference


class CanaryTerms(Struct, frozen=True, kw_only=True):
    """`alpha` is the maximum share of revisions that are rolled back although they are not worse.
    The new revision is promoted after `requests` requests without enough evidence against it.
    """

    alpha: float = 0.01
    requests: int = 2000


class CanaryJudgement(Struct, frozen=True, kw_only=True):
    """`end` is None until the trial is decided, by evidence that the new revision is worse or
    because the new revision has had enough requests. `evidence` is the evidence against the new
    revision; at 1 / alpha the revision is rolled back. `errors` is each revision's share of failed
    requests, with the old revision first; `slower` is the factor by which the latency has grown.
    """

    end: UpdateEnd | None = None
    evidence: float = 1.0
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0


def observe(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    """Return the trial with one more block, if both revisions have had enough responses for a block
    since the last one. The counts `old` and `new` only grow, unless the gateway was restarted and
    counts from 0.
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
    """Decide what to do with the new revision."""
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
    """Return the mean evidence of all effects, computed from the logarithm of each effect's
    evidence."""
    found = zip(effects, logs, strict=True)
    return sum(weight * exp(min(each, _LONGEST_LOG)) for (_, weight), each in found)
