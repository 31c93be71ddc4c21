"""Output for users and programs: tables, JSON, a live screen, errors. Makes no requests."""
