"""Jobs, attempts and nodes, and the only legal moves between their phases.

A job is a task submitted to a project. Each try is an attempt: one gang of N identical nodes on one
offer. A node runs our agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money

FAR = datetime(9999, 1, 1, tzinfo=UTC)  # `not_before` of a job that the queue must not see


class JobPhase(StrEnum):
    """Where a job stands, as users see it."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class AttemptPhase(StrEnum):
    """Where one gang stands. An attempt that is not ENDED may cost money."""

    LAUNCHING = "launching"  # the intent is written; the provider is being asked
    BOOTING = "booting"  # the provider has accepted; agents have not all claimed
    RUNNING = "running"  # every rank holds its claim and works
    KEPT = "kept"  # the work is over; the nodes wait, paid, for the project's next job
    ENDING = "ending"  # the outcome is known; the gang must go
    ENDED = "ended"  # the gang is gone, or another attempt's, and the bill is closed


class NodePhase(StrEnum):
    """Where the agent of one rank stands, by its own reports."""

    EXPECTED = "expected"
    CLAIMED = "claimed"
    SETUP = "setup"
    RUNNING = "running"
    EXITED = "exited"


# Each edge says why it exists; tests and the docs' diagrams read these tables.
JOB_MOVES: Mapping[JobPhase, Mapping[JobPhase, str]] = {
    JobPhase.QUEUED: {
        JobPhase.STARTING: "a place was found and an attempt was written",
        JobPhase.FAILED: "no offer can ever fit, or a limit was reached while waiting",
        JobPhase.STOPPED: "the user stopped it before it had a place",
    },
    JobPhase.STARTING: {
        JobPhase.RUNNING: "every node reported that its work runs",
        JobPhase.QUEUED: "the attempt ended before it ran; another place is needed",
        JobPhase.STOPPING: "the user or a limit wants it stopped",
        JobPhase.DONE: "the work ended well before its start was noticed",
        JobPhase.FAILED: "the attempt failed in a way that is not tried again",
    },
    JobPhase.RUNNING: {
        JobPhase.DONE: "the work ended with exit code 0",
        JobPhase.FAILED: "the work failed and is not tried again",
        JobPhase.QUEUED: "the attempt was lost or failed; it is tried again",
        JobPhase.STARTING: "a gang that was started beforehand takes over",
        JobPhase.STOPPING: "the user or a limit wants it stopped",
    },
    JobPhase.STOPPING: {
        JobPhase.STOPPED: "the work was stopped as the user wished",
        JobPhase.FAILED: "the work was stopped by one of its limits",
        JobPhase.DONE: "the work ended well before the stop reached it",
    },
    JobPhase.DONE: {},
    JobPhase.FAILED: {JobPhase.QUEUED: "the user asked for a retry"},
    JobPhase.STOPPED: {JobPhase.QUEUED: "the user asked for a retry"},
}
JOB_ENDS = frozenset({JobPhase.DONE, JobPhase.FAILED, JobPhase.STOPPED})

ATTEMPT_MOVES: Mapping[AttemptPhase, Mapping[AttemptPhase, str]] = {
    AttemptPhase.LAUNCHING: {
        AttemptPhase.BOOTING: "the provider accepted the launch, or was found to have done so",
        AttemptPhase.ENDING: "the launch failed or is no longer wanted; what may exist must go",
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
        AttemptPhase.ENDING: "no job came in time, a node was lost, or the user wants it given "
        "back",
        AttemptPhase.ENDED: "an attempt of another job took the gang over",
    },
    AttemptPhase.ENDING: {AttemptPhase.ENDED: "the provider no longer has the gang"},
    AttemptPhase.ENDED: {},
}
COMING = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING})  # not every rank works yet
GOING = frozenset({AttemptPhase.ENDING, AttemptPhase.ENDED})  # to be given back, or given back


class AttemptOutcome(StrEnum):
    """Why an attempt ended, by what is done next."""

    SUCCEEDED = "succeeded"
    EXIT = "exit"  # the user's program failed
    SETUP = "setup"  # the user's setup failed
    PREEMPTED = "preempted"  # the provider (or a drill) took the capacity back
    NODE = "node"  # a node or its agent was lost or broken
    CAPACITY = "capacity"  # the place had none
    REFUSED = "refused"  # the provider will not: quota, credentials, policy
    TIMEOUT = "timeout"  # the boot took too long
    STOPPED = "stopped"  # the user wanted it so
    LIMIT = "limit"  # duration, budget, deadline or idle limit


class FailureKind(StrEnum):
    """What failed, by what it says about the place: it sets how long that is left alone."""

    CAPACITY = "no-capacity"
    QUOTA = "quota"  # a person must act
    REFUSED = "refused"  # a person must act
    PREEMPTED = "preempted"
    GPU = "gpu-fault"
    LINK = "slow-link"
    NODE = "node-fault"
    NETWORK = "network"
    BOOT = "no-boot"
    PROGRAM = "program"  # the same anywhere

    @property
    def label(self) -> str:
        """As people read it."""
        return _LABELS.get(self, self.replace("-", " "))


_LABELS = {
    FailureKind.GPU: "GPU fault",
    FailureKind.BOOT: "did not boot",
    FailureKind.PROGRAM: "the program failed",
}


class StopCause(StrEnum):
    """What wants a job stopped."""

    USER = "user"
    BUDGET = "budget"  # or the ceiling that the user consented to
    DURATION = "duration"
    DEADLINE = "deadline"


class WaitKind(StrEnum):
    """What an attempt's gang waits for."""

    QUEUED = "queued"  # in its provider's own queue
    STARTING = "starting"  # its provider says why it is not up yet
    AT_RISK = "at-risk"  # its provider may take it back, and the job stays on it for now


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrigin:
    """What a run was made from, so that it can be repeated and compared."""

    task_text: str = ""  # the file as submitted
    commit: str | None = None
    diff: str | None = None  # uncommitted changes, unified
    snapshot: str | None = None  # content hash of the frozen working folder
    versions: dict[str, str] = field(
        default_factory=dict
    )  # cavvy, python, platform of the submitter
    rerun_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What was decided last for a job that is to end in time at the least cost, and why."""

    at: datetime
    mode: str  # "idle", "spot" or "on-demand"
    reason: str
    place: str | None = None  # offer key


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One submitted task. `version` guards every write; `since` is when the phase began."""

    id: str  # sortable by submission
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
    held_until: datetime | None = None  # not in the queue: the schedule reconciler looks at it then
    last_run: str | None = None  # of a schedule: the id of the run that it started last
    attempt: int = 0  # number of the latest attempt; 0 before the first
    stop_reason: str | None = None  # set: a stop is wanted, and why
    stop_cause: StopCause | None = None
    exit_code: int | None = None
    ended_at: datetime | None = None
    consented: bool = False  # may run on offers that cost money
    ceiling: Money | None = (
        None  # the most that the user consented to spend; None is no ceiling of its own
    )
    retries: dict[str, int] = field(default_factory=dict)  # failures and moves so far by kind
    avoid: dict[str, datetime] = field(
        default_factory=dict
    )  # offers or shared hosts that failed, until when
    standbys: tuple[
        int, ...
    ] = ()  # numbers of gangs started beside the job's own, one of which may take over
    numbered: int = 0  # the highest number that an attempt was given, where a standby gang has it
    plan_state: PlanState | None = None
    version: int = 0

    @property
    def stop_outcome(self) -> AttemptOutcome | None:
        """How work that this stop ends is recorded."""
        if self.stop_cause is None:
            return None
        return AttemptOutcome.STOPPED if self.stop_cause is StopCause.USER else AttemptOutcome.LIMIT

    @property
    def last_number(self) -> int:
        """The highest number that an attempt of this job has."""
        return max(self.attempt, self.numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWait:
    """What was last reported of a gang that waits; equal values are no news."""

    kind: WaitKind
    said: str = ""  # the provider's own words
    until: datetime | None = None  # the job does not leave a gang at risk before then


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a job: one gang on one offer."""

    id: str  # job id + "-" + number
    job_id: str
    project: str
    number: int
    # the provider's name for it: installation hash + attempt id; of one that was handed on with @
    # and its id
    gang: str
    offer: Offer
    nodes: int
    phase: AttemptPhase = AttemptPhase.LAUNCHING
    reason: str = ""
    outcome: AttemptOutcome | None = None
    failure: FailureKind | None = None  # where the outcome does not tell it
    exit_code: int | None = None
    first_failed_rank: int | None = None
    created_at: datetime
    since: datetime
    launched_at: datetime | None = None  # the provider accepted
    expected_at: datetime | None = None  # when the place thinks that it will start
    running_at: datetime | None = None
    finished_at: datetime | None = None  # the work's end
    ended_at: datetime | None = None  # the gang's end
    adopted_at: datetime | None = (
        None  # when it took over a gang that was kept: what came before is another's
    )
    kept_since: datetime | None = None
    kept_until: datetime | None = None  # and no longer, whether a job comes or not
    missed_looks: int = 0  # looks in a row in which the provider did not know the gang
    missed_since: datetime | None = None  # the first of them
    drill_until: datetime | None = (
        None  # a fire drill, or the job's move, takes the gang away at this time
    )
    moved: bool = (
        False  # the job leaves it of its own accord, for another gang or to wait: no preemption
    )
    checkpoint_at: datetime | None = None  # newest complete checkpoint
    checkpoint_bytes: int = 0  # its size
    checkpoint_cost: timedelta | None = None  # that the work stood still for it, as far as is known
    checkpoint_rate: float | None = None  # bytes per second at which it was handed over or written
    checkpoint_every: timedelta | None = (
        None  # that the work was told to save at, where Cavvy chooses
    )
    wait: AttemptWait | None = None
    version: int = 0

    @property
    def standing(self) -> str:
        """Its reason and, where its place waits, until when."""
        if self.expected_at is None:
            return self.reason
        return f"{self.reason}, expected to start {self.expected_at:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the control plane wants of an agent. `seq` grows; an agent acts on each once."""

    seq: int
    kind: str  # "stop" (seconds: grace) | "notice" (seconds: until the node goes)
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
    address: str | None = None  # where the other ranks reach it
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
    notice_until: datetime | None = None  # the place said that it takes this node away then
    risk_at: datetime | None = None  # the place said then that it may take this node away
    telemetry: dict[str, float] = field(default_factory=dict)
    progress: dict[str, float | str] = field(default_factory=dict)
    version: int = 0


def attempt_id(job_id: str, number: int) -> str:
    return f"{job_id}-{number}"
