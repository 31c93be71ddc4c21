-- What a program may want to know of an event, beside the text for people.
ALTER TABLE events ADD COLUMN fact TEXT;
