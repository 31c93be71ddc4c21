-- Names of gangs that users keep and use again, and the machine of each job.
ALTER TABLE jobs ADD COLUMN machine TEXT;
CREATE INDEX jobs_machine ON jobs (project, machine, id) WHERE machine IS NOT NULL;
CREATE TABLE machines (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    document TEXT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);
