"""Who may use the routes of notices, written by hand: see `tests/api/api/test_route_matrix.py`."""

SENSITIVE = {
    ("GET", "/v1/projects/{project}/notices"): {"member", "operator", "admin"},
    ("PUT", "/v1/projects/{project}/notices/{name}"): {"member", "operator", "admin"},
    ("DELETE", "/v1/projects/{project}/notices/{name}"): {"member", "operator", "admin"},
    ("POST", "/v1/projects/{project}/notices/{name}/test"): {"member", "operator", "admin"},
}
