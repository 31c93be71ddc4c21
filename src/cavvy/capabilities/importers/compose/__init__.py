"""Files of Docker Compose: `values` fills in variables, `services` makes a task of each service,
and `files` joins them to a group of jobs that start together.
"""
