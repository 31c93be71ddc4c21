-- The energy that nodes measured, by subject of the ledger (an attempt) and day.
CREATE TABLE energy_uses (
    subject {id} NOT NULL,
    day BIGINT NOT NULL,  -- when it began
    joules BIGINT NOT NULL,
    PRIMARY KEY (subject, day)
);
