"""The requests and answers of the API, shared by the server and its clients.

The types are msgspec structs, which can be encoded and decoded fast. Money is in micro-US-dollars,
durations are in seconds, and times are in UTC. `task`, `origin` and `offer` are not decoded, so
that lists are fast; `msgspec.json.decode(job.task, type=Task)` decodes a task.
"""

from datetime import date, datetime

from msgspec import UNSET, Raw, Struct, UnsetType

Scalar = str | int | float | bool


class TrafficView(Struct, frozen=True, kw_only=True):
    """The data of one kind that a node has sent: its checkpoints, its log, or one output. `output`
    is the number of the output in the task. The price is in micro-dollars per GB (10^9 bytes), as
    of its date. If the price is unknown, it is null and the bill does not include the data.
    """

    attempt: int
    rank: int
    kind: str
    output: int | None
    bytes: int
    micros_per_gb: int | None
    price_as_of: date | None


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=False):
    """An answer of the server. Clients ignore unknown fields, because newer servers may add
    fields.
    """


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of a client. The server refuses unknown fields."""


class ErrorBody(Answer, frozen=True, kw_only=True):
    """The body of every error. `code` never changes its meaning, and `hint` says what to do."""

    code: str
    message: str
    hint: str = ""


class SubmitRequest(Ask, frozen=True, kw_only=True):
    """A task to run: either the text of a task file (`text`), or the content of such a file as a
    JSON object (`task`). `params` replace the defaults of the task's parameters.

    `origin` records where the run comes from. `origin.snapshot` is the name of the working folder's
    snapshot; the client must upload the snapshot's blobs before the request. `consent` allows
    offers that cost money, up to `ceiling_micros`. With `own_consent`, only the `consent` of this
    request counts, and not the one that was given for the machine or the pool that the task names.
    """

    text: str | None = None
    task: Raw | UnsetType = UNSET
    path: str = "task"  # the file name in error messages
    params: dict[str, Scalar] = {}
    origin: Raw | UnsetType = UNSET
    name: str | None = None
    user: str = ""
    consent: bool = False
    own_consent: bool = False
    ceiling_micros: int | None = None


class GraphRequest(Ask, frozen=True, kw_only=True):
    """Several tasks to run, which may name each other in `after`. All are stored, or none. `keys`
    are their idempotency keys.
    """

    tasks: list[SubmitRequest]
    keys: list[str]


class Submitted(Answer, frozen=True, kw_only=True):
    """The job that this submission, or an earlier submission with the same key, has created. For an
    array, `id` and `name` are those of the array, and `members` is the number of its jobs.
    """

    id: str
    project: str
    name: str
    phase: str
    # False if an earlier submission with the same idempotency key created the job
    created: bool = True
    members: int | None = None


class BatchRequest(Ask, frozen=True, kw_only=True):
    """Up to 10,000 tasks of one user to run, which do not wait for each other. `keys` are their
    idempotency keys, a new one for each task. All are stored, or none; if `each` is set, those that
    are refused are left out.
    """

    tasks: list[SubmitRequest]
    keys: list[str]
    each: bool = False


class RefusedTasks(Answer, frozen=True, kw_only=True):
    """The tasks of a batch that were refused for one reason, by their places in the request, of
    which the first is 0. `code`, `message` and `hint` are those of the error."""

    tasks: list[int]
    code: str
    message: str
    hint: str


class SubmittedBatch(Answer, frozen=True, kw_only=True):
    """The jobs of a batch, in the order of its tasks, and the tasks that were refused."""

    jobs: list[Submitted]
    refused: list[RefusedTasks]


class PlacementView(Answer, frozen=True, kw_only=True):
    """One way to run a task: all its nodes on one offer, whose key is `placement`. The price is
    that of all nodes. The times and the cost are expected values, and null if the task states no
    `work`; `notes` explain them. `available` is false if the provider reports too few free nodes.
    """

    placement: str
    accelerator: str | None
    accelerators: float  # of one node
    nodes: int
    rate_micros_per_hour: int
    run_time_s: float | None
    wall_time_s: float | None
    cost_micros: int | None
    preemptions: float | None
    available: bool
    notes: list[str]


class SubmissionCheck(Answer, frozen=True, kw_only=True):
    """The server would accept the submission. `consent_needed` states the price if the user must
    first agree to it, otherwise "". `placements` are the best offers, in the order in which the
    queue tries them; only as many as the request asked for.
    """

    name: str
    consent_needed: str = ""
    placements: list[PlacementView] = []


class EstimatedStart(Answer, frozen=True, kw_only=True):
    """When a waiting job's work probably starts. In 90 of 100 cases, it starts between `earliest`
    and `latest`; `likely` is the median."""

    earliest: datetime
    likely: datetime
    latest: datetime


class JobListing(Answer, frozen=True, kw_only=True):
    """A job in a list. `placement` is the key of the latest attempt's offer. `machine` is the name
    of the machine on which the job runs.

    `queue_position` is 1 for the next job to start. `queue_position` is null for a job that is not
    queued or is not allowed to start yet. `queue_ahead` is the number of jobs of each project that
    are before it; jobs of projects that the caller may not see count under an empty name.
    `estimated_start` is null if too little is known, for example because no job has ended yet. An
    array has the three values of its next job.
    """

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
    placement: str | None
    spent_micros: int
    # whether the job waits for other jobs, its schedule or its time window instead of in the queue
    held: bool = False
    machine: str | None = None
    tags: dict[str, str] = {}
    queue_position: int | None = None
    queue_ahead: dict[str, int] = {}
    estimated_start: EstimatedStart | None = None
    # for an array or a service in a list in which they are one row: the number of its jobs in each
    # phase
    members: dict[str, int] = {}
    # for a service in such a list: its name. The other values are those of its newest replica
    service: str = ""


class JobPage(Answer, frozen=True, kw_only=True):
    """A page of jobs, newest first. `cursor` requests the next page (null on the last page)."""

    jobs: list[JobListing]
    cursor: str | None


class GpuUse(Answer, frozen=True, kw_only=True):
    """How many GPUs were in use: of each kind the mean of each step since `begin`."""

    begin: datetime
    step_s: float
    gpus: dict[str, list[float]]


class JobMatches(Answer, frozen=True, kw_only=True):
    """A page of the jobs that a search found. `total` counts all of them."""

    jobs: list[JobListing]
    total: int


class NodeView(Answer, frozen=True, kw_only=True):
    """One rank of an attempt, with the state that its agent reports.

    `setup_from` and `setup_to` are positions in the log: between them is the output of the setup
    and of the image's pull. While it runs, and if it failed, `setup_to` is None. Both are None if
    there is no setup and no image, or if the agent does not tell.
    """

    rank: int
    phase: str
    address: str | None
    exit_code: int | None
    exit_outcome: str | None
    exit_reason: str
    exit_failure: str | None = None  # gpu-fault, slow-link, network or program
    claimed_at: datetime | None
    running_at: datetime | None
    exited_at: datetime | None
    heard_at: datetime | None
    telemetry: dict[str, float]
    progress: dict[str, float | str]
    setup_from: int | None = None
    setup_to: int | None = None


class SilentView(Answer, frozen=True, kw_only=True):
    """Work that makes no progress: where it was at a look."""

    at: datetime
    reason: str


class UnsafeView(Answer, frozen=True, kw_only=True):
    """Files that may be lost: since when a rank says so, and why."""

    at: datetime
    rank: int
    reason: str


class AttemptView(Answer, frozen=True, kw_only=True):
    """One attempt of a job on one offer."""

    id: str
    number: int
    gang: str
    placement: str
    offer: Raw
    rate_micros_per_hour: int  # price of one node
    phase: str
    reason: str
    outcome: str | None
    failure: str | None = None  # a FailureKind
    exit_code: int | None
    first_failed_rank: int | None
    # the ranks whose nodes were replaced, in a gang that the attempt took over from the one before
    repairs: list[int] = []
    # the processes that did not reach the place where the others wait, if the work made no progress
    stuck_ranks: list[int] = []
    # where work that made no progress was when its ranks were last asked, which ended nothing
    silent: SilentView | None = None
    # files that no checkpoint has, or that may be torn
    unsafe: UnsafeView | None = None
    created_at: datetime
    since: datetime
    launched_at: datetime | None
    expected_at: datetime | None = None  # when the provider expects the gang to start
    running_at: datetime | None
    finished_at: datetime | None
    ended_at: datetime | None
    checkpoint_at: datetime | None
    drill_until: datetime | None
    nodes: list[NodeView]


class SeriesView(Answer, frozen=True, kw_only=True):
    """One figure of a rank in an attempt, such as gpu_percent or loss, or of a service, whose
    attempt and rank are 0. For each step, the lowest, mean and highest value; null where it is
    unknown.
    """

    attempt: int
    rank: int
    name: str
    low: list[float | None]
    mean: list[float | None]
    high: list[float | None]


class JobFigures(Answer, frozen=True, kw_only=True):
    """Figures of a job or a service over time. All series have the same steps of `step_s` seconds,
    of which the first begins at `start`.
    """

    start: datetime
    step_s: int
    series: list[SeriesView]


class PlanStateView(Answer, frozen=True, kw_only=True):
    """The last decision of the deadline policy for a job, and its reason. `mode` is idle, spot or
    on-demand.
    """

    at: datetime
    mode: str
    reason: str
    placement: str | None


class HoldView(Answer, frozen=True, kw_only=True):
    """Why an elastic job that runs has no more nodes, in its attempt of this number. `cause` is
    off, no-checkpoint, fixed, untaken, budget, no-offer, no-room, waiting, rests or no-gain, and
    `nodes` the next larger size; `until` is the time from which the job may grow."""

    cause: str
    attempt: int
    nodes: int
    until: datetime | None
    text: str


class ForecastView(Answer, frozen=True, kw_only=True):
    """The expected remaining cost and duration of a job, computed from `runs` simulated runs. If
    `runs` is 0, there is no forecast, and `reason` says why.
    """

    runs: int
    reason: str = ""
    mean_micros: int = 0
    p10_micros: int = 0
    p90_micros: int = 0
    in_time: float = 0.0
    hours_p50: float = 0.0
    hours_p90: float = 0.0


class OfferView(Answer, frozen=True, kw_only=True):
    """A machine type at its cheapest place, and the number of its places. `accelerators` is their
    number, or a part of one. `ready` is true if the project's jobs can use the offer now; otherwise
    the price is a list price of the day `as_of`.
    """

    key: str
    provider: str
    region: str
    zone: str | None
    instance_type: str
    accelerator: str | None
    accelerators: float
    accelerator_memory_mib: int
    vcpus: float
    memory_mib: int
    purchase: str
    rate_micros_per_hour: int
    ready: bool
    places: int
    as_of: date | None


class OfferPage(Answer, frozen=True, kw_only=True):
    """The cheapest offers that match, and the number of all of them."""

    offers: list[OfferView]
    total: int


class RecipeView(Answer, frozen=True, kw_only=True):
    """A task file that the members of a project share, and who has written it."""

    name: str
    text: str
    account: str
    updated_at: datetime


class RecipeAsk(Ask, frozen=True, kw_only=True):
    """Stores a recipe, which replaces one of the same name."""

    text: str


class ObservationView(Answer, frozen=True, kw_only=True):
    """One observation of a market. `kind` is granted, refused, booted, ended, taken, failed or
    price.
    """

    kind: str
    at: datetime
    seconds: float
    rate_micros_per_hour: int | None = None


class MarketListing(Answer, frozen=True, kw_only=True):
    """A summary of the observations of one offer in the last 30 days; `recent` lists the
    observations of the last few days.

    `preemptions_per_hour` is the estimated rate for one node. The rate is computed from the
    observations and from a prior. The prior is a cautious rate that is assumed while there are few
    observations. `boot_s` is the mean observed boot time.
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


class EnergyView(Answer, frozen=True, kw_only=True):
    """The energy in joules that nodes measured on their accelerators and processors, without the
    rest of the machine and its cooling, and the grams of CO2 that the grids of their countries emit
    for it on average. `grids` are these countries with the years of the averages. `unplaced_j` is
    the part in regions of unknown countries, which has no grams.
    """

    joules: int
    co2_g: float
    unplaced_j: int
    grids: dict[str, int]


class JobDetail(JobListing, frozen=True, kw_only=True):
    """One job with all details."""

    task: Raw
    origin: Raw
    not_before: datetime | None
    stop_reason: str | None
    # user, budget, duration, deadline, dependency, group, early or helped
    stop_cause: str | None = None
    consented: bool
    ceiling_micros: int | None
    attempts: list[AttemptView]
    plan_state: PlanStateView | None = None
    hold: HoldView | None = None
    standbys: list[int] = []  # numbers of attempts that may replace the current one
    # for each offer or shared host that failed: when its cooldown ends
    avoid: dict[str, datetime] = {}
    # whether the job does not start because its account is disabled or was removed
    barred: bool = False
    # what its nodes have measured so far, or null if none can
    energy: EnergyView | None = None
    array_id: str | None = None  # the array or the group that the job belongs to


class EventView(Answer, frozen=True, kw_only=True):
    """One event of a job. A later event has a higher id.

    `fact` is for programs, `text` is for people. The meaning of `fact` depends on `kind`. For
    `webhook`, `fact` is the event that was reported (finish, failure or budget). For `exited`,
    `fact` is the rank's `exit_failure` or outcome. For events of the kinds `avoided`, `standby` and
    `queued`, and for the event at the end of an attempt, `fact` is the attempt's `failure`. For the
    first `queued` event, `fact` is submitted or scheduled. For `waits`, `fact` is unusable if the
    job fits only hosts or accounts that cannot be used. If `kind` is `limit` or `stopping`, or
    the event reports the end of a stopped job, `fact` is the `stop_cause`.
    """

    id: int
    at: datetime
    attempt: int
    rank: int | None
    kind: str
    fact: str | None = None
    text: str


class EventPage(Answer, frozen=True, kw_only=True):
    """Events in order. Send `last` as `after` in the next request. `over` is true if the job has
    ended.
    """

    events: list[EventView]
    last: int
    over: bool


class ChargeView(Answer, frozen=True, kw_only=True):
    """The charge for a period of one node at one rate."""

    attempt: int
    rank: int
    kind: str
    since: datetime
    until: datetime
    rate_micros_per_hour: int
    amount_micros: int


class StretchView(Answer, frozen=True, kw_only=True):
    """A period of a job: queued, starting, running, lost, stopping or ended."""

    spell: str
    since: datetime
    until: datetime
    attempt: int


class CostView(Answer, frozen=True, kw_only=True):
    """A job's cost, and how its time since its submission was spent.

    `lost_s` is running time whose work was repeated: from the newest checkpoint until the nodes
    were lost. `ended_s` is the time between the job's end and a retry. `unsure_micros` is the
    amount that the job may have cost in addition to `total_micros`.
    """

    job: str
    charges: list[ChargeView]
    total_micros: int
    unsure_micros: int = 0
    queued_s: float
    starting_s: float
    running_s: float
    lost_s: float
    ending_s: float
    ended_s: float = 0.0
    timeline: list[StretchView]
    traffic: list[TrafficView] = []
    energy: EnergyView | None = None


class AuditRow(Answer, frozen=True, kw_only=True):
    """The bill of an ended attempt, compared with its provider's own record. The attempt may have
    cost up to `unsure_micros` more than `billed_micros`. `reported_micros` is the cost according to
    the provider's record, or null if the provider no longer lists the gang.
    """

    job: str
    attempt: int
    gang: str
    placement: str
    billed_micros: int
    unsure_micros: int
    reported_micros: int | None
    verdict: str  # agrees, differs or forgotten


class AuditReport(Answer, frozen=True, kw_only=True):
    """The compared bills. `problems` lists the providers that did not answer, and why."""

    bills: list[AuditRow]
    problems: list[str]


class ProjectCost(Answer, frozen=True, kw_only=True):
    """The sum of a project's charges. If `since` is given, charges that began earlier are not
    included.
    """

    project: str
    since: datetime | None
    total_micros: int


class NodeListing(Answer, frozen=True, kw_only=True):
    """A node that is running or billed now. `rank_phase` is the phase that the node's agent
    reports. `devices` are the devices of a shared host that are allocated to the node.
    """

    project: str
    job: str
    job_id: str
    attempt: int
    rank: int
    gang: str
    placement: str
    phase: str
    rank_phase: str
    rate_micros_per_hour: int
    since: datetime
    heard_at: datetime | None
    devices: list[str]
    # for a warm node: when it is released if no job takes it over
    kept_until: datetime | None = None
    user: str = ""
    accelerator: str | None = None
    accelerator_count: float = 0  # of this node; a part of one counts as that part
    running_at: datetime | None = None  # when the node's work began
    telemetry: dict[str, float] = {}
    progress: dict[str, float | str] = {}


class StopAsk(Ask, frozen=True, kw_only=True, omit_defaults=True):
    """Stops a job. The job's events show `reason`, or if it is empty, who has stopped the job. An
    empty one is not sent, so that servers of former versions say what they said.
    """

    reason: str = ""


class JobRemoved(Answer, frozen=True, kw_only=True):
    """A removed job. `freed_bytes` is the total size of the job's deleted checkpoints. `kept` says
    which files could not be deleted and why, or is "".
    """

    freed_bytes: int
    kept: str = ""


class RetryAsk(Ask, frozen=True, kw_only=True):
    """Queues an ended job again. `resources` is a JSON object with keys of the section `resources`
    of a task file, which replace those of the job: the job then runs elsewhere, from its newest
    checkpoint. `consent` allows offers that cost money for these resources. `checkpoint` is the
    number of the stored checkpoint from which the job continues, instead of the newest one.
    """

    resources: Raw | UnsetType = UNSET
    consent: bool = False
    checkpoint: int | None = None


class DrillAsk(Ask, frozen=True, kw_only=True):
    """Reclaims the nodes of a job, or only the node of `rank`, after a notice of `notice_s`
    seconds, to test how the job reacts."""

    notice_s: float = 30.0
    rank: int | None = None


class ResizeAsk(Ask, frozen=True, kw_only=True):
    """Lets an elastic job have at most this many nodes."""

    nodes: int


class ExecAsk(Ask, frozen=True, kw_only=True):
    """A command to run on one rank, in the environment of the job's work."""

    command: list[str] = []
    rank: int = 0
    session: bool = (
        False  # whether to open a remote session (for `client.tunnel`) instead of running a command
    )


class ExecStarted(Answer, frozen=True, kw_only=True):
    id: str


class InputTaken(Answer, frozen=True, kw_only=True):
    """The answer to input. `next` is the offset of the next byte that the server expects. `ended`
    is true if the command has ended and therefore reads no more input.
    """

    next: int
    ended: bool = False


class DownAsk(Ask, frozen=True, kw_only=True):
    """Stops all unfinished jobs of one project or, if `project` is null, of all projects, and
    removes their nodes."""

    project: str | None = None
    dry_run: bool = False


class GcAsk(Ask, frozen=True, kw_only=True):
    """Finds nodes of this installation that belong to no unfinished job, and removes these nodes
    unless `dry_run` is set.
    """

    dry_run: bool = True


class CleanupItem(Answer, frozen=True, kw_only=True):
    """One item that `down` or `gc` found: a job, pool or idle machine to stop, a gang to remove, an
    unfinished upload to abort, or a provider that could not be queried. `done` is true if the item
    was removed.
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
    """A secret without its value, which the API never returns."""

    name: str
    updated_at: datetime


class SecretList(Answer, frozen=True, kw_only=True):
    secrets: list[SecretRow]


class VolumeView(Answer, frozen=True, kw_only=True):
    """A named volume that is a folder of the server's machine, or of the `host` of a provider: how
    many files it has, and how many bytes of the disk they take. `changed_at` is the time of the
    newest of them. `problem` is why the host cannot tell them; they are then null."""

    name: str
    provider: str
    host: str = ""
    files: int | None = None
    size_bytes: int | None = None
    changed_at: datetime | None = None
    problem: str = ""


class BlobsAsk(Ask, frozen=True, kw_only=True):
    """The names (SHA-256) of blobs that a client wants to upload."""

    blobs: list[str]


class BlobsMissing(Answer, frozen=True, kw_only=True):
    """The blobs that the server does not have yet."""

    missing: list[str]
    # whether checkpoints must be uploaded to the job's bucket instead of to the server
    direct: bool = False


class BlobsStored(Answer, frozen=True, kw_only=True):
    """The number of stored blobs. A pack is stored completely or not at all."""

    stored: int


class Health(Answer, frozen=True, kw_only=True):
    """Reports that the server runs and can read its database."""

    status: str


class InviteAsk(Ask, frozen=True, kw_only=True):
    """Invites a machine to join. `name` is the machine's name, by default its host name. `group` is
    the name of a group of machines on the same network, and `labels` where in it the machine is,
    such as {"rack": "r1"}. The invitation is valid for `valid_s` seconds. `session_s` is after how
    many seconds from the join the machine ends by itself, or 0 if it does not.
    """

    name: str | None = None
    group: str | None = None
    labels: dict[str, str] = {}
    valid_s: float = 3600
    session_s: float = 0


class InvitationView(Answer, frozen=True, kw_only=True):
    """Two commands. A machine that runs either command becomes a node."""

    shell: str
    python: str
    expires_at: datetime


class MachineRow(Answer, frozen=True, kw_only=True):
    """A machine that has joined with a command from `cavvy nodes join`."""

    name: str
    state: str
    has: str
    joined_at: datetime
    heard_at: datetime | None = None


class QuotaRow(Answer, frozen=True, kw_only=True):
    """A limit that a provider sets for the account. `limit`, `used` and `left` are numbers of
    `unit`; `used` and `left` are null if the use is unknown. `region` is empty if the quota is for
    all regions, and `zone` is empty if the quota is for the whole region. `purchase` is null if the
    quota counts on-demand and spot machines together. `request` is the provider's command that
    requests the limit NEW_LIMIT.
    """

    provider: str
    region: str
    family: str
    name: str
    unit: str
    purchase: str | None
    limit: float
    used: float | None
    left: float | None
    request: str
    zone: str = ""


class UntoldQuotas(Answer, frozen=True, kw_only=True):
    """A provider whose quotas are unknown, and the reason."""

    provider: str
    reason: str


class QuotaReport(Answer, frozen=True, kw_only=True):
    """The known quotas, and the providers whose quotas are unknown."""

    quotas: list[QuotaRow]
    untold: list[UntoldQuotas]


class MachineView(Answer, frozen=True, kw_only=True):
    """A named machine. `state` is starting, busy, idle or stopped. A stopped machine has no nodes
    and costs nothing; its placement, times, rate and cost are null.

    `has` describes the hardware. `rate_micros_per_hour` is the price of all nodes together.
    `spent_micros` is the cost of the machine's nodes since the machine received these nodes.
    `waiting` is the number of jobs that wait for the machine.
    """

    name: str
    project: str
    user: str
    state: str
    job: str | None  # the machine's newest job
    waiting: int
    placement: str | None
    has: str
    nodes: int
    since: datetime | None
    # when an idle machine is released if no job takes it over, else null
    kept_until: datetime | None
    keep_s: float  # how long the machine is kept without work
    rate_micros_per_hour: int | None
    spent_micros: int | None


class MachineStartAsk(Ask, frozen=True, kw_only=True):
    """Starts a stopped machine with new nodes. `consent` allows offers that cost
    money."""

    user: str = ""
    consent: bool = False


class MachineKeepAsk(Ask, frozen=True, kw_only=True):
    """Sets how long a machine is kept without work."""

    keep_s: float


class ServerView(Answer, frozen=True, kw_only=True):
    """The properties and the state of the server. `api` is the major version of the routes.
    `revision` increases with every change to the routes. `problem` says what the server
    cannot do now and why, or is "". `keep_jobs_days` is how long ended jobs are kept if no policy
    of their project says otherwise; 0 means forever. Before `removes_old_from`, nothing is removed
    because of its age; null if this time has passed. `database_mib` is the size of the database.
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
    listen: str | None = None  # the address for users; None: only the Unix socket
    node_endpoint: str | None = None  # the address that nodes outside this machine use
    database_mib: int | None = None  # None: the user may not know it
    keep_jobs_days: int | None = None
    keep_audit_days: int | None = None
    removes_old_from: datetime | None = None
    long_threads: list[str] = []  # calls in threads of the server that have not ended in time
    capability_faults: list[str] = []  # what capabilities could not do since the server started
    problem: str = ""
