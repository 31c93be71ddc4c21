"""A new revision of a service that is tried out before it replaces the one that serves."""

from datetime import datetime
from enum import StrEnum

from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct


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


class RevisionTraffic(Struct, frozen=True, kw_only=True):
    """What the gateway has counted since it divides the requests between the revision that serves
    and the one with this number.
    """

    revision: int
    old: RevisionSums
    new: RevisionSums


class CanaryTrial(Struct, frozen=True, kw_only=True):
    """What the test of a canary remembers (`control.decide.canary`): the sums over all blocks and
    the counters at the end of the last one, the logarithm of the evidence of errors for each
    effect, and the sums S, W and of the variance of the latency.
    """

    old: RevisionSums = RevisionSums()
    new: RevisionSums = RevisionSums()
    counted_old: RevisionSums = RevisionSums()
    counted_new: RevisionSums = RevisionSums()
    errors: tuple[float, ...] = ()
    slower: float = 0.0
    weight: float = 0.0
    deviation: float = 0.0
    free: int = 0


class CandidateRevision(Struct, frozen=True, kw_only=True):
    """The revision that is tried out, with who started it and on which terms. Its replicas are
    among those of the service. `ready_at` is when its first replica was ready. With `withdrawn`,
    the user has gone back to the old revision.
    """

    revision: int
    task: TaskSpec
    origin: RunOrigin = RunOrigin()
    user: str = ""
    consented: bool = False
    ceiling: Money | None = None
    created_at: datetime
    ready_at: datetime | None = None
    failures: int = 0
    failed_at: datetime | None = None
    problem: str = ""
    trial: CanaryTrial = CanaryTrial()
    withdrawn: bool = False


class UpdateEnd(StrEnum):
    """How the trial of a revision ended, and why."""

    ENOUGH = "enough"  # promoted: so many requests without enough evidence against it
    TIME = "time"  # promoted: so long without enough evidence
    READY = "ready"  # promoted: all its replicas are ready, or none is needed
    ERRORS = "errors"  # rolled back: more of its requests fail
    LATENCY = "latency"  # rolled back: its requests take longer
    FAILED = "failed"  # rolled back: its replicas end before or soon after they are ready
    WITHDRAWN = "withdrawn"  # rolled back: the user went back to the old revision


PROMOTED = frozenset({UpdateEnd.ENOUGH, UpdateEnd.TIME, UpdateEnd.READY})


class UpdateOutcome(Struct, frozen=True, kw_only=True):
    """The last trial that has ended. `errors` is the share of each revision's requests that failed,
    old first; `slower` is the factor of the latency; `evidence` of the 1 / alpha that roll back.
    """

    revision: int
    end: UpdateEnd
    at: datetime
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0
    evidence: float = 1.0
    problem: str = ""
