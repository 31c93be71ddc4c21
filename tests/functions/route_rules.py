"""Who may use the routes of apps, written by hand: see `tests/api/api/test_route_matrix.py`."""

SENSITIVE = {
    ("PUT", "/v1/projects/{project}/apps/{name}"): {"member", "operator", "admin"},
    ("DELETE", "/v1/projects/{project}/apps/{name}"): {"member", "operator", "admin"},
    ("POST", "/v1/projects/{project}/apps/{name}/claim"): {"member", "operator", "admin"},
    ("POST", "/v1/projects/{project}/apps/{name}/calls"): {"member", "operator", "admin"},
    ("POST", "/v1/projects/{project}/apps/{name}/calls/read"): {"member", "operator", "admin"},
    ("DELETE", "/v1/projects/{project}/apps/{name}/calls/{call}"): {
        *("member", "operator", "admin"),
    },
    ("POST", "/v1/projects/{project}/apps/{name}/functions/{function}"): {
        *("member", "operator", "admin"),
    },
    ("POST", "/v1/projects/{project}/dicts/{name}"): {"member", "operator", "admin"},
    ("DELETE", "/v1/projects/{project}/dicts/{name}"): {"member", "operator", "admin"},
    ("POST", "/v1/projects/{project}/queues/{name}"): {"member", "operator", "admin"},
    ("DELETE", "/v1/projects/{project}/queues/{name}"): {"member", "operator", "admin"},
}
READS = {
    "/v1/projects/{project}/dicts": ("path", "view"),
    "/v1/projects/{project}/queues": ("path", "view"),
    "/v1/apps": ("query", "view"),
    "/v1/projects/{project}/apps": ("path", "view"),
    "/v1/projects/{project}/apps/{name}/figures": ("path", "view"),
    "/v1/projects/{project}/apps/{name}": ("path", "view"),
    "/v1/projects/{project}/apps/{name}/calls": ("path", "view"),
    "/v1/projects/{project}/apps/{name}/costs": ("path", "view"),
    "/v1/projects/{project}/apps/{name}/functions/{function}": ("path", "view"),
}
