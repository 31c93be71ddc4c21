"""`cavvy batch`, which runs and follows tasks with the section `batch`."""
