"""Checks whether a listener can use an address, and explains why an address cannot be used."""

import errno
import os
import socket


def explain_reason(error: OSError | ValueError) -> str:
    """Return the error's reason without the address that Python adds to some error messages.
    ValueErrors come from host names that cannot be encoded.
    """
    number = getattr(error, "errno", None) or 0
    # the numbers of errors in host names are negative, and strerror() does not know them
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)


def explain_address(host: str, port: int, error: OSError) -> str:
    """Return the reason why nothing can listen on an address, together with the fix."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"address {shown} is in use by another process; change services.listen"
    return f"address {shown} cannot be used ({explain_reason(error)}); change services.listen"


def find_obstacle(host: str, port: int, *, reuse_port: bool = False) -> str:
    """Return why nothing can listen on an address, or "" if the address can be used. The function
    frees the address before it returns.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tried.bind(where)
    except OSError as error:
        return explain_address(host, port, error)
    return ""
