"""Handles a task before it runs: reading, work profiles, offers and prices, submission."""
