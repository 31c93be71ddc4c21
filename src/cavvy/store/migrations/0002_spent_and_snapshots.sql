-- A running sum of each job's charges, so that listings scan none, and its snapshot's hash, so that
-- unused blobs can be found.
ALTER TABLE jobs ADD COLUMN spent BIGINT DEFAULT 0 NOT NULL;
UPDATE jobs SET spent = (SELECT SUM(amount) FROM charges WHERE charges.job_id = jobs.id)
    WHERE EXISTS (SELECT 1 FROM charges WHERE charges.job_id = jobs.id);
ALTER TABLE documents ADD COLUMN snapshot TEXT;
UPDATE documents SET snapshot = {origin_snapshot};
CREATE INDEX documents_snapshot ON documents (snapshot) WHERE snapshot IS NOT NULL;
