-- An array is one task with many jobs, which are its members. Its task is stored once.
CREATE TABLE job_arrays (
    id {id} NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    parallel BIGINT,  -- how many members run at once; NULL for all
    task TEXT NOT NULL,
    origin TEXT NOT NULL,
    snapshot TEXT,  -- content hash of the working folder
    PRIMARY KEY (id),
    CONSTRAINT job_arrays_name UNIQUE (project, name)
);
CREATE INDEX job_arrays_project ON job_arrays (project, id);
CREATE INDEX job_arrays_snapshot ON job_arrays (snapshot) WHERE snapshot IS NOT NULL;
ALTER TABLE jobs ADD COLUMN array_id {id};
ALTER TABLE jobs ADD COLUMN member BIGINT;
CREATE INDEX jobs_array ON jobs (array_id, phase) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_array_queue ON jobs
    (phase, array_id, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND array_id IS NOT NULL;
