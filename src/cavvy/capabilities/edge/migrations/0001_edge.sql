-- Devices at the edge, and rollouts of models.
CREATE TABLE IF NOT EXISTS edge_invitations (
    project TEXT NOT NULL,
    name {id} NOT NULL,  -- SHA-256 of the token
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE IF NOT EXISTS edge_devices (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE IF NOT EXISTS rollouts (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- Requests whose answers were uncertain, as devices have sent them.
CREATE TABLE IF NOT EXISTS edge_samples (
    project TEXT NOT NULL,
    device {id} NOT NULL,
    number BIGINT NOT NULL,  -- of the device
    model TEXT NOT NULL,
    residency TEXT NOT NULL,  -- the area or country that the sample must not leave, or ''
    received_at BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (project, device, number)
);
CREATE INDEX IF NOT EXISTS edge_samples_model ON edge_samples (project, model, received_at);

-- Limits of the devices of a site together.
CREATE TABLE IF NOT EXISTS edge_sites (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- Settings of the program and the engines of devices, by device, label or site.
CREATE TABLE IF NOT EXISTS edge_settings (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
