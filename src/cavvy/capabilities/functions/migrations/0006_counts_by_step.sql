-- The same in rows of a minute, ten minutes and an hour, so that a long time is few rows to read.
DROP TABLE function_minutes;
CREATE TABLE function_counts (
    project TEXT NOT NULL,
    app {id} NOT NULL,
    function {id} NOT NULL,
    step BIGINT NOT NULL,  -- the seconds of the row: 60, 600 or 3600
    begin_s BIGINT NOT NULL,  -- when it begins, in seconds since 1970
    job {id} NOT NULL,
    done BIGINT NOT NULL,  -- without the calls that have a key, which the control plane keeps
    failed BIGINT NOT NULL,
    times TEXT NOT NULL,  -- a `counts.rows.CallTimes` as JSON
    calls TEXT NOT NULL,  -- of a minute: a list of `counts.wire.DirectCall` as JSON
    PRIMARY KEY (project, app, function, step, begin_s, job)
);
CREATE INDEX function_counts_begin ON function_counts (step, begin_s, project, app, done, failed);
CREATE INDEX function_counts_app ON function_counts (project, app, step, begin_s);
