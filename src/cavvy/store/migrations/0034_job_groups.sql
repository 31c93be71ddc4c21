-- A group is a row of job_arrays whose jobs have tasks of their own, and start together.
ALTER TABLE job_arrays ADD COLUMN started BIGINT;  -- of a group: 0 until its jobs have started together, then the time
