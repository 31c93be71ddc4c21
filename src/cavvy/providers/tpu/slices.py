"""Determines the names of TPU slices, maps ranks to the hosts of slices, and builds the script with
which each host determines its rank from its worker number.

The TPU API calls the hosts of a slice workers, and numbers them from 0. Rank r of a gang is the
worker r % HOSTS of slice r // HOSTS, where HOSTS is `Offer.hosts`. A slice has the name of its
first rank.
"""

import asyncio

from cavvy.domain.offers import Offer
from cavvy.providers.base import GangSpec, NodeEndpoint, Refused
from cavvy.providers.hosts.userdata import MetadataService, make_user_data

# The number of the worker. Google's own programs read it there, such as Ray's and PyTorch/XLA's
# (https://github.com/pytorch/xla), on 2026-11-23.
_WORKER = "http://169.254.169.254/computeMetadata/v1/instance/attributes/agent-worker-number"


def first_rank(rank: int, hosts: int) -> int:
    """Return the first rank of the slice that contains this rank."""
    return rank - rank % hosts


def rename(name: str, step: int) -> str:
    """Return the name of the machine whose rank is higher by `step` than the rank in `name`. See
    `vm.records` for names.
    """
    head, rank, count = name.rsplit("-", 2)
    return f"{head}-{int(rank) + step}-{count}"


def slice_name(name: str, hosts: int) -> str:
    """Return the name of the slice to which the machine with this name belongs."""
    rank = int(name.rsplit("-", 2)[1])
    return rename(name, first_rank(rank, hosts) - rank)


def locate(offer: Offer, rank: int) -> MetadataService:
    """Return the metadata URL from which a host reads its rank, or, for a slice of one host, the
    rank itself.
    """
    if offer.hosts == 1:
        return MetadataService(rank=rank, address="")
    return MetadataService(
        rank=_WORKER,
        first_rank=first_rank(rank, offer.hosts),
        address="",
        headers={"Metadata-Flavor": "Google"},
    )


class ScriptMaker:
    """Builds the script of a slice. All hosts of a slice run this script."""

    def __init__(self, node_endpoint: NodeEndpoint | None) -> None:
        self._node_endpoint = node_endpoint

    async def __call__(self, gang: GangSpec, rank: int) -> str:
        if self._node_endpoint is None:
            raise Refused("hosts of TPUs must connect to the server; set `server.tls_listen`")
        metadata = locate(gang.offer, rank)
        return await asyncio.to_thread(make_user_data, gang, self._node_endpoint, metadata)
