"""Rates and dollars of a run while it goes, and the trackers that they go to."""
