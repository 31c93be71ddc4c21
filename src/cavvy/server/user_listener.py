"""The listener for users' commands and programs in addition to the Unix socket: TCP, with TLS if
the settings name a certificate. Without TLS, only this machine can reach the listener.
"""

import ipaddress
import socket

from cavvy.gateway.addresses import explain_reason
from cavvy.server.ports import open_port
from cavvy.server.state_dir import StateDirError
from cavvy.server.user_tls import UserTls
from cavvy.settings import Settings


class UserListener:
    """A TCP socket that is bound but does not accept connections yet, and its TLS settings."""

    def __init__(self, sock: socket.socket, tls: UserTls | None) -> None:
        self.sock = sock
        self.tls = tls

    @property
    def address(self) -> str:
        host, port = self.sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self.tls is None else 'https'}://{shown}:{port}"


def listen_for_users(settings: Settings, wait_s: float = 0.0) -> UserListener | None:
    """Bind to `server.listen`, or return None if that setting is empty. Waits up to `wait_s`
    seconds for a port that is in use. Blocks. Raises StateDirError.
    """
    where = settings.text("server.listen")
    tls = _read_tls(settings)
    if not where:
        if tls is not None:
            raise StateDirError(
                "settings-invalid",
                "server.tls_cert is set, but server.listen is empty",
                "set server.listen to the address for users, such as 0.0.0.0:443",
            )
        return None
    host, _, digits = where.rpartition(":")
    host = host.strip("[]")
    try:
        port = int(digits)
        if not 0 <= port <= 65535:
            raise ValueError
        if tls is None and not ipaddress.ip_address(host).is_loopback:
            raise StateDirError(
                "settings-invalid",
                f"server.listen is {where}, which other machines can reach",
                "set server.tls_cert and server.tls_key, or use a loopback address, such as "
                "127.0.0.1:0",
            )
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        sock = open_port(host, port, family, wait_s=wait_s)
    except ValueError:
        raise StateDirError(
            "settings-invalid",
            f"server.listen is {where!r}, which is not an address with a port",
            "write 127.0.0.1:7777 or, with a certificate, 0.0.0.0:443",
        ) from None
    except OSError as error:
        raise StateDirError(
            "settings-invalid",
            f"cannot listen on {where}: {explain_reason(error)}",
            "choose another port for server.listen",
        ) from error
    sock.setblocking(False)
    return UserListener(sock, tls)


def _read_tls(settings: Settings) -> UserTls | None:
    certificate, key = settings.text("server.tls_cert"), settings.text("server.tls_key")
    if not certificate and not key:
        return None
    if not (certificate and key):
        missing, given = ("key", "cert") if certificate else ("cert", "key")
        raise StateDirError(
            "settings-invalid",
            f"server.tls_{given} is set, but server.tls_{missing} is not",
            "set server.tls_cert to the certificate with its chain, and server.tls_key to its key",
        )
    return UserTls(certificate, key)
