-- Accounts, their tokens, the tree of projects, and roles in projects.
CREATE TABLE accounts (
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (name)
);

-- `hash` is the SHA-256 of the token, in hexadecimal.
CREATE TABLE tokens (
    id {id} NOT NULL,
    hash TEXT NOT NULL,
    account TEXT NOT NULL,
    label TEXT NOT NULL,
    scopes TEXT NOT NULL,
    project TEXT,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT,
    PRIMARY KEY (id),
    CONSTRAINT tokens_hash UNIQUE (hash),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX tokens_account ON tokens (account, id);

-- Projects that were created. Others exist as names of their jobs, below the installation.
CREATE TABLE projects (
    name TEXT NOT NULL,
    parent TEXT,
    PRIMARY KEY (name),
    FOREIGN KEY(parent) REFERENCES projects (name)
);

-- A role in a project, or in all projects if `project` is empty.
CREATE TABLE role_bindings (
    account TEXT NOT NULL,
    project TEXT NOT NULL,
    role TEXT NOT NULL,
    PRIMARY KEY (account, project, role),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX role_bindings_project ON role_bindings (project);
