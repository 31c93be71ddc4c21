"""Defines how the jobs of different projects share a machine."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused

# Where machines of clouds find their own credentials: AWS, Google Cloud, Azure and others; tasks of
# ECS; Alibaba Cloud; AWS over IPv6.
METADATA_ADDRESSES = ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254")
_CONNECT_S = 0.7  # such a service is on the machine or one hop away


class HostIsolation(StrEnum):
    """A value of the setting `isolation`."""

    ONE_PROJECT = ""  # the jobs at one time are of one project
    NAMESPACES = "namespaces"
    NONE = "none"


def read_isolation(
    provider: str, settings: Mapping[str, Scalar], *, namespaces: bool = False
) -> HostIsolation:
    """Read the setting. Raises Refused if the value is unknown, or not possible with this
    provider."""
    value = str(settings.get("isolation", ""))
    known = [each for each in HostIsolation if namespaces or each is not HostIsolation.NAMESPACES]
    if value not in known:
        names = " or ".join(f"`{each}`" for each in known if each)
        raise Refused(f"[providers.{provider}] isolation: expected {names}, not {value!r}")
    return HostIsolation(value)


def find_metadata(addresses: Sequence[str] = METADATA_ADDRESSES, port: int = 80) -> str:
    """Return the first address at which a metadata service accepts connections, or "" if there is
    none. Jobs could request the credentials of the machine from this service. This function sends
    no request. Blocks.
    """
    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = threads.map(lambda each: _accepts(each, port), addresses)
        return next((each for each, found in zip(addresses, answers, strict=True) if found), "")


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
