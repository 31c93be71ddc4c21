-- Accounts that an admin has disabled keep their tokens and roles, but cannot use them.
ALTER TABLE accounts ADD COLUMN disabled_at BIGINT;

-- The token with which a token of the same account was created.
ALTER TABLE tokens ADD COLUMN parent {id};

-- Issuers whose ID tokens are accepted.
CREATE TABLE trusts (
    name TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (name)
);

-- The accounts of people who have signed in, by who they are at the issuer.
CREATE TABLE identities (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    account TEXT NOT NULL,
    PRIMARY KEY (issuer, subject),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE
);
CREATE INDEX identities_account ON identities (account);

-- Sign-ins, by the SHA-256 of what their ID token signs: none is accepted twice. `until` is the time
-- at which both the ID token and the token that it was exchanged for have expired.
CREATE TABLE sign_ins (
    digest TEXT NOT NULL,
    trust TEXT NOT NULL,
    token {id} NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (digest)
);
CREATE INDEX sign_ins_until ON sign_ins (until);

-- Roles that accounts have by their groups at an issuer, until the sign-in ends.
CREATE TABLE group_roles (
    account TEXT NOT NULL,
    project TEXT NOT NULL,
    role TEXT NOT NULL,
    trust TEXT NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (account, project, role, trust),
    FOREIGN KEY(account) REFERENCES accounts (name) ON DELETE CASCADE,
    FOREIGN KEY(trust) REFERENCES trusts (name) ON DELETE CASCADE
);
CREATE INDEX group_roles_project ON group_roles (project);
