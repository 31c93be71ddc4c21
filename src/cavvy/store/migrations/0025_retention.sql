-- Ended jobs are removed after a while. What is left of them are the entries of the ledger, and a
-- row that says when and why they were removed.
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
CREATE INDEX jobs_ended ON jobs (project, ended_at, id) WHERE ended_at IS NOT NULL;
-- the sums of projects are read from this index alone
CREATE INDEX ledger_amounts ON ledger (project, amount);
CREATE INDEX ledger_until ON ledger (until);
CREATE INDEX ledger_subjects_service ON ledger_subjects (id) WHERE service <> '';

-- Old records of the audit log are removed: of each removal, the last record. The database permits
-- to remove these records, and refuses all other changes as before.
CREATE TABLE audit_cuts (
    number BIGINT NOT NULL,
    hash TEXT NOT NULL,
    cut_at BIGINT NOT NULL,
    PRIMARY KEY (number)
);
{audit_cuts_function};
{audit_cuts_no_change};
{audit_cuts_no_removal};
{lift_audit_rule};
{audit_rule};
