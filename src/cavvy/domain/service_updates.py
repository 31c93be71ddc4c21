"""New revisions of services, which are tested before they replace the serving revision."""

from enum import StrEnum

from cavvy.domain.values import Struct, combine

# The number of successive timed requests of a revision in a group
GROUP = 10


class RevisionSums(Struct, frozen=True, kw_only=True):
    """The sums over a revision's answered requests, which only grow. Lost connections, and
    responses with a status of 500 or more, are errors. Requests without an error, and requests that
    the client aborted, have a latency, in seconds from the start of the request at the replica to
    the last byte of the response; `timed` is their number. For them, `logs` is the sum of the
    natural logarithms of the latencies, and `squares` is the sum of the squared logarithms.
    Successive `timed` requests are combined into groups of GROUP requests; `groups` is the number
    of these groups. Each group has a mean logarithm; `means` is the sum of these means, and
    `mean_squares` is the sum of their squares. A gateway of an earlier version forms no groups.
    """

    requests: int = 0
    errors: int = 0
    timed: int = 0
    logs: float = 0.0
    squares: float = 0.0
    groups: int = 0
    means: float = 0.0
    mean_squares: float = 0.0

    def __add__(self, other: "RevisionSums") -> "RevisionSums":
        return combine(self, other)

    def __sub__(self, other: "RevisionSums") -> "RevisionSums":
        return combine(self, other, -1)

    @property
    def deviation(self) -> float:
        """The sum of the squared deviations from the mean logarithm."""
        return max(0.0, self.squares - self.logs**2 / self.timed) if self.timed else 0.0

    @property
    def deviation_of_groups(self) -> float:
        """GROUP times the sum, over all groups, of the squared difference between the group's mean
        and the mean of all groups.
        """
        if not self.groups:
            return 0.0
        return GROUP * max(0.0, self.mean_squares - self.means**2 / self.groups)


class UpdateEnd(StrEnum):
    """The result of the trial of a revision, with the reason."""

    ENOUGH = (
        "enough"  # promoted: the required number of requests without enough evidence against it
    )
    TIME = "time"  # promoted: the time limit passed without enough evidence
    READY = "ready"  # promoted: all its replicas are ready, or the service needs no replica
    ERRORS = "errors"  # rolled back: more of its requests fail
    LATENCY = "latency"  # rolled back: its requests take longer
    FAILED = "failed"  # rolled back: its replicas ended before or soon after they were ready
    WITHDRAWN = "withdrawn"  # rolled back: the user returned to the old revision


class NullDistribution(Struct, frozen=True, kw_only=True):
    """The distribution of a test's statistic if both revisions are equally good. `masses[i]` is the
    probability of two events together: the statistic equals `first + i`, and no earlier look rolled
    back the revision. `spent` is the probability that an earlier look rolled back the revision. A
    look is one analysis of the data during the trial.
    """

    first: int = 0
    masses: tuple[float, ...] = (1.0,)
    spent: float = 0.0


class CanaryTrial(Struct, frozen=True, kw_only=True):
    """The state of a canary's test (`control.decide.canary`).

    `old` and `new` are the sums over all blocks. `counted_old` and `counted_new` are the counters
    at the end of the last block. `failed` is the number of the new revision's failed requests.
    `shift` is the sum S of the latency test, which compares the latencies of the two revisions, and
    `information` is the sum of the weights in S. `deviation` (a sum of squares) and `free` (its
    degrees of freedom) give the variance of the latency of both revisions; `deviation_new` and
    `free_new` give the variance for the new revision alone. `blocks` is the number of blocks. In
    each block, the difference between the two revisions' mean logarithms of the latency is squared
    and multiplied by the block's weight; `spread` is the sum of these products.
    `deviation_of_groups` and `free_groups` are the sums for the variance of the groups' means.
    `failures` is the distribution that `failed` would have if both revisions were equally good;
    `shifts` is the same for S. `found` is the reason why the test rolled back the new revision.
    """

    old: RevisionSums = RevisionSums()
    new: RevisionSums = RevisionSums()
    counted_old: RevisionSums = RevisionSums()
    counted_new: RevisionSums = RevisionSums()
    failed: int = 0
    failures: NullDistribution = NullDistribution()
    shift: float = 0.0
    information: float = 0.0
    deviation: float = 0.0
    free: int = 0
    deviation_new: float = 0.0
    free_new: int = 0
    blocks: int = 0
    spread: float = 0.0
    deviation_of_groups: float = 0.0
    free_groups: int = 0
    shifts: NullDistribution = NullDistribution()
    evidence: float = 0.0
    found: UpdateEnd | None = None


PROMOTED = frozenset({UpdateEnd.ENOUGH, UpdateEnd.TIME, UpdateEnd.READY})
