-- The jobs that programs of jobs have submitted with `sbatch`. `root` is the first job of the chain,
-- `ask` names the submission so that it is not repeated, and `job_id` is the ID of a job or an array.
CREATE TABLE IF NOT EXISTS submitted_jobs (
    project TEXT NOT NULL,
    parent {id} NOT NULL,
    ask TEXT NOT NULL,
    root {id} NOT NULL,
    job_id {id} NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (parent, ask)
);
CREATE INDEX IF NOT EXISTS submitted_jobs_by_root ON submitted_jobs (root);
CREATE INDEX IF NOT EXISTS submitted_jobs_by_job ON submitted_jobs (job_id);
