-- Services, each with its task and its replicas.
CREATE TABLE services (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    snapshot TEXT,  -- of the working folder
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
