-- The jobs that wait until other jobs have ended. A job's conditions are in its column `rest`.
CREATE TABLE job_dependencies (
    after_id {id} NOT NULL,  -- the job that must end first
    job_id {id} NOT NULL,  -- the job that waits
    PRIMARY KEY (after_id, job_id)
);
CREATE INDEX job_dependencies_job ON job_dependencies (job_id);
