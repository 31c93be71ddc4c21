"""The table of everything a task file can say: the kinds of values, and the fields by section."""
