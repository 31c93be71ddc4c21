"""The table of all keys of a task file: the kinds of values, and the fields by section."""
