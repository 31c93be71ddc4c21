-- Settings of the program and the engines of devices, by device, label or site.
CREATE TABLE edge_settings (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
