"""Stores checkpoints in the state folder: files that a job's attempts leave for its next
attempts."""
