-- What the programs of ranks reported step by step, packed (`packing.py`). Pieces of level 0 are
-- messages of agents; those of a level are joined to one of the next. A large piece has a brief
-- version, with the lowest and highest values of its stretches.
CREATE TABLE IF NOT EXISTS curves (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,
    number BIGINT NOT NULL,
    level BIGINT NOT NULL,
    rows_count BIGINT NOT NULL,
    document {bytes} NOT NULL,
    brief {bytes},
    PRIMARY KEY (attempt_id, rank, number)
);
