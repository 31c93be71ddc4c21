-- Devices at the edge, the models that they serve, the signed lists of these models, and rollouts.
CREATE TABLE edge_invitations (
    project TEXT NOT NULL,
    name {id} NOT NULL,  -- SHA-256 of the token
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE edge_devices (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE models (
    project TEXT NOT NULL,
    name {id} NOT NULL,  -- with its number, such as defects@7
    snapshot TEXT NOT NULL,  -- of its files
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE INDEX models_snapshot ON models (snapshot);
CREATE TABLE model_repositories (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE rollouts (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
