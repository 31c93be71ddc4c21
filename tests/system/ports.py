"""Ports for servers whose port must be known before they start."""

import os
import random
import socket

# Below those that the kernel gives to outgoing connections (32768 and up), so that none takes a
# port between its choice and the server's start; with 10000 more, which SeaweedFS listens on too,
# they still are.
_LOWEST, _HIGHEST = 11_000, 21_000
_choice = random.Random(os.getpid())  # processes that choose at the same time choose differently
_given: set[int] = set()


def free_port() -> int:
    """A port at which nobody listens, nor at the one 10000 above it; it is given once in this
    process.
    """
    for _ in range(1000):
        port = _choice.randrange(_LOWEST, _HIGHEST)
        if port not in _given and _is_free(port) and _is_free(port + 10_000):
            _given.add(port)
            return port
    raise OSError(f"there is no free port from {_LOWEST} to {_HIGHEST}")


def _is_free(port: int) -> bool:
    with socket.socket() as line:
        try:
            line.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
