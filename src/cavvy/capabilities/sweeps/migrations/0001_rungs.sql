-- What jobs of a sweep had reported at the steps at which they are compared.
CREATE TABLE IF NOT EXISTS rung_values (
    array_id {id} NOT NULL,
    job_id {id} NOT NULL,
    rung BIGINT NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    stopped BOOLEAN NOT NULL,  -- whether the job was stopped there
    PRIMARY KEY (job_id, rung)
);
CREATE INDEX IF NOT EXISTS rung_values_array ON rung_values (array_id);
