-- Calls of deployed apps that the control plane keeps until they have a result, and then for a while.
CREATE TABLE function_calls (
    id {id} NOT NULL PRIMARY KEY,
    project TEXT NOT NULL,
    app {id} NOT NULL,
    function {id} NOT NULL,
    once_key {id},  -- another call with this key is this one
    state {id} NOT NULL,  -- waiting, done, failed or cancelled
    head TEXT NOT NULL,  -- how arguments and result are written
    body {bytes} NOT NULL,  -- the arguments; empty once there is a result
    answer TEXT NOT NULL,  -- how the call ended: a `wire.CallEnd` as JSON
    result {bytes} NOT NULL,
    account TEXT,  -- of who called; NULL: the owner of the server
    user_name TEXT NOT NULL,
    consent BIGINT NOT NULL,  -- whether who called agrees to what a job costs
    created_at BIGINT NOT NULL,
    ended_at BIGINT,
    UNIQUE (project, app, function, once_key)
);
CREATE INDEX function_calls_state ON function_calls (project, app, state, id);
CREATE INDEX function_calls_ended ON function_calls (state, ended_at);
-- who deployed an app: the account, '' for the owner of the server; NULL: not known
ALTER TABLE function_jobs ADD COLUMN account TEXT;
