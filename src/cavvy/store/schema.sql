-- The tables at the newest revision, as a new database gets them. After a change here, add a
-- migration that makes the same change; a test compares the two.
--
-- Times are microseconds since 1970, money is micro-US-dollars, documents are JSON text. Every row
-- that belongs to a project has its name. `{id}`, `{serial}` and `{bytes}` are types that the
-- databases spell differently; see `migrate.py`.

CREATE TABLE cavvy_revision (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT cavvy_revision_pkc PRIMARY KEY (version_num)
);

CREATE TABLE meta (
    "key" TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY ("key")
);

CREATE TABLE jobs (
    id {id} NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    user_name TEXT NOT NULL,
    phase TEXT NOT NULL,
    reason TEXT NOT NULL,
    priority BIGINT NOT NULL,
    submitted_at BIGINT NOT NULL,
    since BIGINT NOT NULL,
    not_before BIGINT,
    stop_reason TEXT,
    ended_at BIGINT,
    attempt BIGINT NOT NULL,
    exit_code BIGINT,
    place TEXT,  -- offer key of the latest attempt
    rest TEXT NOT NULL,  -- the other fields of a job
    document BIGINT NOT NULL,  -- the version at which its row in documents was written
    version BIGINT NOT NULL,
    spent BIGINT DEFAULT 0 NOT NULL,  -- running sum of the charges
    tags TEXT DEFAULT '{{}}' NOT NULL,
    removed TEXT,  -- former name of a removed job, of which only the bill is left
    machine TEXT,  -- name of the machine on which the job runs
    size DOUBLE PRECISION DEFAULT 1 NOT NULL,  -- in GPUs
    array_id {id},  -- for a member of an array: the array, which has the task
    member BIGINT,  -- its index in the array
    pool TEXT,  -- name of the pool whose nodes the job uses
    PRIMARY KEY (id),
    CONSTRAINT jobs_name UNIQUE (project, name)
);
CREATE INDEX jobs_phase ON jobs (phase, id);
CREATE INDEX jobs_project ON jobs (project, id);
CREATE INDEX jobs_project_phase ON jobs (project, phase, id);
CREATE INDEX jobs_turns ON jobs
    ({phase}project, user_name, (submitted_at - priority * 3600000000), id) WHERE phase = 'queued';
CREATE INDEX jobs_project_turns ON jobs ({phase}project, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NULL AND pool IS NULL AND array_id IS NULL;
CREATE INDEX jobs_later ON jobs ({phase}not_before) WHERE phase = 'queued' AND not_before IS NOT NULL;
CREATE INDEX jobs_again ON jobs ({phase}attempt, id) WHERE phase = 'queued' AND attempt > 0;
CREATE INDEX jobs_machine_turns ON jobs
    ({phase}project, machine, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NOT NULL;
CREATE INDEX jobs_machine ON jobs (project, machine, id) WHERE machine IS NOT NULL;
CREATE INDEX jobs_pool_turns ON jobs
    ({phase}project, pool, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND pool IS NOT NULL;
CREATE INDEX jobs_pool ON jobs (project, pool, id) WHERE pool IS NOT NULL;
CREATE INDEX jobs_ended ON jobs (project, ended_at, id) WHERE ended_at IS NOT NULL;

-- An array is one task with many jobs, which are its members. Its task is stored once. A group is
-- stored like an array, but its jobs have tasks of their own.
CREATE TABLE job_arrays (
    id {id} NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    parallel BIGINT,  -- how many members run at once; NULL for all
    task TEXT NOT NULL,
    origin TEXT NOT NULL,
    snapshot TEXT,  -- content hash of the working folder
    started BIGINT,  -- of a group: 0 until its jobs have started together, then the time
    PRIMARY KEY (id),
    CONSTRAINT job_arrays_name UNIQUE (project, name)
);
CREATE INDEX job_arrays_project ON job_arrays (project, id);
CREATE INDEX job_arrays_snapshot ON job_arrays (snapshot) WHERE snapshot IS NOT NULL;
CREATE INDEX jobs_array ON jobs (array_id, phase) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_array_queue ON jobs ({phase}array_id, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND array_id IS NOT NULL;
-- The jobs that wait until other jobs have ended. A job's conditions are in its column `rest`.
CREATE TABLE job_dependencies (
    after_id {id} NOT NULL,  -- the job that must end first
    job_id {id} NOT NULL,  -- the job that waits
    PRIMARY KEY (after_id, job_id)
);
CREATE INDEX job_dependencies_job ON job_dependencies (job_id);

-- Separate from jobs, so that a change of phase does not write the task and its diff again.
CREATE TABLE documents (
    job_id {id} NOT NULL,
    task TEXT NOT NULL,
    origin TEXT NOT NULL,
    snapshot TEXT,  -- content hash of the working folder
    PRIMARY KEY (job_id),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX documents_snapshot ON documents (snapshot) WHERE snapshot IS NOT NULL;

-- The last number that was appended to a taken name, from which the next free name follows.
CREATE TABLE names (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    last BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

CREATE TABLE attempts (
    id {id} NOT NULL,
    job_id {id} NOT NULL,
    project TEXT NOT NULL,
    number BIGINT NOT NULL,
    gang TEXT NOT NULL,
    phase TEXT NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    bought_as TEXT DEFAULT '' NOT NULL,  -- name under which the gang was bought
    PRIMARY KEY (id),
    CONSTRAINT attempts_number UNIQUE (job_id, number),
    CONSTRAINT attempts_gang UNIQUE (gang),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX attempts_bought ON attempts (bought_as);
CREATE INDEX attempts_open ON attempts (id) WHERE phase <> 'ended';
CREATE INDEX attempts_changes ON attempts (phase, version, id) WHERE phase <> 'ended';

CREATE TABLE nodes (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    project TEXT NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (attempt_id, rank),
    FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);

CREATE TABLE events (
    id {serial} NOT NULL,
    project TEXT NOT NULL,
    job_id {id} NOT NULL,
    attempt BIGINT NOT NULL,
    rank BIGINT,
    at BIGINT NOT NULL,
    kind TEXT NOT NULL,
    fact TEXT,
    text TEXT NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX events_job ON events (job_id, id);

CREATE TABLE charges (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    kind TEXT NOT NULL,
    since BIGINT NOT NULL,
    project TEXT NOT NULL,
    job_id {id} NOT NULL,
    until BIGINT NOT NULL,
    rate BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    bytes BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (attempt_id, rank, kind, since),
    FOREIGN KEY(attempt_id) REFERENCES attempts (id),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX charges_job ON charges (job_id);
CREATE INDEX charges_project ON charges (project, since, amount);

-- The newest checkpoints of each job. Their files are in the job's blobs or in its bucket.
CREATE TABLE checkpoints (
    job_id {id} NOT NULL,
    number BIGINT NOT NULL,
    project TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    manifest TEXT NOT NULL,
    files BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    made_at BIGINT NOT NULL,
    saved_at BIGINT NOT NULL,
    PRIMARY KEY (job_id, number),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);

-- Observations of each offer's market; old rows are deleted.
CREATE TABLE observations (
    id {serial} NOT NULL,
    market {id} NOT NULL,
    kind TEXT NOT NULL,
    at BIGINT NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    nodes BIGINT NOT NULL,
    rate BIGINT,
    text TEXT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX observations_at ON observations (at);
CREATE INDEX observations_market ON observations (market, at);

CREATE TABLE hosts (
    name TEXT NOT NULL,
    cpus DOUBLE PRECISION NOT NULL,
    memory_mib BIGINT NOT NULL,
    devices TEXT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE allocations (
    gang TEXT NOT NULL,
    rank BIGINT NOT NULL,
    host TEXT NOT NULL,
    project TEXT NOT NULL,
    cpus DOUBLE PRECISION NOT NULL,
    memory_mib BIGINT NOT NULL,
    devices TEXT NOT NULL,
    part DOUBLE PRECISION NOT NULL DEFAULT 1,
    disk_gib BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (gang, rank),
    FOREIGN KEY(host) REFERENCES hosts (name)
);
CREATE INDEX allocations_host ON allocations (host);

-- One row for each device that is held as a whole: the primary key prevents two allocations of one device.
CREATE TABLE held_devices (
    host TEXT NOT NULL,
    device TEXT NOT NULL,
    gang TEXT NOT NULL,
    rank BIGINT NOT NULL,
    PRIMARY KEY (host, device),
    FOREIGN KEY(gang, rank) REFERENCES allocations (gang, rank) ON DELETE CASCADE
);
CREATE INDEX held_devices_gang ON held_devices (gang, rank);

CREATE TABLE secrets (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    sealed {bytes} NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- Task files that the members of a project share.
CREATE TABLE recipes (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    text TEXT NOT NULL,
    account TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- The credentials of projects at providers, encrypted.
CREATE TABLE provider_credentials (
    project TEXT NOT NULL,
    provider TEXT NOT NULL,
    sealed {bytes} NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, provider)
);

-- Documents of providers, as providers.state describes them. They belong to no project.
CREATE TABLE provider_state (
    provider TEXT NOT NULL,
    collection TEXT NOT NULL,
    name {id} NOT NULL,
    body TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (provider, collection, name)
);

-- Elastic pools: nodes that are added and removed with the work of their project's jobs.
CREATE TABLE node_pools (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (project, name)
);

-- What operators have ordered for the installation's own hosts. No work is placed on closed hosts.
CREATE TABLE node_states (
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    closed BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);
-- Hosts and devices that belong to one project for a while.
CREATE TABLE reservations (
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);

-- Named machines: gangs that users keep and use again.
CREATE TABLE machines (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- People and services that can be granted roles.
CREATE TABLE accounts (
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    disabled_at BIGINT,
    PRIMARY KEY (name)
);

-- `hash` is the SHA-256 of the token, in hexadecimal.
CREATE TABLE tokens (
    id {id} NOT NULL,
    hash TEXT NOT NULL,
    account TEXT NOT NULL,
    label TEXT NOT NULL,
    scopes TEXT NOT NULL,
    project TEXT,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT,
    parent {id},
    PRIMARY KEY (id),
    CONSTRAINT tokens_hash UNIQUE (hash),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX tokens_account ON tokens (account, id);

-- Projects that were created. Others exist as names of their jobs, below the installation.
CREATE TABLE projects (
    name TEXT NOT NULL,
    parent TEXT,
    archived_at BIGINT,
    PRIMARY KEY (name),
    FOREIGN KEY(parent) REFERENCES projects (name)
);

CREATE TABLE project_use (
    project TEXT NOT NULL,
    gpu_hours DOUBLE PRECISION NOT NULL,  -- the decayed use up to `at`
    held DOUBLE PRECISION NOT NULL,  -- the GPUs in use since `at`
    at BIGINT NOT NULL,
    PRIMARY KEY (project)
);

-- A role in a project, or in all projects if `project` is empty.
CREATE TABLE role_bindings (
    account TEXT NOT NULL,
    project TEXT NOT NULL,
    role TEXT NOT NULL,
    PRIMARY KEY (account, project, role),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX role_bindings_project ON role_bindings (project);

-- The audit log: records that are only ever added, in a chain of hashes. `text` is the whole record.
CREATE TABLE audit_log (
    number BIGINT NOT NULL,
    at BIGINT NOT NULL,
    account TEXT NOT NULL,
    project TEXT NOT NULL,
    outcome TEXT NOT NULL,
    hash TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (number)
);
CREATE INDEX audit_log_project ON audit_log (project, number);
{append_only};
{no_change};
{no_removal};

-- Old records of the audit log are removed: of each removal, the last record. The database permits
-- to remove these records, and refuses all other changes of the log.
CREATE TABLE audit_cuts (
    number BIGINT NOT NULL,
    hash TEXT NOT NULL,
    cut_at BIGINT NOT NULL,
    PRIMARY KEY (number)
);
{audit_cuts_function};
{audit_cuts_no_change};
{audit_cuts_no_removal};

-- What the jobs of a project may use; an empty project stands for the installation.
CREATE TABLE project_policies (
    project TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (project)
);

-- What entries of the ledger are for. Rows are only ever added.
CREATE TABLE ledger_subjects (
    id {id} NOT NULL,  -- that of the attempt, if it is one
    project TEXT NOT NULL,
    user_name TEXT NOT NULL,
    job_id {id} NOT NULL,
    job TEXT NOT NULL,
    machine TEXT NOT NULL,
    service TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    provider TEXT NOT NULL,
    account TEXT NOT NULL,
    region TEXT NOT NULL,
    zone TEXT NOT NULL,
    instance_type TEXT NOT NULL,
    accelerator TEXT NOT NULL,
    accelerators DOUBLE PRECISION NOT NULL,
    purchase TEXT NOT NULL,
    tags TEXT NOT NULL,
    volume TEXT DEFAULT '' NOT NULL,
    key_name TEXT DEFAULT '' NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX ledger_subjects_service ON ledger_subjects (id) WHERE service <> '';
{ledger_subjects_function};
{ledger_subjects_no_change};
{ledger_subjects_no_removal};

-- The ledger: entries that are only ever added. `sequence` counts the entries of a subject's rank.
-- For each line (kind and start) of a node's bill, the entries add up to its row in charges.
CREATE TABLE ledger (
    number {serial} NOT NULL,
    subject {id} NOT NULL,
    rank BIGINT NOT NULL,
    sequence BIGINT NOT NULL,
    project TEXT NOT NULL,
    kind TEXT NOT NULL,
    line TEXT NOT NULL,
    line_since BIGINT NOT NULL,
    since BIGINT NOT NULL,
    until BIGINT NOT NULL,
    quantity BIGINT NOT NULL,
    unit TEXT NOT NULL,
    rate BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    source TEXT NOT NULL,
    corrects BIGINT,
    PRIMARY KEY (number),
    CONSTRAINT ledger_place UNIQUE (subject, rank, sequence),
    FOREIGN KEY(subject) REFERENCES ledger_subjects (id)
);
CREATE INDEX ledger_project ON ledger (project, since);
-- the sums of projects are read from this index alone
CREATE INDEX ledger_amounts ON ledger (project, amount);
CREATE INDEX ledger_until ON ledger (until);
CREATE INDEX ledger_discounts ON ledger (line_since) WHERE kind = 'discount';
{ledger_function};
{ledger_no_change};
{ledger_no_removal};

-- Issuers whose ID tokens are accepted.
CREATE TABLE trusts (
    name TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);

-- The accounts of people who have signed in, by who they are at the issuer.
CREATE TABLE identities (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    account TEXT NOT NULL,
    PRIMARY KEY (issuer, subject),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX identities_account ON identities (account);

-- When the newest ID token of each person was issued: older ones are not accepted after it. A row
-- outlives the person's account, which a sign-in would make again.
CREATE TABLE newest_id_tokens (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    issued_at BIGINT NOT NULL,
    PRIMARY KEY (issuer, subject)
);
CREATE INDEX newest_id_tokens_issued ON newest_id_tokens (issued_at);

-- Sign-ins, by the SHA-256 of what their ID token signs: none is accepted twice. `until` is the time
-- at which both the ID token and the token that it was exchanged for have expired.
CREATE TABLE sign_ins (
    digest TEXT NOT NULL,
    trust TEXT NOT NULL,
    token {id} NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (digest)
);
CREATE INDEX sign_ins_until ON sign_ins (until);

-- Roles that accounts have by their groups at an issuer, until the sign-in ends.
CREATE TABLE group_roles (
    account TEXT NOT NULL,
    project TEXT NOT NULL,
    role TEXT NOT NULL,
    trust TEXT NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (account, project, role, trust),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE,
    FOREIGN KEY(trust) REFERENCES trusts (name) ON DELETE CASCADE
);
CREATE INDEX group_roles_project ON group_roles (project);

-- What each server knows of the agents that it talks to, for the server that reconciles their job.
CREATE TABLE agent_contacts (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,  -- -1 for the whole gang
    server TEXT NOT NULL,  -- that wrote the row last
    heard_at BIGINT,
    asked_at BIGINT,
    paid_until BIGINT,
    written_at BIGINT NOT NULL,
    PRIMARY KEY (attempt_id, rank)
);
CREATE INDEX agent_contacts_written ON agent_contacts (written_at);

-- How much projects, users and the jobs with a tag may spend in a month.
CREATE TABLE budgets (
    name TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);

-- Alerts of budgets that were sent, so that each is sent once in a month.
CREATE TABLE budget_alerts (
    budget TEXT NOT NULL,
    month BIGINT NOT NULL,
    percent BIGINT NOT NULL,
    PRIMARY KEY (budget, month, percent),
    FOREIGN KEY(budget) REFERENCES budgets (name) ON DELETE CASCADE
);

-- Volumes that outlive their jobs, with their bills between jobs.
CREATE TABLE volume_bills (
    id {id} NOT NULL,  -- that of the subject in the ledger
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (id)
);

-- Tokens of language models, by subject of the ledger (a key's requests at a replica), model and day.
CREATE TABLE token_uses (
    subject {id} NOT NULL,
    model TEXT NOT NULL,
    day BIGINT NOT NULL,  -- when it began
    prompt BIGINT NOT NULL,
    cached BIGINT NOT NULL,
    completion BIGINT NOT NULL,
    estimated BIGINT NOT NULL,
    PRIMARY KEY (subject, model, day)
);

-- The energy that nodes measured, by subject of the ledger (an attempt) and day.
CREATE TABLE energy_uses (
    subject {id} NOT NULL,
    day BIGINT NOT NULL,  -- when it began
    joules BIGINT NOT NULL,
    PRIMARY KEY (subject, day)
);

-- What nodes measure and programs report over time: minutes of a rank, joined to days.
CREATE TABLE figures (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    since BIGINT NOT NULL,  -- the first minute
    document {bytes} NOT NULL,
    PRIMARY KEY (attempt_id, rank, since)
);
CREATE INDEX figures_since ON figures (since);

-- What each server's gateway has counted for a service, for the server that reconciles it.
CREATE TABLE gateway_reports (
    service TEXT NOT NULL,
    server TEXT NOT NULL,
    document TEXT NOT NULL,
    written_at BIGINT NOT NULL,
    PRIMARY KEY (service, server)
);

-- Ended jobs that were removed because of their age. The entries of the ledger are left of them.
CREATE TABLE removed_jobs (
    job_id {id} NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    ended_at BIGINT NOT NULL,
    removed_at BIGINT NOT NULL,
    rule TEXT NOT NULL,  -- where the number of days is set
    days BIGINT NOT NULL,
    PRIMARY KEY (job_id)
);
CREATE INDEX removed_jobs_name ON removed_jobs (project, name, removed_at);
CREATE INDEX removed_jobs_removed ON removed_jobs (removed_at);
