-- What a kept call waits for in its job, as the broker has told last; and for one that has ended, its
-- job, and its share of the job's time in microseconds.
ALTER TABLE function_calls ADD COLUMN why TEXT NOT NULL DEFAULT '';
ALTER TABLE function_calls ADD COLUMN job TEXT NOT NULL DEFAULT '';
ALTER TABLE function_calls ADD COLUMN share_us BIGINT NOT NULL DEFAULT 0;
