-- The queue of each machine, which every pass over the queue reads.
CREATE INDEX jobs_machine_queue ON jobs (phase, project, machine, priority DESC, id)
    WHERE phase = 'queued' AND machine IS NOT NULL;
