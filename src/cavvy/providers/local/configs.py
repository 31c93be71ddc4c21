"""What agents on this machine are started with: one configuration for each rank, and a clean
environment.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cavvy.domain.allocations import Allocation
from cavvy.providers.base import GangSpec, NoCapacity
from cavvy.providers.hosts.configs import HostAgentConfig
from cavvy.providers.hosts.devices import HostDevice
from cavvy.providers.hosts.machine import ThisMachine
from cavvy.providers.hosts.models import count_models, instance_type
from cavvy.providers.local.offers import PROVIDER, make_host

# What of the server's environment an agent gets; the rest, secrets among it, is not the job's
# business.
KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
        *(
            "XDG_RUNTIME_DIR",
            "DBUS_SESSION_BUS_ADDRESS",
            "DOCKER_HOST",
            "CONTAINER_HOST",
        ),  # container engines
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    }
)


def make_configs(gang: GangSpec, machine: ThisMachine, home: Path) -> Sequence[HostAgentConfig]:
    """One configuration for each rank. Raises NoCapacity where the offer or a hold does not fit
    this machine.
    """
    host = make_host(machine)
    if gang.offer.provider != PROVIDER or gang.offer.region != machine.hostname:
        raise NoCapacity(
            f"{gang.offer.key}: not an offer of this machine, which is {host.name} now"
        )
    if gang.offer.instance_type not in {
        instance_type(None),
        *(instance_type(m) for m in count_models(machine)),
    }:
        raise NoCapacity(f"{gang.offer.instance_type}: no such accelerator on this machine")
    allocations = {allocation.rank: allocation for allocation in gang.allocations}
    known = {device.id: device for device in machine.devices}
    return [_config(gang, rank, allocations.get(rank), known, home) for rank in range(gang.nodes)]


def _config(
    gang: GangSpec,
    rank: int,
    allocation: Allocation | None,
    known: Mapping[str, HostDevice],
    home: Path,
) -> HostAgentConfig:
    missing = [name for name in (allocation.devices if allocation else ()) if name not in known]
    if missing:
        raise NoCapacity(f"{', '.join(missing)}: no such accelerator on this machine any more")
    devices = [known[name] for name in (allocation.devices if allocation else ())]
    vendors = [device.vendor for device in (devices or known.values())]
    return HostAgentConfig(
        gang=gang.name,
        rank=rank,
        address=gang.agent_endpoint.address,
        token=gang.agent_endpoint.token,
        home=str(home / "gangs" / gang.name / str(rank)),
        cache=str(home / "cache"),
        lease_s=gang.lease.total_seconds(),
        grace_s=gang.grace.total_seconds(),
        devices=[device.id for device in devices],
        device_indices=[device.index for device in devices],
        vendor=vendors[0] if vendors else None,
        cpus=allocation.cpus if allocation else None,
        memory_mib=allocation.memory_mib if allocation else None,
    )
