-- What entries for volumes and for requests are attributed to.
ALTER TABLE ledger_subjects ADD COLUMN volume TEXT DEFAULT '' NOT NULL;
ALTER TABLE ledger_subjects ADD COLUMN key_name TEXT DEFAULT '' NOT NULL;

-- Volumes that outlive their jobs, with their bills between jobs.
CREATE TABLE volume_bills (
    id {id} NOT NULL,  -- that of the subject in the ledger
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (id)
);

-- How the bills of replicas were divided among the requests of their services.
CREATE TABLE divided_bills (
    attempt_id {id} NOT NULL,
    moved BIGINT NOT NULL,  -- micro-dollars
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (attempt_id)
);

-- Replicas that were billed before this time had no counts, so those bills are not divided.
INSERT INTO meta ("key", value) VALUES ('requests-counted-since', CAST(CURRENT_TIMESTAMP AS TEXT));
