-- The first waiting jobs of each project, and the next job that may not start yet, are found without
-- a look at all waiting jobs.
CREATE INDEX jobs_project_turns ON jobs
    (phase, project, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NULL AND pool IS NULL AND array_id IS NULL;
CREATE INDEX jobs_later ON jobs (phase, not_before)
    WHERE phase = 'queued' AND not_before IS NOT NULL;
