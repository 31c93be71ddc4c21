"""Jobs, attempts and nodes, and the only legal moves between their phases.

A job is a task submitted to a project. Each attempt is one gang of N identical nodes on one offer.
Each node runs an agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money

FAR = datetime(9999, 1, 1, tzinfo=UTC)  # `not_before` of a job that the queue ignores


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

    LAUNCHING = "launching"  # the intent is written; the provider is being called
    BOOTING = "booting"  # the provider has accepted; not all agents have claimed
    RUNNING = "running"  # every rank is claimed and works
    KEPT = "kept"  # the work is over; the nodes wait, billed, for the project's next job
    ENDING = "ending"  # the outcome is known; the gang must be removed
    ENDED = "ended"  # the gang is gone, or belongs to another attempt, and the bill is closed


class NodePhase(StrEnum):
    """The state of one rank's agent, from its own reports."""

    EXPECTED = "expected"
    CLAIMED = "claimed"
    SETUP = "setup"
    RUNNING = "running"
    EXITED = "exited"


# Each edge says why it exists; tests and the docs' diagrams read these tables.
JOB_MOVES: Mapping[JobPhase, Mapping[JobPhase, str]] = {
    JobPhase.QUEUED: {
        JobPhase.STARTING: "an offer was found and an attempt was written",
        JobPhase.FAILED: "no offer can ever fit, or a limit was reached while waiting",
        JobPhase.STOPPED: "the user stopped it before it was placed",
    },
    JobPhase.STARTING: {
        JobPhase.RUNNING: "every node reported that its work runs",
        JobPhase.QUEUED: "the attempt ended before it ran; another offer is needed",
        JobPhase.STOPPING: "the user or a limit stops it",
        JobPhase.DONE: "the work succeeded before its start was noticed",
        JobPhase.FAILED: "the attempt failed in a way that is not retried",
    },
    JobPhase.RUNNING: {
        JobPhase.DONE: "the work ended with exit code 0",
        JobPhase.FAILED: "the work failed and is not retried",
        JobPhase.QUEUED: "the attempt was lost or failed and is retried",
        JobPhase.STARTING: "its standby gang takes over",
        JobPhase.STOPPING: "the user or a limit stops it",
    },
    JobPhase.STOPPING: {
        JobPhase.STOPPED: "the work was stopped by the user",
        JobPhase.FAILED: "the work was stopped by one of its limits",
        JobPhase.DONE: "the work succeeded before the stop reached it",
    },
    JobPhase.DONE: {},
    JobPhase.FAILED: {JobPhase.QUEUED: "the user asked for a retry"},
    JobPhase.STOPPED: {JobPhase.QUEUED: "the user asked for a retry"},
}
JOB_ENDS = frozenset({JobPhase.DONE, JobPhase.FAILED, JobPhase.STOPPED})

ATTEMPT_MOVES: Mapping[AttemptPhase, Mapping[AttemptPhase, str]] = {
    AttemptPhase.LAUNCHING: {
        AttemptPhase.BOOTING: "the provider accepted the launch, or turned out to have accepted it",
        AttemptPhase.ENDING: (
            "the launch failed or is no longer wanted; nodes that may exist are removed"
        ),
    },
    AttemptPhase.BOOTING: {
        AttemptPhase.RUNNING: "every rank reported that its work runs",
        AttemptPhase.KEPT: "the work ended before its start was noticed, and its nodes are kept",
        AttemptPhase.ENDING: "the boot timed out, a node was lost or failed, or it is no longer "
        "wanted",
    },
    AttemptPhase.RUNNING: {
        AttemptPhase.ENDING: "the work ended, a node was lost, or it is no longer wanted",
        AttemptPhase.KEPT: "the work ended, and its task keeps the nodes for the project's "
        "next job",
    },
    AttemptPhase.KEPT: {
        AttemptPhase.ENDING: "no job came in time, a node was lost, or the user released it",
        AttemptPhase.ENDED: "an attempt of another job took over the gang",
    },
    AttemptPhase.ENDING: {AttemptPhase.ENDED: "the provider no longer has the gang"},
    AttemptPhase.ENDED: {},
}
COMING = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING})  # not every rank works yet
GOING = frozenset({AttemptPhase.ENDING, AttemptPhase.ENDED})  # being removed, or removed


class AttemptOutcome(StrEnum):
    """Why an attempt ended, by what happens next."""

    SUCCEEDED = "succeeded"
    EXIT = "exit"  # the user's program failed
    SETUP = "setup"  # the user's setup failed
    PREEMPTED = "preempted"  # the provider (or a drill) preempted it
    NODE = "node"  # a node or its agent was lost or failed
    CAPACITY = "capacity"  # the provider had no capacity
    REFUSED = "refused"  # the provider refused: quota, credentials, policy
    TIMEOUT = "timeout"  # the boot took too long
    STOPPED = "stopped"  # the user stopped it
    LIMIT = "limit"  # duration, budget, deadline or idle limit


class FailureKind(StrEnum):
    """The kind of a failure; it sets how long the control plane avoids the offer or provider."""

    CAPACITY = "no-capacity"
    QUOTA = "quota"  # a person must act
    REFUSED = "refused"  # a person must act
    PREEMPTED = "preempted"
    GPU = "gpu-fault"
    LINK = "slow-link"
    NODE = "node-fault"
    NETWORK = "network"
    BOOT = "no-boot"
    PROGRAM = "program"  # the same on every offer

    @property
    def label(self) -> str:
        """The name for people."""
        return _LABELS.get(self, self.replace("-", " "))


_LABELS = {
    FailureKind.GPU: "GPU fault",
    FailureKind.BOOT: "did not boot",
    FailureKind.PROGRAM: "the program failed",
}


class StopCause(StrEnum):
    """Why a job is to be stopped."""

    USER = "user"
    BUDGET = "budget"  # or the consented ceiling
    DURATION = "duration"
    DEADLINE = "deadline"


class WaitKind(StrEnum):
    """The reason why an attempt's gang waits."""

    QUEUED = "queued"  # in its provider's own queue
    STARTING = "starting"  # its provider says why it is not up yet
    AT_RISK = "at-risk"  # its provider may take it back, and the job stays on it for now


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrigin:
    """The origin of a run, so that it can be repeated and compared."""

    task_text: str = ""  # the file as submitted
    dialect: str = ""  # the tool that the file is for; "": detected from its keys
    overrides: str = ""  # a YAML table with keys of the task file, which replaces the file's values
    commit: str | None = None
    diff: str | None = None  # uncommitted changes, unified
    snapshot: str | None = None  # content hash of the frozen working folder
    versions: dict[str, str] = field(
        default_factory=dict
    )  # cavvy, python, platform of the submitter
    rerun_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """The last decision of the deadline policy for a job, and its reason."""

    at: datetime
    mode: str  # "idle", "spot" or "on-demand"
    reason: str
    place: str | None = None  # offer key


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One submitted task. `version` guards every write; `since` is when the phase began."""

    id: str  # sorts by submission
    project: str
    name: str  # unique in its project
    user: str = ""
    task: Task
    origin: RunOrigin = RunOrigin()
    phase: JobPhase = JobPhase.QUEUED
    reason: str = "submitted"
    submitted_at: datetime
    since: datetime
    not_before: datetime | None = None  # back-off or schedule
    # the queue ignores it; the schedule reconciler wakes it then
    held_until: datetime | None = None
    last_run: str | None = None  # for a schedule: the id of the last run it started
    attempt: int = 0  # number of the latest attempt; 0 before the first
    stop_reason: str | None = None  # set: the job must be stopped, for this reason
    stop_cause: StopCause | None = None
    exit_code: int | None = None
    ended_at: datetime | None = None
    consented: bool = False  # may run on offers that cost money
    ceiling: Money | None = (
        None  # the maximum that the user consented to spend; None: no separate ceiling
    )
    retries: dict[str, int] = field(default_factory=dict)  # failures and moves so far by kind
    avoid: dict[str, datetime] = field(
        default_factory=dict
    )  # until when each failed offer or shared host is avoided
    standbys: tuple[int, ...] = ()  # numbers of the standby gangs, one of which may take over
    numbered: int = 0  # the highest attempt number so far, if a standby gang has it
    plan_state: PlanState | None = None
    version: int = 0

    @property
    def stop_outcome(self) -> AttemptOutcome | None:
        """The outcome of work that this stop ends."""
        if self.stop_cause is None:
            return None
        return AttemptOutcome.STOPPED if self.stop_cause is StopCause.USER else AttemptOutcome.LIMIT

    @property
    def last_number(self) -> int:
        """The highest attempt number of this job."""
        return max(self.attempt, self.numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWait:
    """What was last reported of a gang that waits; equal values are no news."""

    kind: WaitKind
    said: str = ""  # the provider's own words
    until: datetime | None = None  # the job does not leave a gang at risk before then


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenEnd:
    """The end of a gang that its provider did not report: its bill is a range.

    The charges end at the last sighting. `more` is what the gang cost beyond them if it ended only
    at `latest`, when it was gone for certain.
    """

    latest: datetime
    more: Money


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a job: one gang on one offer."""

    id: str  # job id + "-" + number
    job_id: str
    project: str
    number: int
    # the provider's name for it: installation hash + attempt id; a gang that was taken over has @
    # and its id
    gang: str
    offer: Offer
    nodes: int
    phase: AttemptPhase = AttemptPhase.LAUNCHING
    reason: str = ""
    outcome: AttemptOutcome | None = None
    failure: FailureKind | None = None  # the failure kind, if the outcome does not imply it
    exit_code: int | None = None
    first_failed_rank: int | None = None
    created_at: datetime
    since: datetime
    launched_at: datetime | None = None  # when the provider accepted the launch
    expected_at: datetime | None = None  # when the provider expects it to start
    running_at: datetime | None = None
    finished_at: datetime | None = None  # the work's end
    ended_at: datetime | None = None  # the gang's end
    unseen_end: UnseenEnd | None = None  # if no provider reported the gang's end
    adopted_at: datetime | None = (
        None  # when it took over a warm gang; earlier time belongs to another attempt
    )
    kept_since: datetime | None = None
    kept_until: datetime | None = None  # end of the keep time, whether a job comes or not
    missed_looks: int = 0  # consecutive looks in which the provider did not know the gang
    missed_since: datetime | None = None  # time of the first of these looks
    drill_until: datetime | None = None  # when a fire drill, or the job's move, reclaims the gang
    moved: bool = False  # the job leaves the gang by its own decision: no preemption
    checkpoint_at: datetime | None = None  # newest complete checkpoint
    checkpoint_bytes: int = 0  # size of that checkpoint
    # how long the work paused for it, if known
    checkpoint_cost: timedelta | None = None
    checkpoint_rate: float | None = None  # bytes per second of its upload or write
    checkpoint_every: timedelta | None = (
        None  # the save interval sent to the work, if Cavvy chooses it
    )
    wait: AttemptWait | None = None
    version: int = 0

    @property
    def standing(self) -> str:
        """Its reason and, if its provider queues it, the expected start."""
        if self.expected_at is None:
            return self.reason
        return f"{self.reason}, expected to start {self.expected_at:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An instruction to an agent. `seq` grows; an agent acts on each once."""

    seq: int
    kind: str  # "stop" (seconds: grace) | "notice" (seconds: until the node is reclaimed)
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One rank of a gang, as its agent reports it."""

    attempt_id: str
    project: str
    rank: int
    phase: NodePhase = NodePhase.EXPECTED
    claim: str | None = None  # nonce of the agent that holds the claim
    address: str | None = None  # the address for the other ranks
    order: Order | None = None
    last_seq: int = 0  # last message of the agent that was applied or refused
    refused: int = 0  # messages of the agent that were refused, or some of their fields
    exit_code: int | None = None
    exit_outcome: AttemptOutcome | None = None
    exit_reason: str = ""
    exit_failure: FailureKind | None = None
    claimed_at: datetime | None = None
    running_at: datetime | None = None
    exited_at: datetime | None = None
    heard_at: datetime | None = None
    notice_until: datetime | None = None  # when the provider will reclaim this node
    risk_at: datetime | None = None  # when the provider may reclaim this node
    telemetry: dict[str, float] = field(default_factory=dict)
    progress: dict[str, float | str] = field(default_factory=dict)
    version: int = 0


def attempt_id(job_id: str, number: int) -> str:
    return f"{job_id}-{number}"
