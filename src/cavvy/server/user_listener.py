"""The listener for users' commands and programs in addition to the Unix socket: TCP, with TLS if
the settings name a certificate. Without TLS, only this machine can reach the listener. If the files
of the certificate are replaced, new connections use the new files, so a renewed certificate needs
no restart.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import time

from cavvy.server.addresses import explain_reason
from cavvy.server.doors import open_port
from cavvy.server.state_dir import StateDirError
from cavvy.settings import Settings

_LOOK_S = 5.0  # seconds between two checks of the files
_log = logging.getLogger(__name__)


class UserTls:
    """The TLS context of the listener for users. Raises StateDirError if the files cannot be
    used; the message contains the names of the two settings.
    """

    def __init__(
        self,
        certificate: str,
        key: str,
        settings: tuple[str, str] = ("server.tls_cert", "server.tls_key"),
    ) -> None:
        self._files = (certificate, key)
        self._stamp = _stamp(self._files)
        self._looked = time.monotonic()
        try:
            self._current = _make(certificate, key)
        except (OSError, ValueError) as error:
            raise StateDirError(
                "settings-invalid",
                f"{settings[0]} {certificate} and {settings[1]} {key} cannot be used: "
                f"{_explain(error)}",
                f"both files must be in PEM; in the file {settings[0]}, the certificates of the "
                "authorities follow the server's certificate",
            ) from error
        self.strict = _make(certificate, key)
        self.strict.sni_callback = self._choose

    def only_downloads(self, connection: object) -> bool:
        return False

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> int | None:
        """Make the connection use the newest certificate. Called in each handshake."""
        self._renew()
        connection.context = self._current
        return None

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._current = _make(*self._files)
        except (
            OSError,
            ValueError,
        ) as error:  # the files may be only partly written, so check again later
            _log.warning(
                "the new certificate cannot be used; the old certificate stays in use: %s",
                _explain(error),
            )
        else:
            _log.info("the new certificate is in use", extra={"file": self._files[0]})


def _make(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, password=_refuse_password)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _refuse_password() -> str:
    raise ValueError(
        "the key is encrypted; store it without a password, in a file that only the server can read"
    )


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        known = {
            "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
            "NO_START_LINE": "one of the two files is not in PEM",
        }
        # Python names no reason if a file is not in PEM.
        return known.get(error.reason or "NO_START_LINE", str(error))
    return str(getattr(error, "strerror", None) or error)


def _stamp(files: tuple[str, str]) -> list[tuple[int, int, int]]:
    """Return a value that changes if a file is written or replaced."""
    stamps = []
    for path in files:
        with contextlib.suppress(OSError):
            seen = os.stat(path)
            stamps.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
    return stamps


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
