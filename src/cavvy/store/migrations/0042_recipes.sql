-- Task files that the members of a project share.
CREATE TABLE recipes (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    text TEXT NOT NULL,
    account TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
