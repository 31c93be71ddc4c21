-- Limits of the devices of a site together.
CREATE TABLE edge_sites (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
