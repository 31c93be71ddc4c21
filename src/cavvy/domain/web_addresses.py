"""Addresses of web servers that users name."""

import re
from urllib.parse import urlsplit

_FORM = re.compile(r"https?://[^\s/?#]+\S*")


def is_web_address(text: str) -> bool:
    """Return whether a request can be sent to a URL. The URL must have a host and a valid port."""
    if not _FORM.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
