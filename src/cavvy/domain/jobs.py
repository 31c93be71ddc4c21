"""Jobs, attempts and nodes, and the allowed transitions between their phases.

A job is a task submitted to a project. Each attempt is one gang of N identical nodes on one offer.
Each node runs an agent.
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from cavvy.domain.elastic import SizeChange, SizeHold
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import JobDependency, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field

# value of `not_before` that keeps a job out of the queue without a time limit
FAR = datetime(9999, 1, 1, tzinfo=UTC)


class JobPhase(StrEnum):
    """The state of a job, as users see it."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class AttemptPhase(StrEnum):
    """The state of one gang. An attempt that is not ENDED may cost money."""

    LAUNCHING = "launching"  # the attempt is stored; the provider is being called
    # the provider accepted the launch; some ranks are not claimed by an agent yet
    BOOTING = "booting"
    RUNNING = "running"  # every rank is claimed, and its work is running
    KEPT = "kept"  # the work has ended; the nodes are kept, and billed, for the project's next job
    ENDING = "ending"  # the outcome is known; the gang must be removed
    ENDED = "ended"  # the gang has ended, or another attempt took it over; the bill is complete


class NodePhase(StrEnum):
    """The state of one rank, as its agent reports it."""

    EXPECTED = "expected"
    CLAIMED = "claimed"
    SETUP = "setup"
    RUNNING = "running"
    EXITED = "exited"


# For each transition, these tables give the reason. Tests, and the diagrams in the docs, read them.
JOB_MOVES: Mapping[JobPhase, Mapping[JobPhase, str]] = {
    JobPhase.QUEUED: {
        JobPhase.STARTING: "an offer was found and an attempt was created",
        JobPhase.FAILED: "no offer can ever fit, or a limit was reached while waiting",
        JobPhase.STOPPED: "the user stopped the job before it was placed, or a job before it did "
        "not end as required",
        JobPhase.DONE: "the job helped other jobs, which have succeeded",
    },
    JobPhase.STARTING: {
        JobPhase.RUNNING: "every node reported that its work is running",
        JobPhase.QUEUED: "the attempt ended before its work ran; another offer is needed",
        JobPhase.STOPPING: "the user or a limit stops the job",
        JobPhase.DONE: "the work succeeded before its start was noticed",
        JobPhase.FAILED: "the attempt failed, and this kind of failure is not retried",
        JobPhase.STOPPED: "a person cancelled the job's gang at the provider",
    },
    JobPhase.RUNNING: {
        JobPhase.DONE: "the work ended with exit code 0",
        JobPhase.FAILED: "the work failed and is not retried",
        JobPhase.STOPPED: "a person cancelled the job's gang at the provider",
        JobPhase.QUEUED: "the attempt was lost or failed and is retried",
        JobPhase.STARTING: "the job's standby gang takes over, or a lost node is replaced",
        JobPhase.STOPPING: "the user or a limit stops the job",
    },
    JobPhase.STOPPING: {
        JobPhase.STOPPED: "the work was stopped by the user",
        JobPhase.FAILED: "a limit stopped the work, or the work failed before the stop reached it",
        JobPhase.DONE: "the work succeeded before the stop reached it, the job helped other jobs, "
        "which have succeeded, or it was stopped early in its sweep",
    },
    JobPhase.DONE: {},
    JobPhase.FAILED: {JobPhase.QUEUED: "the user asked for a retry"},
    JobPhase.STOPPED: {
        JobPhase.QUEUED: "the user asked for a retry, or retried a job before it",
    },
}
JOB_ENDS = frozenset({JobPhase.DONE, JobPhase.FAILED, JobPhase.STOPPED})

ATTEMPT_MOVES: Mapping[AttemptPhase, Mapping[AttemptPhase, str]] = {
    AttemptPhase.LAUNCHING: {
        AttemptPhase.BOOTING: "the provider accepted the launch, or the gang was found",
        AttemptPhase.ENDING: (
            "the launch failed or is no longer needed; nodes that may exist are removed"
        ),
    },
    AttemptPhase.BOOTING: {
        AttemptPhase.RUNNING: "every rank reported that its work is running",
        AttemptPhase.KEPT: "the work ended before the server noticed its start, and the task "
        "keeps the nodes",
        AttemptPhase.ENDING: "the boot timed out, a node was lost or failed, or the attempt is no "
        "longer needed",
        AttemptPhase.ENDED: "a node was lost, and the next attempt keeps the others",
    },
    AttemptPhase.RUNNING: {
        AttemptPhase.ENDING: "the work ended, a node was lost, or the attempt is no longer needed",
        AttemptPhase.KEPT: "the work ended, and its task keeps the nodes for the project's "
        "next job",
        AttemptPhase.ENDED: "a node was lost, and the next attempt keeps the others",
    },
    AttemptPhase.KEPT: {
        AttemptPhase.ENDING: "no job took the gang over in time, a node was lost, or the user "
        "released the gang",
        AttemptPhase.ENDED: "an attempt of another job took over the gang",
    },
    AttemptPhase.ENDING: {AttemptPhase.ENDED: "the provider no longer has the gang"},
    AttemptPhase.ENDED: {},
}
# phases in which the work does not run on every rank yet
COMING = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING})
# phases in which the gang is being removed or has ended
GOING = frozenset({AttemptPhase.ENDING, AttemptPhase.ENDED})


class AttemptOutcome(StrEnum):
    """The reason why an attempt ended. The job's next step depends on the outcome."""

    SUCCEEDED = "succeeded"
    EXIT = "exit"  # the user's program failed
    SETUP = "setup"  # the user's setup failed
    PREEMPTED = "preempted"  # the provider (or a drill) preempted the gang
    NODE = "node"  # a node or its agent was lost or failed
    CAPACITY = "capacity"  # the provider had no capacity
    REFUSED = "refused"  # the provider refused the launch: quota, credentials or policy
    TIMEOUT = "timeout"  # the boot took too long
    STOPPED = "stopped"  # the user stopped the job, or a person cancelled its gang at the provider
    LIMIT = "limit"  # a limit was reached: duration, budget, deadline or idle time


# outcomes after which the node can still run other work
NODE_SPARED = frozenset(
    {
        AttemptOutcome.SUCCEEDED,
        AttemptOutcome.EXIT,
        AttemptOutcome.SETUP,
        AttemptOutcome.STOPPED,
    }
)


class FailureKind(StrEnum):
    """The kind of a failure. The kind determines how long the control plane avoids the offer."""

    CAPACITY = "no-capacity"
    QUOTA = "quota"  # a person must raise the quota
    REFUSED = "refused"  # a person must solve the problem at the provider
    PREEMPTED = "preempted"
    GPU = "gpu-fault"
    LINK = "slow-link"
    NODE = "node-fault"
    NETWORK = "network"
    BOOT = "no-boot"
    STUCK = "stuck"  # the work made no progress for longer than its limit
    PROGRAM = "program"  # the program would fail on every offer

    @property
    def label(self) -> str:
        """The name of the failure kind, as users see it."""
        return _LABELS.get(self, self.replace("-", " "))


_LABELS = {
    FailureKind.GPU: "GPU fault",
    FailureKind.BOOT: "did not boot",
    FailureKind.STUCK: "no progress",
    FailureKind.PROGRAM: "the program failed",
}


class StopCause(StrEnum):
    """The reason why a job must be stopped."""

    USER = "user"
    BUDGET = "budget"  # the budget, or the ceiling that the user agreed to
    DURATION = "duration"
    DEADLINE = "deadline"
    DEPENDENCY = "dependency"  # a job that had to end first did not end as required
    GROUP = "group"  # another job of its group failed, or the jobs that it helped were stopped
    EARLY = "early"  # the job of a sweep fell behind others of its sweep
    HELPED = "helped"  # a helper is no longer needed: the jobs that it helped have succeeded


_ORDERED = frozenset({StopCause.USER, StopCause.GROUP, StopCause.EARLY, StopCause.HELPED})


class WaitKind(StrEnum):
    """The reason why the gang of an attempt waits."""

    QUEUED = "queued"  # the gang is in its provider's own queue
    STARTING = "starting"  # the provider reports why the gang is not running yet
    AT_RISK = "at-risk"  # the provider may reclaim the gang, and the job stays on it for now


class RunOrigin(Struct, frozen=True, kw_only=True):
    """The origin of a run. The origin of each run is stored, so that the run can be repeated and
    compared.
    """

    task_text: str = ""  # the task file as submitted
    # the tool whose format the task file has; "" to detect it from the file's keys
    dialect: str = ""
    overrides: str = ""  # a YAML mapping whose values replace those of the task file
    commit: str | None = None
    diff: str | None = None  # uncommitted changes as a unified diff
    snapshot: str | None = None  # content hash of the snapshot of the working folder
    versions: dict[str, str] = field(
        default_factory=dict
    )  # the submitter's platform and versions of Cavvy and Python
    rerun_of: str | None = None
    path: str = ""  # PATH of the submitting shell, if the server is on the same machine


class PlanState(Struct, frozen=True, kw_only=True):
    """The last decision of the deadline policy for a job, with its reason."""

    at: datetime
    mode: str  # "idle", "spot" or "on-demand"
    reason: str
    place: str | None = None  # key of the offer


class JobRecord(Struct, frozen=True, kw_only=True):
    """One submitted task. A write of the job fails if the stored `version` has changed since the
    job was read. `since` is the time when the current phase began.
    """

    id: str  # ids sort by the time of submission
    project: str
    name: str  # unique in the project
    array_id: str | None = None  # the array that the job is a member of
    member: int | None = None  # its index in the array
    # in a sweep with `search`: which combination of values was chosen when the job first started
    point: int | None = None
    user: str = ""
    account: str = ""  # that submitted the job or retried it; "" for the owner of the server
    task: TaskSpec
    origin: RunOrigin = RunOrigin()
    phase: JobPhase = JobPhase.QUEUED
    reason: str = "submitted"
    setback: str = ""  # why the last attempt could not start, or could not finish its work
    submitted_at: datetime
    since: datetime
    not_before: datetime | None = None  # earliest start, set after a failure or by the schedule
    # the queue ignores the job until this time; then the schedule reconciler puts it into the queue
    held_until: datetime | None = None
    # the jobs that must end before the job enters the queue; () if it no longer waits for them
    after: tuple[JobDependency, ...] = ()
    last_run: str | None = None  # for a repeating job: the ID of the last run that it started
    attempt: int = 0  # number of the latest attempt; 0 before the first
    stop_reason: str | None = None  # if set, the job must be stopped for this reason
    stop_cause: StopCause | None = None
    exit_code: int | None = None
    ended_at: datetime | None = None
    # for each retry of the ended job: the times of the job's end and of the retry
    ended_spells: tuple[tuple[datetime, datetime], ...] = ()
    consented: bool = False  # the user agreed to offers that cost money
    ceiling: Money | None = (
        None  # the maximum that the user agreed to spend; None if the budget is the only limit
    )
    # number of failures and moves so far, by kind
    retries: dict[str, int] = field(default_factory=dict)
    # numbers of checkpoints from which no attempt starts any more, because work failed to read them
    skipped_checkpoints: tuple[int, ...] = ()
    avoid: dict[str, datetime] = field(
        default_factory=dict
    )  # for each failed offer or shared host: when its cooldown ends
    # the most nodes that an elastic job may have, if its user has changed it with `cavvy resize`
    most_nodes: int | None = None
    # the last change of its size, and the sizes that the program did not take
    sizing: SizeChange | None = None
    untaken: tuple[int, ...] = ()
    # why it has no more nodes than it has, as last found
    hold: SizeHold | None = None
    # numbers of the attempts of standby gangs, one of which may take the job over
    standbys: tuple[int, ...] = ()
    numbered: int = 0  # the highest attempt number so far, if it belongs to a standby gang
    plan_state: PlanState | None = None
    # the job does not start, because its account is disabled or was removed
    barred: bool = False
    # the nodes are released after the work, although the task has `keep` or the provider keeps them
    released: bool = False
    # whether the user is removing the job, which therefore cannot be retried
    removing: bool = False
    version: int = 0

    @property
    def stop_outcome(self) -> AttemptOutcome | None:
        """The outcome of an attempt that ends because of the requested stop; None if no stop was
        requested.
        """
        if self.stop_cause is None:
            return None
        return AttemptOutcome.STOPPED if self.stop_cause in _ORDERED else AttemptOutcome.LIMIT

    @property
    def most_next(self) -> int | None:
        """The most nodes that the next attempt of an elastic job may have; None if its range is the
        only limit."""
        now = self.sizing
        caps = (self.most_nodes, now.nodes if now and now.attempt == self.attempt else None)
        return min((each for each in caps if each is not None), default=None)

    @property
    def last_number(self) -> int:
        """The highest attempt number of this job."""
        return max(self.attempt, self.numbered)


class AttemptWait(Struct, frozen=True, kw_only=True):
    """The last reported reason why a gang waits. If the same reason is reported again, nothing is
    recorded.
    """

    kind: WaitKind
    said: str = ""  # the reason in the provider's words
    unknown: bool = False  # the provider does not answer, and `said` names its error
    prepares: bool = False  # the nodes have started, and prepare the work
    # for a gang at risk: the job stays on the gang at least until this time
    until: datetime | None = None


class UnsureBill(Struct, frozen=True, kw_only=True):
    """The part of a gang's cost that is uncertain, because the provider did not report when the
    bill of each node began and ended.

    The charges contain only the time in which the nodes were certainly billed. `more` is the
    additional cost in the worst case, in which the provider bills each node for the longest
    possible time. `latest` is the time at which the gang had certainly ended, or None if the
    provider reported the end of each node. `more` includes `traffic`, the cost of sending the
    checkpoints that the nodes may have been sending when the provider lost the nodes.
    """

    latest: datetime | None
    more: Money
    traffic: Money = field(default_factory=Money)


class RankCollective(Struct, frozen=True, kw_only=True):
    """The collective that a rank has called last in a group of ranks: its number in the group, its
    name, and whether it has ended on this rank."""

    group: str
    number: int
    call: str
    done: bool = False


class RankStack(Struct, frozen=True, kw_only=True):
    """Where a process of the work is. `rank` is its rank among all processes of the job, and
    `world` their number, or 0 if it is unknown."""

    rank: int
    world: int = 0
    place: str  # the innermost line of the program's own code
    call: str = ""  # the operation of PyTorch in which it waits for other ranks, or ""
    collectives: tuple[RankCollective, ...] = ()  # by PyTorch's flight recorder, if it has one
    works: bool = False  # whether it computes, or its stack changes, and it waits for no other rank
    mark: int = 0  # the same in two looks if it has waited at one place between them


class StackReport(Struct, frozen=True, kw_only=True):
    """The stacks of the processes of one node. `moved` states that one of them does not hang,
    `deadlocked` that nothing can wake any of them. `text` says why there are no stacks."""

    at: datetime
    stacks: tuple[RankStack, ...] = ()
    moved: bool = False
    deadlocked: bool = False
    text: str = ""


class SlowRanks(Struct, frozen=True, kw_only=True):
    """The ranks that have needed much longer for a step than the median rank since a time, without
    those of which an event has `told`."""

    ranks: tuple[int, ...]
    since: datetime
    told: tuple[int, ...] = ()


class StuckWork(Struct, frozen=True, kw_only=True):
    """Work that made no progress. `ranks` are the processes that did not reach the place where the
    others wait; () if they are unknown. `node` is the rank of the node of the first of them."""

    at: datetime
    reason: str
    ranks: tuple[int, ...] = ()
    node: int | None = None


class SilentWork(Struct, frozen=True, kw_only=True):
    """Work that says nothing, but computes: where it was `at` a look, and since which look the
    same ranks have been waited for, at one place (`mark`)."""

    at: datetime
    since: datetime
    reason: str
    mark: str = ""


class UnsafeFile(Struct, frozen=True, kw_only=True):
    """What a rank has said of files that may be lost: since when it says so (`at`), and why."""

    at: datetime
    rank: int
    reason: str


class Attempt(Struct, frozen=True, kw_only=True):
    """One attempt of a job: one gang on one offer."""

    id: str  # job id + "-" + number
    job_id: str
    project: str
    number: int
    # The gang's name at the provider, made of a hash of the installation and the attempt's ID. If
    # another attempt has taken the gang over, "@" and the ID of this attempt are appended.
    gang: str
    offer: Offer
    nodes: int
    phase: AttemptPhase = AttemptPhase.LAUNCHING
    reason: str = ""
    outcome: AttemptOutcome | None = None
    # set if the kind of failure cannot be derived from the outcome
    failure: FailureKind | None = None
    exit_code: int | None = None
    first_failed_rank: int | None = None
    created_at: datetime
    since: datetime
    planned: tuple[datetime, datetime] | None = None  # when offers were compared for the attempt
    launched_at: datetime | None = None  # when the provider accepted the launch
    expected_at: datetime | None = None  # when the provider expects the gang to start
    running_at: datetime | None = None
    finished_at: datetime | None = None  # when the work ended
    ended_at: datetime | None = None  # when the gang ended
    # when the user was notified that the provider does not remove the gang
    unremoved_at: datetime | None = None
    unsure_bill: UnsureBill | None = None  # set if the cost is known only as a range
    adopted_at: datetime | None = (
        # when the attempt took over a warm gang, whose earlier time is billed to another attempt
        None
    )
    # the ranks whose lost nodes are replaced in a gang that the attempt has taken over from the
    # attempt before, and until when the other nodes wait for capacity
    repairs: tuple[int, ...] = ()
    repair_until: datetime | None = None
    # rank -> the number of the attempt that replaced its node last, for all ranks of the gang whose
    # nodes were replaced; the tokens of the former nodes are no longer valid
    rounds: Mapping[int, int] = field(default_factory=dict)
    # kept ranks whose agents have no token of their own yet, and claim with the gang's first one
    open_ranks: tuple[int, ...] = ()
    kept_since: datetime | None = None
    kept_until: datetime | None = None  # when the gang is released if no job has taken it over
    missed_looks: int = 0  # consecutive polls in which the provider did not report the gang
    missed_since: datetime | None = None  # when the first of these polls was made
    # when a fire drill, or a move of the job to another gang, reclaims the gang
    drill_until: datetime | None = None
    # whether the job chose to leave the gang, so that its end does not count as a preemption
    moved: bool = False
    moved_because: str = ""  # why the control plane moves the work, if nodes are maintained
    reclaimed_for: str = ""  # the project that gets its quota back, if the gang is reclaimed for it
    checkpoint_at: datetime | None = None  # time of the newest complete checkpoint
    checkpoint_bytes: int = 0  # size of the newest complete checkpoint
    # how long the work paused to save that checkpoint, if known
    checkpoint_cost: timedelta | None = None
    # bytes per second at which that checkpoint was uploaded or written
    checkpoint_rate: float | None = None
    checkpoint_every: timedelta | None = (
        None  # the checkpoint interval that was sent to the work, if Cavvy chooses the interval
    )
    # set if files may be lost, until a later checkpoint is complete without this warning
    unsafe: UnsafeFile | None = None
    stuck: StuckWork | None = None  # set if the work is ended because it hangs
    silent: SilentWork | None = None  # set if the work was silent for long at the last look
    slow: SlowRanks | None = None  # set if ranks need longer for a step than others
    wait: AttemptWait | None = None
    version: int = 0

    @property
    def bought_as(self) -> str:
        """The gang's name at its provider, even after another attempt has taken over the gang."""
        return self.gang.partition("@")[0]

    @property
    def handed_on(self) -> bool:
        """Whether another attempt has taken over the gang."""
        return "@" in self.gang

    @property
    def standing(self) -> str:
        """The attempt's `reason` and, if the gang is in the provider's queue, the time when the
        gang is expected to start."""
        if self.expected_at is None:
            return self.reason
        return f"{self.reason}, expected to start {self.expected_at:%Y-%m-%d %H:%M} UTC"


class Order(Struct, frozen=True, kw_only=True):
    """An instruction to an agent. Later orders have a higher `seq`. An agent carries out each order
    once.
    """

    seq: int
    # "stop" (`seconds` is the grace period), "notice" (`seconds` until the node is reclaimed) or
    # "stacks" (the agent reports where the work is, within `seconds`)
    kind: str
    seconds: float
    reason: str
    at: datetime | None = None  # when the order was given


class SentKind(StrEnum):
    """The kinds of data that a node sends to storages and to the server."""

    CHECKPOINTS = "checkpoints"
    OUTPUT = "output"
    LOG = "log"


class SentData(Struct, frozen=True, kw_only=True):
    """The number of bytes that a node has sent so far, for one kind of data or, for OUTPUT, for one
    output.
    """

    kind: SentKind
    output: int = 0  # OUTPUT: the number of the output in the task, from 0
    bytes: int = 0
    # The price of a GB (10^9 bytes) when the first bytes were sent, and its date; None if it is
    # unknown.
    egress: Money | None = None
    egress_as_of: date | None = None


class NodeProof(Struct, frozen=True):
    """What an agent's own token proves: its rank, and the round that started its node
    (`Attempt.rounds`), which is 0 if the node was started with its gang."""

    rank: int
    round: int

    def is_current(self, attempt: Attempt) -> bool:
        """Return whether the node is one of the gang's nodes, and was not replaced."""
        return attempt.rounds.get(self.rank, 0) == self.round


class Node(Struct, frozen=True, kw_only=True):
    """One rank of a gang, as its agent reports it."""

    attempt_id: str
    project: str
    rank: int
    phase: NodePhase = NodePhase.EXPECTED
    claim: str | None = None  # nonce of the agent that holds the claim
    sealed: bool = False  # whether the agent gets a token of its own with its work
    address: str | None = None  # the address at which the other ranks can reach this node
    tunnel_key: str = ""  # the node's public key, if it can encrypt the traffic to other ranks
    tunnel_missing: str = ""  # the requirements of encryption that the node lacks
    order: Order | None = None
    last_seq: int = 0  # number of the agent's last message that was applied or refused
    refused: int = 0  # number of the agent's messages that were refused in whole or in part
    told_bytes: int = 0  # total bytes of the events that the agent's messages created
    sent: tuple[SentData, ...] = ()  # the data that the agent has sent, according to its messages
    exit_code: int | None = None
    exit_outcome: AttemptOutcome | None = None
    exit_reason: str = ""
    exit_failure: FailureKind | None = None
    claimed_at: datetime | None = None
    running_at: datetime | None = None
    exited_at: datetime | None = None
    heard_at: datetime | None = None
    # where in the log the output of the setup, or of the image's pull, begins and ends
    setup_from: int | None = None
    setup_to: int | None = None
    # by how many seconds the node's clock is behind the server's: the smallest difference that a
    # request showed since the clock was set back, because requests take time
    clock_behind_s: float | None = None
    clock_at: datetime | None = None  # the time of the node's clock at its last request
    # when the provider will reclaim this node, if it has announced that
    notice_until: datetime | None = None
    risk_at: datetime | None = None  # when the provider warned that it may reclaim this node
    telemetry: dict[str, float] = field(default_factory=dict)
    progress: dict[str, float | str] = field(default_factory=dict)
    stacks: StackReport | None = None  # the last that was ordered
    version: int = 0


def attempt_id(job_id: str, number: int) -> str:
    return f"{job_id}-{number}"
