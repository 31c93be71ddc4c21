-- The first schema. A database that is newer goes back by its backup, not by a downgrade.
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
    place TEXT,
    rest TEXT NOT NULL,
    document BIGINT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT jobs_name UNIQUE (project, name)
);
CREATE INDEX jobs_phase ON jobs (phase, id);
CREATE INDEX jobs_project ON jobs (project, id);
CREATE INDEX jobs_project_phase ON jobs (project, phase, id);
CREATE INDEX jobs_queue ON jobs (phase, priority DESC, id) WHERE phase = 'queued';
CREATE TABLE documents (
    job_id {id} NOT NULL,
    task TEXT NOT NULL,
    origin TEXT NOT NULL,
    PRIMARY KEY (job_id),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
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
    PRIMARY KEY (id),
    CONSTRAINT attempts_number UNIQUE (job_id, number),
    CONSTRAINT attempts_gang UNIQUE (gang),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX attempts_open ON attempts (id) WHERE phase <> 'ended';
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
    PRIMARY KEY (attempt_id, rank, kind, since),
    FOREIGN KEY(attempt_id) REFERENCES attempts (id),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX charges_job ON charges (job_id);
CREATE INDEX charges_project ON charges (project, since, amount);
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
    PRIMARY KEY (gang, rank),
    FOREIGN KEY(host) REFERENCES hosts (name)
);
CREATE INDEX allocations_host ON allocations (host);
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
