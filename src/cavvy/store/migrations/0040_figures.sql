-- What nodes measure and programs report over time: minutes of a rank, joined to days.
CREATE TABLE figures (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    since BIGINT NOT NULL,  -- the first minute
    document {bytes} NOT NULL,
    PRIMARY KEY (attempt_id, rank, since)
);
CREATE INDEX figures_since ON figures (since);
