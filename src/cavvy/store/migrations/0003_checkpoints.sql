-- Checkpoints that nodes without access to the job's folder have uploaded: the newest few of each job.
CREATE TABLE checkpoints (
    job_id {id} NOT NULL,
    number BIGINT NOT NULL,
    project TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    manifest TEXT NOT NULL,
    files BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    made_at BIGINT NOT NULL,
    saved_at BIGINT NOT NULL,
    PRIMARY KEY (job_id, number),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
