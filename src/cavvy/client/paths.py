"""Builds the paths and queries of requests."""

from collections.abc import Collection

from cavvy.client.errors import ApiError

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def quote(text: str) -> str:
    """Percent-encode one path segment or query value."""
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in text.encode())


def query(**values: object) -> str:
    """Return the query part of a URL. A list becomes one key-value pair per item. Values that are
    None or False are left out.
    """
    pairs = [
        f"{name}={quote(_plain_text(each))}"
        for name, value in values.items()
        for each in (
            value if isinstance(value, Collection) and not isinstance(value, str) else [value]
        )
        if each is not None and each is not False
    ]
    return "?" + "&".join(pairs) if pairs else ""


def _plain_text(value: object) -> str:
    if value is True:
        return "true"
    return f"{value:g}" if isinstance(value, float) else str(value)


def machine_path(project: str, name: str) -> str:
    return f"{project_path(project)}/machines/{segment('machine', name)}"


def project_path(name: str) -> str:
    return f"/v1/projects/{segment('project', name)}"


def job_path(project: str, name: str) -> str:
    return f"{project_path(project)}/jobs/{segment('job', name)}"


def segment(kind: str, name: str) -> str:
    """Return a name as one segment of a path. Raises ApiError if the name would change the rest of
    the path."""
    if name.strip(".") and "/" not in name:
        return quote(name)
    raise ApiError("invalid-request", f"{name!r} cannot be the name of a {kind}", status=422)
