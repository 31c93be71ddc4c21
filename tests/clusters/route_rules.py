"""Who may use the routes for other clusters, written by hand: see `test_route_matrix.py`."""

_NODES = "/v1/projects/{project}/pools/{name}/nodes"
SENSITIVE = {
    ("POST", _NODES): {"operator", "admin"},
    ("POST", f"{_NODES}/release"): {"operator", "admin"},
}
READS = {
    _NODES: ("path", "view"),
    "/v1/projects/{project}/pools/{name}/shape": ("path", "view"),
}
