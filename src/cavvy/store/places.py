"""Whether a hold fits its host beside the others; both stores ask it inside their transaction."""

from collections.abc import Iterable

from cavvy.domain.places import Hold, Host
from cavvy.store.base import Held, NotFound

_CPU_SLACK = 1e-6  # sums of tenths of a CPU are not exact in floating point


def check_hold(host: Host | None, hold: Hold, others: Iterable[Hold]) -> None:
    """Pass if the hold fits among `others` (all those that stand; other hosts' are ignored).

    Raises NotFound without a host, Held where a device is taken or unknown, or CPUs or memory do
    not suffice.
    """
    if host is None:
        raise NotFound(f"no host {hold.host}")
    if unknown := set(hold.devices) - set(host.devices):
        raise Held(f"host {host.name} has no device {', '.join(sorted(unknown))}")
    if len(set(hold.devices)) != len(hold.devices):
        raise Held(f"gang {hold.gang} names a device of host {host.name} twice")
    cpus, memory_mib = hold.cpus, hold.memory_mib
    for other in others:
        if (other.gang, other.rank) == (hold.gang, hold.rank):
            raise Held(f"rank {hold.rank} of gang {hold.gang} has its hold already")
        if other.host != host.name:
            continue
        cpus += other.cpus
        memory_mib += other.memory_mib
        if taken := set(hold.devices) & set(other.devices):
            raise Held(f"gang {other.gang} holds {', '.join(sorted(taken))} of host {host.name}")
    if cpus > host.cpus + _CPU_SLACK:
        raise Held(f"host {host.name} has {host.cpus:g} CPUs, {cpus:g} would be held")
    if memory_mib > host.memory_mib:
        raise Held(
            f"host {host.name} has {host.memory_mib} MiB of memory, {memory_mib} would be held"
        )
