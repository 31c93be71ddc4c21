"""Decides which server should hold each lease. Each lease has one preferred server among the living
servers. The preferred server is computed from a hash of the lease's name and the server's name, so
all servers agree without communication. When a server starts, only the leases that the new server
should hold move to it. When a server stops, only the leases that it held move to other servers.
"""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

from cavvy.domain.values import Struct

SHARDS = 64  # parts into which jobs are divided; never changes, since two versions must agree


class LeaseChanges(Struct, frozen=True, kw_only=True):
    """The leases that a server should acquire, and the leases that the server should release."""

    take: Sequence[str]
    give: Sequence[str]


def shard_of(job_id: str) -> str:
    """Return the lease of a job."""
    number = int.from_bytes(sha256(job_id.encode()).digest()[:4], "big") % SHARDS
    return f"shard:{number:02}"


def list_shards() -> Sequence[str]:
    return [f"shard:{number:02}" for number in range(SHARDS)]


def share_leases(
    names: Collection[str],
    holders: Mapping[str, str],
    alive: Collection[str],
    me: str,
) -> LeaseChanges:
    """Decide which leases the server `me` acquires and releases. The server acquires a lease of
    `names` if `find_preferred` chooses the server and no living server holds the lease. The server
    releases the lease if another server should hold it.
    """
    take, give = [], []
    for name in sorted(names):
        holder = holders.get(name, "")
        holder = holder if holder in alive else ""
        mine = find_preferred(name, alive) == me
        if holder == me and not mine:
            give.append(name)
        elif holder == "" and mine:
            take.append(name)
    return LeaseChanges(take=take, give=give)


def find_preferred(name: str, alive: Collection[str]) -> str:
    """Return the server that should hold a lease (the highest random weight), or "" if no server is
    alive."""
    return max(alive, key=lambda each: (_weigh(name, each), each), default="")


def _weigh(name: str, server: str) -> bytes:
    return sha256(f"{name}\0{server}".encode()).digest()
