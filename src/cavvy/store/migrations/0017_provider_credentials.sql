-- The credentials of projects at providers, encrypted.
CREATE TABLE provider_credentials (
    project TEXT NOT NULL,
    provider TEXT NOT NULL,
    sealed {bytes} NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, provider)
);
