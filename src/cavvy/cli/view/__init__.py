"""Output for users and programs: tables, JSON, a live screen and errors. These modules make no
requests.
"""
