-- The name under which each attempt's gang was bought, for the cost of a gang that jobs hand over.
ALTER TABLE attempts ADD COLUMN bought_as TEXT DEFAULT '' NOT NULL;
UPDATE attempts SET bought_as = {gang_bought};
CREATE INDEX attempts_bought ON attempts (bought_as);
