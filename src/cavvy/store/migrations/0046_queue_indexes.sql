-- These indexes hold only jobs that wait. SQLite chooses them for the value of their first column.
-- PostgreSQL leaves a condition out of a search if the index's own condition implies it, and without
-- a value of the first column each search read the whole index from its start.
DROP INDEX jobs_queue;
DROP INDEX jobs_machine_queue;
DROP INDEX jobs_turns;
DROP INDEX jobs_project_turns;
DROP INDEX jobs_later;
DROP INDEX jobs_again;
DROP INDEX jobs_machine_turns;
DROP INDEX jobs_pool_turns;
DROP INDEX jobs_array_queue;
CREATE INDEX jobs_turns ON jobs
    ({phase}project, user_name, (submitted_at - priority * 3600000000), id) WHERE phase = 'queued';
CREATE INDEX jobs_project_turns ON jobs ({phase}project, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NULL AND pool IS NULL AND array_id IS NULL;
CREATE INDEX jobs_later ON jobs ({phase}not_before) WHERE phase = 'queued' AND not_before IS NOT NULL;
CREATE INDEX jobs_again ON jobs ({phase}attempt, id) WHERE phase = 'queued' AND attempt > 0;
CREATE INDEX jobs_machine_turns ON jobs
    ({phase}project, machine, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND machine IS NOT NULL;
CREATE INDEX jobs_pool_turns ON jobs
    ({phase}project, pool, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND pool IS NOT NULL;
CREATE INDEX jobs_array_queue ON jobs ({phase}array_id, (submitted_at - priority * 3600000000), id)
    WHERE phase = 'queued' AND array_id IS NOT NULL;
