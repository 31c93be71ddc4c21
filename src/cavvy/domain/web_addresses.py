"""Addresses of web servers that users name, Host fields, and the names of this machine."""

import ipaddress
import re
from urllib.parse import urlsplit

_FORM = re.compile(r"https?://[^\s/?#]+\S*")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")


def is_web_address(text: str) -> bool:
    """Return whether a request can be sent to a URL. The URL must have a host and a valid port,
    and no user name or password, which the server's client does not send.
    """
    if not _FORM.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False


def is_host(host: str) -> bool:
    """Return whether this can be the value of a Host field."""
    return _HOST.fullmatch(host) is not None


def host_name(host: str) -> str:
    """Return the name in a Host field, or ""."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower().removesuffix(".") if found else ""


def host_port(host: str) -> str:
    """Return the port in a Host field, or "" if it contains none."""
    found = _HOST.fullmatch(host)
    return (found[2] or "") if found else ""


def is_loopback_name(name: str) -> bool:
    """Return whether a name always stands for this machine. A site on the internet can let its own
    names point to this machine, but none of these.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
