-- What the programs of ranks reported beside numbers, such as pictures. `kind` is the media type.
CREATE TABLE IF NOT EXISTS curve_examples (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    number BIGINT NOT NULL,
    name TEXT NOT NULL,
    process BIGINT NOT NULL,
    step DOUBLE PRECISION,
    at_ms DOUBLE PRECISION NOT NULL,
    kind TEXT NOT NULL,
    size BIGINT NOT NULL,
    data {bytes} NOT NULL,
    PRIMARY KEY (attempt_id, rank, number)
);
