"""Prepares tasks: reads task files and work profiles, finds offers and prices, and submits jobs."""
