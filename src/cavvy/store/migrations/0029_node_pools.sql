-- Elastic pools: nodes that are added and removed with the work of their project's jobs.
ALTER TABLE jobs ADD COLUMN pool TEXT;
CREATE INDEX jobs_pool_turns ON jobs
    (phase, project, pool, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND pool IS NOT NULL;
CREATE INDEX jobs_pool ON jobs (project, pool, id) WHERE pool IS NOT NULL;
CREATE TABLE node_pools (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (project, name)
);
