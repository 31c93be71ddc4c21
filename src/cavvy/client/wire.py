"""What travels between the API and its clients: one definition that the server encodes and
documents.

msgspec structs, because they are made and read in microseconds and need no other import; pure data.
Money is in micro-USD, lengths of time are in seconds, times are aware UTC. `task`, `origin` and
`offer` stay undecoded JSON (`msgspec.json.decode(job.task, type=Task)` reads one) so that a listing
never pays for them.
"""

from datetime import datetime

from msgspec import UNSET, Raw, Struct, UnsetType

Scalar = str | int | float | bool


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Something the server answers; fields that a newer server adds are ignored by an older
    client.
    """


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something a client sends; a field that the server does not know is an error, never
    ignored.
    """


class ErrorBody(Answer, frozen=True, kw_only=True):
    """The one form of every error: `code` is stable, `hint` says what to do."""

    code: str
    message: str
    hint: str = ""


class SubmitRequest(Ask, frozen=True, kw_only=True):
    """A task to run: the file's text, or the same as a JSON object in `task`; `params` override the
    file's.

    `origin` carries what the run was made from; its `snapshot` names the frozen working folder,
    whose blobs were uploaded before. `consent` allows offers that cost money, up to
    `ceiling_micros`.
    """

    text: str | None = None
    task: Raw | UnsetType = UNSET
    path: str = "task"  # how errors name the text
    params: dict[str, Scalar] = {}
    origin: Raw | UnsetType = UNSET
    name: str | None = None
    user: str = ""
    consent: bool = False
    ceiling_micros: int | None = None


class Submitted(Answer, frozen=True, kw_only=True):
    """The job as it was stored."""

    id: str
    project: str
    name: str
    phase: str
    created: bool = True  # False: this idempotency key had made the job before


class JobListing(Answer, frozen=True, kw_only=True):
    """A job in a listing. `place` is the offer key of its latest attempt."""

    id: str
    project: str
    name: str
    user: str
    phase: str
    reason: str
    priority: int
    submitted_at: datetime
    since: datetime
    ended_at: datetime | None
    attempt: int
    exit_code: int | None
    place: str | None
    spent_micros: int
    held: bool = False  # not in the queue: a schedule, or a window that has not begun


class JobPage(Answer, frozen=True, kw_only=True):
    """Newest first; `cursor` asks for the next page, null is the last."""

    jobs: list[JobListing]
    cursor: str | None


class NodeView(Answer, frozen=True, kw_only=True):
    """One rank of an attempt, as its agent reports it."""

    rank: int
    phase: str
    address: str | None
    exit_code: int | None
    exit_outcome: str | None
    exit_reason: str
    exit_failure: str | None = None  # gpu-fault, slow-link or network
    claimed_at: datetime | None
    running_at: datetime | None
    exited_at: datetime | None
    heard_at: datetime | None
    telemetry: dict[str, float]
    progress: dict[str, float | str]


class AttemptView(Answer, frozen=True, kw_only=True):
    """One try of a job on one offer."""

    id: str
    number: int
    gang: str
    place: str
    offer: Raw
    rate_micros_per_hour: int  # of one node
    phase: str
    reason: str
    outcome: str | None
    failure: str | None = None  # what failed: FailureKind
    exit_code: int | None
    first_failed_rank: int | None
    created_at: datetime
    since: datetime
    launched_at: datetime | None
    expected_at: datetime | None = None  # when the place thinks that it will start
    running_at: datetime | None
    finished_at: datetime | None
    ended_at: datetime | None
    checkpoint_at: datetime | None
    drill_until: datetime | None
    nodes: list[NodeView]


class PlanStateView(Answer, frozen=True, kw_only=True):
    """What was decided last for a job with a deadline, and why. `mode` is idle, spot or
    on-demand.
    """

    at: datetime
    mode: str
    reason: str
    place: str | None


class ForecastView(Answer, frozen=True, kw_only=True):
    """What the rest of a job may cost and whether it ends in time, of `runs` made-up courses; 0
    runs: not known, and `reason` says why.
    """

    runs: int
    reason: str = ""
    mean_micros: int = 0
    p10_micros: int = 0
    p90_micros: int = 0
    in_time: float = 0.0
    hours_p50: float = 0.0
    hours_p90: float = 0.0


class ObservationView(Answer, frozen=True, kw_only=True):
    """One thing seen of a market: granted, refused, booted, ended, taken, failed or a price."""

    kind: str
    at: datetime
    seconds: float
    rate_micros_per_hour: int | None = None


class MarketListing(Answer, frozen=True, kw_only=True):
    """What was seen of one offer in the last 30 days, and single observations of the last few.

    `preemptions_per_hour` (of one node) is mixed with a cautious prior, which a few observations
    outweigh; `boot_s` is the mean of those seen.
    """

    market: str
    granted: int
    refused: int
    refused_at: datetime | None
    lives: int
    taken: int
    failed: int
    node_hours: float
    boots: int
    boot_s: float
    preemptions_per_hour: float
    recent: list[ObservationView] = []


class JobDetail(JobListing, frozen=True, kw_only=True):
    """One job with everything known about it.

    `queue_position` is 1 for the next to start, null for one that is not queued or may not start
    yet.
    """

    task: Raw
    origin: Raw
    not_before: datetime | None
    stop_reason: str | None
    stop_cause: str | None = None  # user, budget, duration or deadline
    consented: bool
    ceiling_micros: int | None
    queue_position: int | None
    attempts: list[AttemptView]
    plan_state: PlanStateView | None = None
    standbys: list[int] = []  # attempts beside the job's own, one of which may take over
    avoid: dict[str, datetime] = {}  # places that failed or refused, until when they are left alone


class EventView(Answer, frozen=True, kw_only=True):
    """One line of a job's story. `id` grows.

    `fact` is for programs, `text` for people: of `webhook` what it told of (finish, failure,
    budget); of `exited` how the rank ended, as its `exit_failure` or its outcome; of `avoided`,
    `standby`, `queued` and an attempt's end its `failure`; of `queued` at first submitted or
    scheduled; of `limit`, `stopping` and the end of a job that was stopped its `stop_cause`.
    """

    id: int
    at: datetime
    attempt: int
    rank: int | None
    kind: str
    fact: str | None = None
    text: str


class EventPage(Answer, frozen=True, kw_only=True):
    """Events in order. `last` is what to pass as `after` next; `over` says that the job has
    ended.
    """

    events: list[EventView]
    last: int
    over: bool


class ChargeView(Answer, frozen=True, kw_only=True):
    """A stretch of one node's life at one rate."""

    attempt: int
    rank: int
    kind: str
    since: datetime
    until: datetime
    rate_micros_per_hour: int
    amount_micros: int


class StretchView(Answer, frozen=True, kw_only=True):
    """A stretch of a job's life: spent queued, starting, running, lost or stopping."""

    spell: str
    since: datetime
    until: datetime
    attempt: int


class CostView(Answer, frozen=True, kw_only=True):
    """What a job cost and where its time went. The seconds add up to its life, or its life so far.

    `lost_s` is running time whose work was done again: from the newest checkpoint until the place
    was lost.
    """

    job: str
    charges: list[ChargeView]
    total_micros: int
    queued_s: float
    starting_s: float
    running_s: float
    lost_s: float
    ending_s: float
    timeline: list[StretchView]


class ProjectCost(Answer, frozen=True, kw_only=True):
    """What a project's charges sum to, of those that began at `since` or later."""

    project: str
    since: datetime | None
    total_micros: int


class NodeListing(Answer, frozen=True, kw_only=True):
    """A node that runs or bills now. `rank_phase` is what its agent says; devices are those it
    holds.
    """

    project: str
    job: str
    job_id: str
    attempt: int
    rank: int
    gang: str
    place: str
    phase: str
    rank_phase: str
    rate_micros_per_hour: int
    since: datetime
    heard_at: datetime | None
    devices: list[str]
    kept_until: datetime | None = (
        None  # its work is over: it waits, paid, for the project's next job
    )


class StopAsk(Ask, frozen=True, kw_only=True):
    """Why the job is stopped; shown in its story."""

    reason: str = "stopped by the user"


class DrillAsk(Ask, frozen=True, kw_only=True):
    """How long the nodes have between the notice and their end."""

    notice_s: float = 30.0


class ExecAsk(Ask, frozen=True, kw_only=True):
    """A command to run beside the job's work on one rank."""

    command: list[str] = []
    rank: int = 0
    session: bool = False  # instead of a command: shells, connections and files, both ways


class ExecStarted(Answer, frozen=True, kw_only=True):
    id: str


class InputTaken(Answer, frozen=True, kw_only=True):
    """The number of the next byte that is wanted; `ended`: nobody takes any more."""

    next: int
    ended: bool = False


class DownAsk(Ask, frozen=True, kw_only=True):
    """Stop all unfinished jobs, of one project or of all, and remove what they run on."""

    project: str | None = None
    dry_run: bool = False


class GcAsk(Ask, frozen=True, kw_only=True):
    """Look for what runs or bills under this installation's name and belongs to no unfinished
    job.
    """

    dry_run: bool = True


class CleanupItem(Answer, frozen=True, kw_only=True):
    """One thing found by `down` or `gc`: a job to stop or a gang at a provider, and what was
    done about it.
    """

    kind: str
    name: str
    where: str
    why: str
    done: bool


class CleanupReport(Answer, frozen=True, kw_only=True):
    found: list[CleanupItem]


class SecretAsk(Ask, frozen=True, kw_only=True):
    """A secret's new value."""

    value: str


class SecretRow(Answer, frozen=True, kw_only=True):
    """A secret without its value, which no answer ever holds."""

    name: str
    updated_at: datetime


class SecretList(Answer, frozen=True, kw_only=True):
    secrets: list[SecretRow]


class BlobsAsk(Ask, frozen=True, kw_only=True):
    """SHA-256 names of blobs that a client is about to upload."""

    blobs: list[str]


class BlobsMissing(Answer, frozen=True, kw_only=True):
    """Those of them that the server does not have yet."""

    missing: list[str]
    direct: bool = False  # they go to the job's bucket, not to the server


class BlobsStored(Answer, frozen=True, kw_only=True):
    """How many blobs a pack held; all of them are stored."""

    stored: int


class Health(Answer, frozen=True, kw_only=True):
    """The server answers and its database can be read."""

    status: str


class InviteAsk(Ask, frozen=True, kw_only=True):
    """A machine is to join: under this name (else its own), in this group of machines on one
    network.
    """

    name: str | None = None
    group: str | None = None
    valid_s: float = 3600


class InvitationView(Answer, frozen=True, kw_only=True):
    """One of these lines, pasted into the machine's shell, makes it a node; good for one
    machine.
    """

    shell: str
    python: str
    expires_at: datetime


class MachineRow(Answer, frozen=True, kw_only=True):
    """A machine that joined."""

    name: str
    state: str
    has: str
    joined_at: datetime
    heard_at: datetime | None = None


class ServerView(Answer, frozen=True, kw_only=True):
    """The server itself. `api` is the major version of the routes, `revision` grows with every
    addition to them.
    """

    version: str
    api: int
    revision: int
    agent_protocols: list[int]
    pid: int
    host: str
    home: str
    address: str
    started_at: datetime
    uptime_s: float
    idle_s: float
    idle_stop_s: int
    unfinished: int
    database: str
    node_endpoint: str | None = None  # where nodes from outside arrive
