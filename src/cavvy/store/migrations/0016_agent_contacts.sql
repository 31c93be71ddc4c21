-- What each server knows of the agents that it talks to, for the server that reconciles their job.
CREATE TABLE agent_contacts (
    attempt_id {id} NOT NULL,
    rank BIGINT NOT NULL,  -- -1 for the whole gang
    server TEXT NOT NULL,  -- that wrote the row last
    heard_at BIGINT,
    asked_at BIGINT,
    paid_until BIGINT,
    written_at BIGINT NOT NULL,
    PRIMARY KEY (attempt_id, rank)
);
CREATE INDEX agent_contacts_written ON agent_contacts (written_at);
