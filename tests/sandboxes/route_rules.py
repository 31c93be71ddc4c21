"""Who may use the routes of sandboxes, written by hand: see `tests/api/api/test_route_matrix.py`."""

READS = {"/v1/sandboxes": ("query", "view")}
