-- The jobs of deployed apps: a row for each kind of node that an app's functions need.
CREATE TABLE function_jobs (
    project TEXT NOT NULL,
    app {id} NOT NULL,
    part BIGINT NOT NULL,
    revision TEXT NOT NULL,
    snapshot TEXT NOT NULL,  -- of the app's files
    document TEXT NOT NULL,  -- what submits the job, and its functions
    job {id} NOT NULL,  -- the newest job, whose ID is given before it is submitted; '' for none
    user_name TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, app, part)
);
CREATE INDEX function_jobs_snapshot ON function_jobs (snapshot);
