-- Dicts and queues of projects, which functions and their callers share. The server reads no values.
CREATE TABLE state_objects (
    project TEXT NOT NULL,
    kind {id} NOT NULL,  -- dict or queue
    name {id} NOT NULL,
    entries BIGINT NOT NULL,
    bytes BIGINT NOT NULL,  -- of keys and values
    number BIGINT NOT NULL,  -- of the newest entry
    user_name TEXT NOT NULL,  -- who made it
    created_at BIGINT NOT NULL,
    changed_at BIGINT NOT NULL,
    PRIMARY KEY (project, kind, name)
);
CREATE TABLE dict_entries (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    entry_key {id} NOT NULL,  -- as JSON
    number BIGINT NOT NULL,  -- in the order in which keys were added
    value {bytes} NOT NULL,
    PRIMARY KEY (project, name, entry_key)
);
CREATE INDEX dict_entries_number ON dict_entries (project, name, number);
CREATE TABLE queue_items (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    part {id} NOT NULL,
    number BIGINT NOT NULL,
    value {bytes} NOT NULL,
    expires_at BIGINT NOT NULL,  -- that of the newest item counts for all of a partition
    PRIMARY KEY (project, name, part, number)
);
CREATE INDEX queue_items_expires ON queue_items (expires_at);
-- what requests that take or add something were answered: a request that is sent again is answered
-- the same, and changes nothing again
CREATE TABLE state_answers (
    project TEXT NOT NULL,
    id {id} NOT NULL,
    answer {bytes} NOT NULL,
    answered_at BIGINT NOT NULL,
    PRIMARY KEY (project, id)
);
CREATE INDEX state_answers_at ON state_answers (answered_at);
