"""The TLS settings of the listener for nodes. Only TLS 1.2 and newer are allowed and, in TLS 1.2,
only authenticated ciphers with forward secrecy.

Busybox's downloader supports only SHA-1 signatures in the handshake, which OpenSSL allows only at
security level 0. The server recognises Busybox's downloader by the first message, which contains an
IP address as the server name. RFC 6066, section 3, forbids IP addresses as server names, and no
other client sends an IP address as the server name. A connection of Busybox's downloader gets
security level 0, and may download only files whose hash the node checks. If nodes reach the server
by a host name, every client sends this name in its first message, so the server cannot tell
Busybox's downloader from other clients. If nodes know the server by a host name, all connections
get security level 0 and may use all routes. Agents and curl themselves refuse SHA-1 signatures,
even on connections with security level 0.
"""

import ipaddress
import ssl

# The certificate has a P-256 key, so other kinds of signatures cannot occur. All ciphers of TLS 1.3
# are allowed as well.
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305"
)


class TlsContexts:
    """The TLS contexts of one certificate. Connections start with the context `strict`."""

    def __init__(self, certificate: str) -> None:
        self.strict = _make(certificate, CIPHERS)
        self._named = _make(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self._downloads = _make(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self.strict.sni_callback = self._choose

    def only_downloads(self, connection: object) -> bool:
        """Return whether this TLS connection is limited to downloads of files by their hash."""
        return getattr(connection, "context", None) is self._downloads

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> int | None:
        if name is not None:
            connection.context = self._downloads if _is_address(name) else self._named
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _make(certificate: str, ciphers: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate)
    context.set_ciphers(ciphers)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context
