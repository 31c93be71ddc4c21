"""Who may use the routes of services, written by hand: see `tests/api/api/test_route_matrix.py`."""

_RUNNERS = {"member", "operator", "admin"}
_SERVICE = "/v1/projects/{project}/services/{name}"
SENSITIVE = {
    ("PUT", _SERVICE): _RUNNERS,
    ("DELETE", _SERVICE): _RUNNERS,
    ("GET", f"{_SERVICE}/calls"): _RUNNERS,
    ("POST", f"{_SERVICE}/calls"): _RUNNERS,
    ("DELETE", f"{_SERVICE}/calls"): _RUNNERS,
    ("POST", f"{_SERVICE}/calls/retry"): _RUNNERS,
    ("GET", f"{_SERVICE}/calls/{{call}}"): _RUNNERS,
    ("POST", f"{_SERVICE}/calls/{{call}}/retry"): _RUNNERS,
    ("GET", f"{_SERVICE}/keys"): _RUNNERS,
    ("POST", f"{_SERVICE}/keys"): _RUNNERS,
    ("DELETE", f"{_SERVICE}/keys/{{key}}"): _RUNNERS,
}
READS = {
    "/v1/services": ("query", "view"),
    _SERVICE: ("path", "view"),
    f"{_SERVICE}/figures": ("path", "view"),
}
OPEN = ("/hooks/v1/{owner}/{name}/{hook}",)
