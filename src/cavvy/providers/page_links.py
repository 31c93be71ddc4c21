"""Compares the server of a link, such as the link to a list's next page, with the server that was
asked.
"""

from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def is_same_server(url: str, other: str) -> bool:
    """Whether both URLs have the same scheme, host and port. A default port equals no port, and
    upper and lower case do not matter: https://a.org:443/x and https://A.org/y are equal.
    """
    return _server(url) == _server(other)


def _server(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # not a URL
        return url, None, None
