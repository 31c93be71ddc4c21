"""The gateway's TLS: one main certificate, and further certificates for single host names, chosen
by SNI.

The certificate of a host name is in the file `HOST.pem` of a folder, together with the certificates
of its authorities and the key. The file `_.example.com.pem` is for all names directly below
example.com. Files that were replaced or added are used for new connections within seconds.
"""

import os
import ssl
import time
from pathlib import Path

from cavvy.gateway.config import GatewayConfigError, TlsFiles

_LOOK_S = 5.0  # seconds between two checks of the files
_NAME_MAX = 253
_Stamp = tuple[tuple[int, int, int], ...]


class HostCertificates:
    """The certificates in use. Raises GatewayConfigError if the main certificate cannot be used. An
    unusable certificate for a single name is skipped.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._looked_at = time.monotonic()
        self._stamp = self._read_stamp()
        self._main = make_tls(files.certificate, files.key)
        self._hosts = self._read_hosts()
        self.context = make_tls(files.certificate, files.key)
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        self._renew()
        connection.context = self._find((name or "").lower()[:_NAME_MAX])

    def _find(self, name: str) -> ssl.SSLContext:
        found = self._hosts.get(name) or self._hosts.get(f"_.{name.partition('.')[2]}")
        return found or self._main

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._main = make_tls(self._files.certificate, self._files.key)
        except GatewayConfigError:
            # the files may be half written; the old certificate is used until they change again
            return
        self._hosts = self._read_hosts()

    def _list_files(self) -> list[Path]:
        folder = self._files.folder
        return sorted(Path(folder).glob("*.pem")) if folder else []

    def _read_hosts(self) -> dict[str, ssl.SSLContext]:
        found = {}
        for path in self._list_files():
            try:
                found[path.stem.lower()] = make_tls(str(path), str(path))
            except GatewayConfigError:
                continue
        return found

    def _read_stamp(self) -> _Stamp:
        stamps = []
        for path in (self._files.certificate, self._files.key, *map(str, self._list_files())):
            try:
                seen = os.stat(path)
            except OSError:
                continue
            stamps.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
        return tuple(stamps)


def make_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Raises GatewayConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise GatewayConfigError(
            f"tls: {certificate} and {key} cannot be used: {error}; both must be files in PEM, the "
            "key without a password"
        ) from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key is encrypted")
