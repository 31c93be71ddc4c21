-- In which order kept calls are sent: those of a lower precedence first, and within one, callers
-- take turns. limit_keys are the keys of the function's limits as a list of JSON, or ''.
ALTER TABLE function_calls ADD COLUMN precedence BIGINT NOT NULL DEFAULT 0;
ALTER TABLE function_calls ADD COLUMN turn BIGINT NOT NULL DEFAULT 0;
ALTER TABLE function_calls ADD COLUMN caller TEXT NOT NULL DEFAULT '';
ALTER TABLE function_calls ADD COLUMN limit_keys TEXT NOT NULL DEFAULT '';
DROP INDEX function_calls_state;
CREATE INDEX function_calls_next
    ON function_calls (project, app, state, function, precedence, turn, id);
CREATE INDEX function_calls_turns
    ON function_calls (project, app, state, function, precedence, caller, turn);
