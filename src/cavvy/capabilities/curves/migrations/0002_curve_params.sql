-- Settings that the programs of ranks reported, such as their learning rate.
CREATE TABLE IF NOT EXISTS curve_params (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (attempt_id, rank, name)
);
