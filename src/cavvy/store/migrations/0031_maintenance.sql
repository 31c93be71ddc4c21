-- What operators have ordered for the installation's own hosts. No work is placed on closed hosts.
CREATE TABLE node_states (
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    closed BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);
-- Hosts and devices that belong to one project for a while.
CREATE TABLE reservations (
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);
