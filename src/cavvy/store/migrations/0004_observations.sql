-- What was seen of each offer's market: launches, lifetimes, boot times, prices.
CREATE TABLE observations (
    id {serial} NOT NULL,
    market {id} NOT NULL,
    kind TEXT NOT NULL,
    at BIGINT NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    nodes BIGINT NOT NULL,
    rate BIGINT,
    text TEXT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX observations_at ON observations (at);
CREATE INDEX observations_market ON observations (market, at);
