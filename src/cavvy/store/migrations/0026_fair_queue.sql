-- The queue orders the jobs of several projects by their use and their shares.
-- The size of a job is in GPUs.
ALTER TABLE jobs ADD COLUMN size DOUBLE PRECISION DEFAULT 1 NOT NULL;
CREATE INDEX jobs_turns ON jobs
    (phase, project, user_name, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued';
CREATE INDEX jobs_machine_turns ON jobs
    (phase, project, machine, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NOT NULL;
CREATE TABLE project_use (
    project TEXT NOT NULL,
    gpu_hours DOUBLE PRECISION NOT NULL,  -- the decayed use up to `at`
    held DOUBLE PRECISION NOT NULL,  -- the GPUs in use since `at`
    at BIGINT NOT NULL,
    PRIMARY KEY (project)
);
