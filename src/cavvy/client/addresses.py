"""Checks the server addresses that users enter, and determines the address at which users reach a
server.
"""

import ipaddress
import os
from urllib.parse import urlsplit

from cavvy.client.errors import ApiError

_LONGEST_PATH = 16_384  # characters


def check_address(address: str) -> None:
    """Raise ApiError if the address is not a server's address, or if sending a token to the address
    would be unsafe.
    """
    example = "write, for example, https://cavvy.example.org or http://127.0.0.1:8700"
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError as error:
        raise ApiError(
            "address-invalid", f"{address!r} is not the address of a server: {error}", example
        ) from error
    if url.scheme == "unix":
        return
    if url.scheme in ("http", "https") and url.path.strip("/"):
        message = f"{address!r} is not the address of a server, because it has a path"
        hint = "use an address without a path; a proxy must give the server its own host name"
        raise ApiError("address-invalid", message, hint)
    extra = url.query or url.fragment or url.username or url.password
    if url.scheme not in ("http", "https") or not url.hostname or extra or port == 0:
        raise ApiError("address-invalid", f"{address!r} is not the address of a server", example)
    if url.scheme == "http" and not is_loopback(url.hostname):
        raise ApiError(
            "address-unsafe",
            f"{address} is not encrypted, so others could read the token",
            "use https://, or a tunnel such as `ssh -L 8700:127.0.0.1:8700 HOST` with "
            "http://127.0.0.1:8700",
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address stands for this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def list_own_path(address: str, *first: str) -> str:
    """Return the folders `first` and the PATH of this process, if the server at this address is on
    this machine; otherwise return "".
    """
    url = urlsplit(address)
    if url.scheme != "unix" and not is_loopback(url.hostname or ""):
        return ""
    path = os.pathsep.join([*first, os.environ.get("PATH", "")])
    return path if len(path) <= _LONGEST_PATH and path.isprintable() else ""


def name_host(listen: str, host: str) -> str:
    """Return the URL at which users reach a server that listens on the address `listen` of the
    machine `host`.
    """
    url = urlsplit(listen)
    if url.hostname not in ("0.0.0.0", "::"):
        return listen
    return f"{url.scheme}://{host}" + (f":{url.port}" if url.port != 443 else "")
