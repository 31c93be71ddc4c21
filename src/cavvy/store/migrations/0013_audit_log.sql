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
