-- How the bills of replicas were divided among the requests of their services.
CREATE TABLE IF NOT EXISTS divided_bills (
    attempt_id {id} NOT NULL,
    moved BIGINT NOT NULL,  -- micro-dollars
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (attempt_id)
);
