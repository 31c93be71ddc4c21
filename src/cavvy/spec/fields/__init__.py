"""All keys of a task file: the kinds of values, and the fields of each section."""
