-- Published models, and the signed lists that name them.
CREATE TABLE IF NOT EXISTS models (
    project TEXT NOT NULL,
    name {id} NOT NULL,  -- with its number, such as defects@7
    snapshot TEXT NOT NULL,  -- of its files
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE INDEX IF NOT EXISTS models_snapshot ON models (snapshot);
CREATE TABLE IF NOT EXISTS model_repositories (
    project TEXT NOT NULL,
    name {id} NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
