"""How strictly the address for nodes speaks TLS: 1.2 or newer, and of 1.2 only ciphers that
authenticate and forget.

Busybox's downloader knows no signature of the handshake but SHA-1, which OpenSSL allows at level 0
alone. It is told apart by what it says first: it names the server even where that is an address,
which no other client does (RFC 6066, section 3, forbids it). Such a connection gets level 0, and
may fetch what is checked by its hash, nothing else. Where nodes know the server by a name, every
client says it, so these connections have level 0 and every route; agents and curl refuse SHA-1
themselves.
"""

import ipaddress
import ssl

# The certificate's key is P-256, so no other signatures can come up; all of TLS 1.3 is allowed
# beside these.
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305"
)


class TlsContexts:
    """The contexts of one certificate: `strict` is what connections begin with."""

    def __init__(self, certificate: str) -> None:
        self.strict = _make(certificate, CIPHERS)
        self._named = _make(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self._downloads = _make(certificate, f"{CIPHERS}:@SECLEVEL=0")
        self.strict.sni_callback = self._choose

    def only_downloads(self, connection: object) -> bool:
        """Whether this TLS connection may fetch files by hash and nothing else."""
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
