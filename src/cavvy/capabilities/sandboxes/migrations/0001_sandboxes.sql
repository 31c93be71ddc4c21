-- Sandboxes, as their hosts tell of them. What they are worth ends a day after they do.
CREATE TABLE sandboxes (
    project TEXT NOT NULL,
    job {id} NOT NULL,  -- of the host
    name {id} NOT NULL,
    document TEXT NOT NULL,  -- a `wire.SandboxReport` as JSON
    until_at BIGINT NOT NULL,  -- when its time is over
    PRIMARY KEY (project, job, name)
);
CREATE INDEX sandboxes_until ON sandboxes (until_at);
