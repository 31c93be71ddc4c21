"""Who may use the routes of devices, written by hand: see `tests/api/api/test_route_matrix.py`."""

SENSITIVE = {
    ("POST", "/v1/projects/{project}/edge/tokens"): {"operator", "admin"},
    ("DELETE", "/v1/projects/{project}/edge/devices/{name}"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/edge/devices/{name}/tasks"): {"operator", "admin"},
    ("PUT", "/v1/projects/{project}/edge/sites/{name}"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/edge/settings"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/rollouts"): {"operator", "admin"},
    ("POST", "/v1/projects/{project}/rollouts/{name}/halt"): {"operator", "admin"},
}
READS = {
    "/v1/edge/devices": ("query", "view"),
    "/v1/edge/sites": ("query", "view"),
    "/v1/edge/settings": ("query", "view"),
    "/v1/rollouts": ("query", "view"),
    "/v1/projects/{project}/edge/devices/{name}": ("path", "view"),
    "/v1/projects/{project}/edge/devices/{name}/settings": ("path", "view"),
    "/v1/projects/{project}/edge/devices/{name}/tasks/{task_id}": ("path", "operate"),
    "/v1/projects/{project}/edge/samples": ("path", "run"),
    "/edge/v1/script": ("open", None),
    "/edge/v1/nonce": ("open", None),
    "/edge/v1/metadata/{file}": ("machine", None),
    "/edge/v1/manifests/{model}/{number}": ("machine", None),
    "/edge/v1/files/{digest}": ("machine", None),
    "/edge/v1/settings": ("machine", None),
}
OPEN = ("/edge/v1/script", "/edge/v1/nonce", "/edge/v1/token")
# requests that are refused, for `tests/api/api/test_api_jobs.py`: method, path, status and code
REFUSED = [
    ("GET", "/edge/v1/check-in", 405, "wrong-method"),
    ("POST", "/edge/v1/check-in/", 404, "not-found"),
    ("POST", "/edge/v1/check-in", 403, "forbidden"),
]
