-- What has changed of the attempts that hold nodes, and the jobs that wait for their next attempt,
-- are found without a look at the rows themselves.
CREATE INDEX attempts_changes ON attempts (phase, version, id) WHERE phase <> 'ended';
CREATE INDEX jobs_again ON jobs (phase, attempt, id) WHERE phase = 'queued' AND attempt > 0;
