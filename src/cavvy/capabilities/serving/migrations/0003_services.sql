-- Services, each with its task and its replicas.
CREATE TABLE IF NOT EXISTS services (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    snapshot TEXT,  -- of the working folder
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE INDEX IF NOT EXISTS services_snapshot ON services (snapshot) WHERE snapshot IS NOT NULL;
