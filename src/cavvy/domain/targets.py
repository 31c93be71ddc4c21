"""The addresses that users name, and which of them the server may call: every public address, and
the private ones that an administrator allows. An address that leads to another one gets the rules
of the other.
"""

import ipaddress
import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import urlsplit

# The private targets that may be called, as in the setting `server.private_targets`: names of
# hosts, addresses and networks, separated by commas. EVERY allows all of them.
EVERY = "*"
_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network


class AddressKind(StrEnum):
    """What an address leads to."""

    PUBLIC = "public"
    PRIVATE = "private"
    LOOPBACK = "loopback"
    METADATA = "link-local or metadata"  # gives credentials to this machine; never called


# https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry
_LOOPBACK = ("0.0.0.0/8", "127.0.0.0/8", "::/128", "::1/128")  # Linux connects 0.0.0.0 to itself
_PRIVATE = (
    *("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16"),
    *("192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4", "2001:db8::/32", "3fff::/20"),
    *("64:ff9b:1::/48", "fc00::/7", "fec0::/10", "ff00::/8"),
)
# Link-local addresses, and the addresses of metadata services that are not link-local: those of
# Azure, Alibaba Cloud and Oracle Cloud; over IPv6, those of EC2, EKS, Google Cloud, Oracle Cloud
# and Scaleway
_METADATA = (
    *("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"),
    *("fe80::/10", "fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128"),
    *("fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
)
_KINDS = tuple(
    (kind, tuple(map(ip_network, networks)))
    for kind, networks in (
        (AddressKind.METADATA, _METADATA),
        (AddressKind.LOOPBACK, _LOOPBACK),
        (AddressKind.PRIVATE, _PRIVATE),
    )
)
# Networks whose addresses contain IPv4 addresses, with the lowest bit of each IPv4 address: IPv4-
# mapped, -compatible and -translated addresses (RFC 4291, 2765), NAT64 (RFC 6052, 8215), 6to4
# (RFC 3056) and Teredo (RFC 4380), which has the server's address and the client's one inverted
_EMBEDDED = tuple(
    (IPv6Network(network), lowest)
    for network, lowest in (
        *(("::ffff:0:0/96", 0), ("::/96", 0), ("::ffff:0:0:0/96", 0), ("64:ff9b::/96", 0)),
        *(("64:ff9b:1::/48", 0), ("2002::/16", 80), ("2001::/32", 64)),
    )
)
_TEREDO = IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)  # the upper half of an interface's identifier (RFC 5214)
_LOWEST = (1 << 32) - 1


def find_kind(address: str) -> AddressKind:
    """Return what an IP address leads to. Raises ValueError."""
    kinds = {_find_own_kind(end) for end in _list_ends(address)}
    return next((kind for kind, _ in _KINDS if kind in kinds), AddressKind.PUBLIC)


def is_allowed(targets: str, host: str, address: str, is_own: Callable[[str], bool]) -> bool:
    """Return whether the server may call this address of a host for its users. `targets` are the
    private targets that may be called. `is_own` returns whether an address is one of the server's
    machine: it leads to programs there, past the firewall, even if it is public. Raises ValueError.
    """
    kind = find_kind(address)
    if kind is AddressKind.METADATA or targets == EVERY:
        return kind is not AddressKind.METADATA
    inside = [
        end
        for end in _list_ends(address)
        if _find_own_kind(end) is not AddressKind.PUBLIC or is_own(str(end))
    ]
    if not inside:
        return True
    names, networks = read_targets(targets)
    return host.rstrip(".").lower() in names or all(
        any(end in network for network in networks) for end in inside
    )


@lru_cache(maxsize=8)
def read_targets(text: str) -> tuple[frozenset[str], tuple[_Network, ...]]:
    """Return the names of hosts and the networks in a list of private targets. Raises ValueError
    with the wrong word.
    """
    names, networks = set[str](), list[_Network]()
    for word in filter(None, (each.strip() for each in text.split(","))):
        try:
            networks.append(ip_network(word.strip("[]"), strict=False))
        except ValueError:
            if not word.isascii() or set(word.lower()) & set(" /:*@?#"):
                raise ValueError(f"{word!r} is not a host, an address or a network") from None
            names.add(word.rstrip(".").lower())
    return frozenset(names), tuple(networks)


def _find_own_kind(end: _Address) -> AddressKind:
    for kind, networks in _KINDS:
        if any(end in network for network in networks):
            return kind
    return AddressKind.PUBLIC


def _list_ends(text: str) -> list[_Address]:
    """Return the address, without its zone such as %eth0, and the addresses in it to which packets
    may be passed on.
    """
    address = ip_address(text.partition("%")[0])
    number = int(address)
    if isinstance(address, IPv4Address) or number <= 1:  # `::` and `::1` contain no other address
        return [address]
    inner = [number >> lowest for network, lowest in _EMBEDDED if address in network]
    if address in _TEREDO:
        inner.append(~number)
    if number >> 32 & _LOWEST in _ISATAP:
        inner.append(number)
    return [address, *(IPv4Address(each & _LOWEST) for each in inner)]


_FORM = re.compile(r"https?://[^\s/?#]+\S*")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")


def is_web_address(text: str) -> bool:
    """Return whether a request can be sent to a URL. The URL must have a host and a valid port,
    and no user name or password, which the server's client does not send.
    """
    if not _FORM.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False


def is_host(host: str) -> bool:
    """Return whether this can be the value of a Host field."""
    return _HOST.fullmatch(host) is not None


def host_name(host: str) -> str:
    """Return the name in a Host field, or ""."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower().removesuffix(".") if found else ""


def host_port(host: str) -> str:
    """Return the port in a Host field, or "" if it contains none."""
    found = _HOST.fullmatch(host)
    return (found[2] or "") if found else ""


def is_loopback_name(name: str) -> bool:
    """Return whether a name always stands for this machine. A site on the internet can let its own
    names point to this machine, but none of these.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
