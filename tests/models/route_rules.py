"""Who may use the routes of models, written by hand: see `tests/api/api/test_route_matrix.py`."""

SENSITIVE = {
    ("POST", "/v1/projects/{project}/models"): {"member", "operator", "admin"},
    ("PUT", "/v1/projects/{project}/models/{name}/labels/{label}"): {"operator", "admin"},
    ("DELETE", "/v1/projects/{project}/models/{name}/labels/{label}"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/edge/keys"): {"admin"},
    ("PUT", "/v1/projects/{project}/edge/lists"): {"admin"},
    ("PUT", "/v1/projects/{project}/models/{name}/list"): {"member", "operator", "admin"},
}
READS = {
    "/v1/projects/{project}/edge/lists": ("path", "view"),
    "/v1/models": ("query", "view"),
}
