-- What nodes sent, which was only known as an amount of money before.
ALTER TABLE charges ADD COLUMN bytes BIGINT DEFAULT 0 NOT NULL;

-- What entries of the ledger are for. Rows are only ever added.
CREATE TABLE ledger_subjects (
    id {id} NOT NULL,  -- that of the attempt
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
    PRIMARY KEY (id)
);
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
CREATE INDEX ledger_discounts ON ledger (line_since) WHERE kind = 'discount';
{ledger_function};
{ledger_no_change};
{ledger_no_removal};

-- The charges so far are the first entries.
INSERT INTO ledger_subjects (id, project, user_name, job_id, job, machine, service, attempt,
    provider, account, region, zone, instance_type, accelerator, accelerators, purchase, tags)
SELECT a.id, a.project, j.user_name, j.id, COALESCE(j.removed, j.name), COALESCE(j.machine, ''), '',
    a.number, COALESCE({offer_provider}, ''),
    COALESCE({offer_provider}, '') || COALESCE('@' || NULLIF({offer_credential}, ''), ''),
    COALESCE({offer_region}, ''),
    COALESCE({offer_zone}, ''), COALESCE({offer_instance_type}, ''),
    COALESCE({offer_accelerator}, ''),
    CAST(COALESCE({offer_accelerator_count}, '0') AS DOUBLE PRECISION)
        * CAST(COALESCE({offer_accelerator_part}, '1') AS DOUBLE PRECISION),
    COALESCE({offer_purchase}, 'on-demand'), j.tags
FROM attempts a JOIN jobs j ON j.id = a.job_id
WHERE a.id IN (SELECT attempt_id FROM charges);
INSERT INTO ledger (subject, rank, sequence, project, kind, line, line_since, since, until,
    quantity, unit, rate, amount, source)
SELECT c.attempt_id, c.rank,
    ROW_NUMBER() OVER (PARTITION BY c.attempt_id, c.rank ORDER BY c.since, c.kind), c.project,
    CASE WHEN c.kind IN ('kept', 'minimum', 'rolled back') THEN 'idle' ELSE c.kind END,
    c.kind, c.since, c.since, c.until,
    CASE WHEN c.kind = 'traffic' THEN 0 ELSE c.until - c.since END,
    CASE WHEN c.kind = 'traffic' THEN 'bytes' ELSE 'us' END,
    c.rate, c.amount, 'opening'
FROM charges c
ORDER BY c.attempt_id, c.rank, c.since, c.kind;

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
