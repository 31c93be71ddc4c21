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

from enum import StrEnum
from math import exp, inf, log

from cavvy.domain.values import Struct, replace

# What to be sensitive to, and the weight of each.
ERROR_EFFECTS = ((0.01, 0.7), (0.03, 0.1), (0.1, 0.1), (0.5, 0.1))  # more errors of all requests
SLOWER_EFFECTS = ((0.05, 0.7), (0.1, 0.1), (0.3, 0.1), (1.0, 0.1))  # more of the latency
_BLOCK = 10  # requests that each revision has in a block, at least
_FIRST_TIMED = 40  # times from which the variance is estimated, at least
_ASSUMED_ERRORS, _ASSUMED_REQUESTS = 0.1, 100  # of the old revision, before any was seen
_LONGEST_LOG = 700.0  # exp of more is no float


class RevisionSums(Struct, frozen=True, kw_only=True):
    """Sums over answered requests of a revision. `logs` and `squares` are of the natural logarithm
    of the latency of the `timed` ones, which did not fail.
    """

    requests: int = 0
    errors: int = 0
    timed: int = 0
    logs: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "RevisionSums") -> "RevisionSums":
        return RevisionSums(
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            timed=self.timed + other.timed,
            logs=self.logs + other.logs,
            squares=self.squares + other.squares,
        )

    def __sub__(self, other: "RevisionSums") -> "RevisionSums":
        return RevisionSums(
            requests=self.requests - other.requests,
            errors=self.errors - other.errors,
            timed=self.timed - other.timed,
            logs=self.logs - other.logs,
            squares=self.squares - other.squares,
        )

    @property
    def deviation(self) -> float:
        """The sum of the squared deviations from the mean logarithm."""
        return max(0.0, self.squares - self.logs**2 / self.timed) if self.timed else 0.0


class CanaryTerms(Struct, frozen=True, kw_only=True):
    """With `alpha`, at most so large a share of revisions that are not worse is rolled back. After
    `requests` of the new revision without enough evidence, it is promoted.
    """

    alpha: float = 0.01
    requests: int = 2000


class CanaryTrial(Struct, frozen=True, kw_only=True):
    """What the test remembers: the sums of all blocks and of the one that is still too small, the
    logarithm of the evidence of errors for each effect, and S, W and v's sums of the latency.
    """

    old: RevisionSums = RevisionSums()
    new: RevisionSums = RevisionSums()
    next_old: RevisionSums = RevisionSums()
    next_new: RevisionSums = RevisionSums()
    errors: tuple[float, ...] = (0.0,) * len(ERROR_EFFECTS)
    slower: float = 0.0
    weight: float = 0.0
    deviation: float = 0.0
    free: int = 0

    @property
    def requests(self) -> int:
        """The requests of the new revision so far."""
        return self.new.requests + self.next_new.requests


class CanaryVerdict(StrEnum):
    CONTINUE = "continue"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


class CanaryCause(StrEnum):
    """What speaks most against the new revision, or why it is promoted."""

    NONE = ""
    ERRORS = "errors"
    LATENCY = "latency"
    ENOUGH = "enough"


class CanaryJudgement(Struct, frozen=True, kw_only=True):
    """`evidence` against the new revision, of the 1 / alpha that roll it back. `errors` is the
    share of each revision's requests that failed, old first; `slower` the factor of the latency.
    """

    verdict: CanaryVerdict = CanaryVerdict.CONTINUE
    cause: CanaryCause = CanaryCause.NONE
    evidence: float = 1.0
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0


def observe(trial: CanaryTrial, old: RevisionSums, new: RevisionSums) -> CanaryTrial:
    """The trial with what both revisions have answered since the last time."""
    old, new = trial.next_old + old, trial.next_new + new
    if old.requests < _BLOCK or new.requests < _BLOCK:
        return replace(trial, next_old=old, next_new=new)
    trial = _observe_latency(_observe_errors(trial, old, new), old, new)
    return replace(
        trial,
        old=trial.old + old,
        new=trial.new + new,
        next_old=RevisionSums(),
        next_new=RevisionSums(),
    )


def judge(trial: CanaryTrial, terms: CanaryTerms) -> CanaryJudgement:
    """What to do with the new revision."""
    by_errors = _mean([weight for _, weight in ERROR_EFFECTS], trial.errors)
    by_latency = _weigh_latency(trial)
    evidence = (by_errors + by_latency) / 2
    verdict, cause = CanaryVerdict.CONTINUE, CanaryCause.NONE
    if evidence >= 1 / terms.alpha:
        verdict = CanaryVerdict.ROLL_BACK
        cause = CanaryCause.ERRORS if by_errors >= by_latency else CanaryCause.LATENCY
    elif trial.requests >= terms.requests:
        verdict, cause = CanaryVerdict.PROMOTE, CanaryCause.ENOUGH
    old, new = trial.old, trial.new
    return CanaryJudgement(
        verdict=verdict,
        cause=cause,
        evidence=evidence,
        requests=trial.requests,
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
    for (effect, _), known in zip(ERROR_EFFECTS, trial.errors, strict=True):
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
    return _mean([weight for _, weight in SLOWER_EFFECTS], logs)


def _mean(weights: list[float], logs: tuple[float, ...] | list[float]) -> float:
    if max(logs) > _LONGEST_LOG:
        return inf
    return sum(weight * exp(each) for weight, each in zip(weights, logs, strict=True))
