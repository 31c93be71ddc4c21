-- When a project was archived: nothing new starts in it. NULL if it is in use.
ALTER TABLE projects ADD COLUMN archived_at BIGINT;
