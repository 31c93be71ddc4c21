"""Checks that an allocation fits on its host together with the existing allocations. The store
checks each allocation inside the transaction that writes the allocation.
"""

from collections.abc import Iterable

from cavvy.domain.allocations import Allocation, Host
from cavvy.store.base import AllocationConflict, RowNotFound

_CPU_SLACK = 1e-6  # sums of tenths of a CPU are not exact in floating point


def check_allocation(
    host: Host | None, allocation: Allocation, others: Iterable[Allocation]
) -> None:
    """Check that the allocation fits on its host in addition to `others`, the current allocations.
    Allocations on other hosts are ignored.

    Raises RowNotFound if `host` is None. Raises AllocationConflict if a device is in use or
    unknown, or if the host has too few CPUs or too little memory.
    """
    if host is None:
        raise RowNotFound(f"no host {allocation.host}")
    if unknown := set(allocation.devices) - set(host.devices):
        raise AllocationConflict(f"host {host.name} has no device {', '.join(sorted(unknown))}")
    if len(set(allocation.devices)) != len(allocation.devices):
        raise AllocationConflict(f"gang {allocation.gang} names a device of host {host.name} twice")
    cpus, memory_mib = allocation.cpus, allocation.memory_mib
    for other in others:
        if (other.gang, other.rank) == (allocation.gang, allocation.rank):
            raise AllocationConflict(
                f"rank {allocation.rank} of gang {allocation.gang} already has an allocation"
            )
        if other.host != host.name:
            continue
        cpus += other.cpus
        memory_mib += other.memory_mib
        if taken := set(allocation.devices) & set(other.devices):
            raise AllocationConflict(
                f"gang {other.gang} holds {', '.join(sorted(taken))} of host {host.name}"
            )
    if cpus > host.cpus + _CPU_SLACK:
        raise AllocationConflict(
            f"host {host.name} has {host.cpus:g} CPUs, but {cpus:g} would be used"
        )
    if memory_mib > host.memory_mib:
        raise AllocationConflict(
            f"host {host.name} has {host.memory_mib} MiB of memory, but {memory_mib} would be used"
        )
