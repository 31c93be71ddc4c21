"""Plans the encrypted tunnel between the ranks of a gang: addresses, ports and public keys."""

import re
import zlib
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address

from cavvy.agent.documents import TunnelConfig, TunnelPeerConfig
from cavvy.domain.jobs import Attempt, Node
from cavvy.domain.messages import HostFacts

# 198.18.0.0/15 is reserved for tests of networks (RFC 2544), so neither clouds nor the Internet use
# these addresses.
_FIRST, _BITS = int(IPv4Address("198.18.0.0")), 17
_KEY = re.compile(r"[A-Za-z0-9+/]{43}=")  # 32 bytes in base64
_ADDRESS = re.compile(r"[A-Za-z0-9.:-]+")


def read_key(host: HostFacts) -> str:
    """Return the public key that a node has sent, or "" if the node has sent no valid key."""
    return host.tunnel_key if _KEY.fullmatch(host.tunnel_key) else ""


def make_tunnel(attempt: Attempt, nodes: Sequence[Node], master_port: int) -> TunnelConfig | None:
    """Return the tunnel of a gang. The result is None if all ranks are on one machine, because
    their traffic does not use a network. The addresses depend on the attempt, so that gangs on one
    machine rarely share addresses.
    """
    if len(nodes) < 2 or all(is_loopback(node.address or "") for node in nodes):
        return None
    bits = (len(nodes) + 1).bit_length()  # the first and the last address are not used
    block = zlib.crc32(f"tunnel {attempt.id}".encode()) % (1 << (_BITS - bits))
    first = _FIRST + (block << bits) + 1
    return TunnelConfig(
        prefix=32 - bits,
        peers=[
            TunnelPeerConfig(
                key=node.tunnel_key,
                missing=node.tunnel_missing,
                endpoint=_endpoint(node.address or "", master_port + 1 + node.rank),
                address=str(IPv4Address(first + node.rank)),
            )
            for node in nodes
        ],
    )


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _endpoint(address: str, port: int) -> str:
    """Return `address` and `port` as one text. An address that could add lines to a configuration
    is replaced by "invalid".
    """
    host = address if _ADDRESS.fullmatch(address) else "invalid"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
