"""All keys of a task file: the fields of each section and the kinds of their values."""
