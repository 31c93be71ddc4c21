-- Where people are notified of a project's events. The addresses are encrypted.
CREATE TABLE IF NOT EXISTS notice_targets (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    channel TEXT NOT NULL,
    sealed {bytes} NOT NULL,
    events TEXT NOT NULL,
    user_name TEXT NOT NULL,  -- only jobs and budgets of this user; '' for all users
    problem TEXT NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

-- The outbox: notices that no receiver has accepted yet.
CREATE TABLE IF NOT EXISTS notices (
    id {serial} NOT NULL,
    project TEXT NOT NULL,
    target TEXT NOT NULL,
    event TEXT NOT NULL,
    job_id {id} NOT NULL,  -- '' for a budget
    job TEXT NOT NULL,
    user_name TEXT NOT NULL,
    text TEXT NOT NULL,
    at BIGINT NOT NULL,
    due_at BIGINT NOT NULL,
    tries BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX IF NOT EXISTS notices_due ON notices (due_at, project, target);
CREATE INDEX IF NOT EXISTS notices_target ON notices (project, target, id);
