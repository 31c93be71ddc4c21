-- Calls in the queues of services, with their results. They outlive their services.
CREATE TABLE IF NOT EXISTS queued_calls (
    project TEXT NOT NULL,
    service TEXT NOT NULL,  -- its name
    call_id TEXT NOT NULL,
    source TEXT NOT NULL,  -- the trigger; '' for users
    state TEXT NOT NULL,
    due_at BIGINT NOT NULL,
    expires_at BIGINT,
    document TEXT NOT NULL,
    request {bytes},
    answer {bytes},
    version BIGINT NOT NULL,
    PRIMARY KEY (project, service, call_id)
);
CREATE INDEX IF NOT EXISTS queued_calls_due ON queued_calls (project, service, due_at) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS queued_calls_expire ON queued_calls (expires_at) WHERE expires_at IS NOT NULL;
