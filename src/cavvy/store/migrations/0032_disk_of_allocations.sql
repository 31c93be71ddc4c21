-- The part of a host's disk that a rank has requested.
ALTER TABLE allocations ADD COLUMN disk_gib BIGINT DEFAULT 0 NOT NULL;
