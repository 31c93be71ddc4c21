-- What runs now in a job of an app, as its broker has told last.
CREATE TABLE function_gauges (
    project TEXT NOT NULL,
    app {id} NOT NULL,
    job {id} NOT NULL,
    document TEXT NOT NULL,  -- a `counts.wire.CountsAsk` without its minutes, as JSON
    told_at BIGINT NOT NULL,
    PRIMARY KEY (project, app, job)
);
CREATE INDEX function_gauges_told ON function_gauges (told_at);
-- The calls of a function that ended in a minute in a job: how many, how long they took, and some.
CREATE TABLE function_minutes (
    project TEXT NOT NULL,
    app {id} NOT NULL,
    function {id} NOT NULL,
    minute BIGINT NOT NULL,  -- when it begins, in seconds since 1970
    job {id} NOT NULL,
    done BIGINT NOT NULL,  -- without the calls that have a key, which the control plane keeps
    failed BIGINT NOT NULL,
    document TEXT NOT NULL,  -- a `counts.wire.FunctionMinute` without its calls, as JSON
    calls TEXT NOT NULL,  -- a list of `counts.wire.DirectCall` as JSON
    PRIMARY KEY (project, app, function, minute, job)
);
CREATE INDEX function_minutes_minute ON function_minutes (minute);
