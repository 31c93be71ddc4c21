"""Who may use the routes of curves, written by hand: see `tests/api/api/test_route_matrix.py`."""

READS = {
    "/v1/projects/{project}/curves": ("path", "view"),
    "/v1/projects/{project}/curve-params": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}/curves": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}/curve-names": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}/examples": ("path", "view"),
    "/v1/projects/{project}/jobs/{name}/examples/{example}": ("path", "view"),
}
