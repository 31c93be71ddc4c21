-- Tokens of language models, by subject of the ledger (a key's requests at a replica), model and day.
CREATE TABLE token_uses (
    subject {id} NOT NULL,
    model TEXT NOT NULL,
    day BIGINT NOT NULL,  -- when it began
    prompt BIGINT NOT NULL,
    cached BIGINT NOT NULL,
    completion BIGINT NOT NULL,
    estimated BIGINT NOT NULL,
    PRIMARY KEY (subject, model, day)
);
