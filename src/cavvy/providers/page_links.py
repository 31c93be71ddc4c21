"""Checks whether two URLs are on the same server, for links such as a list's next page."""

from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def is_same_server(url: str, other: str) -> bool:
    """Return whether both URLs have the same scheme, host and port. A URL without a port has the
    default port of its scheme, and the case of letters in a host name is ignored. For example,
    https://a.org:443/x and https://A.org/y are on the same server.
    """
    return _server(url) == _server(other)


def _server(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # not a URL
        return url, None, None
