-- When the newest ID token of each person was issued: older ones are not accepted after it. A row
-- outlives the person's account, which a sign-in would make again.
CREATE TABLE newest_id_tokens (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    issued_at BIGINT NOT NULL,
    PRIMARY KEY (issuer, subject)
);
CREATE INDEX newest_id_tokens_issued ON newest_id_tokens (issued_at);
