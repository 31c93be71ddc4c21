-- The tags of each job, for listings and bills, and the former name of a removed job.
ALTER TABLE jobs ADD COLUMN tags TEXT DEFAULT '{{}}' NOT NULL;
ALTER TABLE jobs ADD COLUMN removed TEXT;
UPDATE jobs SET tags = COALESCE(
    (SELECT {task_tags} FROM documents WHERE documents.job_id = jobs.id), '{{}}');
