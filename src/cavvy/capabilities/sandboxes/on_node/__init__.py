"""The files that are sent with the job of a sandbox host and run on its node."""
