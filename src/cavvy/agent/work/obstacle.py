"""Tests whether this machine can separate the work of different projects, and names the obstacle if
separation is impossible. The server converts the obstacle to a message for users
(`providers.hosts.isolation`).
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from . import separate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# The obstacles. METADATA is followed by a blank and the address.
NONE, ROOT, NAMESPACES, METADATA = "", "root", "namespaces", "metadata"
# Where machines of clouds find their own credentials: AWS, Google Cloud, Azure and others; tasks of
# ECS; Alibaba Cloud; over IPv6, AWS, Google Cloud, Oracle Cloud and Scaleway.
METADATA_ADDRESSES = (
    *("169.254.169.254", "169.254.170.2", "100.100.100.200"),
    *("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
)
_CONNECT_S = 0.7  # a metadata service is on the machine or one hop away


def find_obstacle(folder: str, shown: str) -> str:
    """Return the obstacle that prevents the separation of the work from its machine, or NONE. The
    separation hides `folder`, except the folder `shown`. Blocks.
    """
    if os.geteuid() == 0:
        return ROOT
    if separate.main(folder, shown):
        return NAMESPACES
    address = find_metadata()
    return f"{METADATA} {address}" if address else NONE


def find_metadata(addresses: Sequence[str] = METADATA_ADDRESSES, port: int = 80) -> str:
    """Return the first address at which a metadata service accepts connections, or "" if there is
    none. Jobs could request the machine's credentials from a metadata service. This function sends
    no request. Blocks.
    """
    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = threads.map(lambda each: _accepts(each, port), addresses)
        return next((each for each, found in zip(addresses, answers) if found), "")  # noqa: B905


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
