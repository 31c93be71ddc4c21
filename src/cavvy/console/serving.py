"""Serves the console on a port until a signal ends the command."""

import logging
import socket
from datetime import UTC, datetime

from cavvy.console.access import Access
from cavvy.console.app import Console

_GOODBYE_S = 2  # seconds in which requests may finish


def serve(
    access: Access, server: str, listener: socket.socket, tls: tuple[str, str] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM. `server` is the name of the server that the pages show. `tls`
    contains the files with the certificate and the key.
    """
    import uvicorn

    logging.basicConfig(format="cavvy: %(message)s", level=logging.WARNING)
    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        Console(access, server, lambda: datetime.now(UTC)).app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # A proxy on this machine that ends TLS says so in X-Forwarded-Proto.
        forwarded_allow_ips="127.0.0.1",
        timeout_graceful_shutdown=_GOODBYE_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        access.close()
