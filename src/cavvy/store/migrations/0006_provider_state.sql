-- What providers keep: their launch ledgers, and the machines that joined.
CREATE TABLE provider_state (
    provider TEXT NOT NULL,
    collection TEXT NOT NULL,
    name {id} NOT NULL,
    body TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (provider, collection, name)
);
