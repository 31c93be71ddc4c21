-- What each server's gateway has counted for a service, for the server that reconciles it.
CREATE TABLE gateway_reports (
    service TEXT NOT NULL,
    server TEXT NOT NULL,
    document TEXT NOT NULL,
    written_at BIGINT NOT NULL,
    PRIMARY KEY (service, server)
);
