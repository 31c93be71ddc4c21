"""Builds the configuration of each rank's agent on this machine, and lists the environment
variables that agents inherit.
"""

from collections.abc import Sequence
from pathlib import Path

from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, NoCapacity
from cavvy.providers.hosts.configs import HostAgentConfig
from cavvy.providers.hosts.fleet.machines import list_shapes
from cavvy.providers.hosts.fleet.placing import AgentRoute, hold_devices, make_config
from cavvy.providers.hosts.machine import ThisMachine
from cavvy.providers.hosts.models import instance_type
from cavvy.providers.hosts.supervisor import service
from cavvy.providers.local.offers import PROVIDER, make_host

# The variables of the server's environment that agents inherit. Other variables may hold secrets.
KEPT = service.KEPT | {"CONTAINER_HOST"}


def make_configs(
    gang: GangSpec,
    machine: ThisMachine,
    home: Path,
    hides: str = "",
    *,
    covers: bool = False,
    separates: bool = False,
) -> Sequence[HostAgentConfig]:
    """Return one configuration for each rank. `hides` is the path of a folder that the work must
    not be able to read. `covers` states whether this machine can use namespaces to hide the folder.
    `separates` states whether the namespaces also separate the work from all processes outside of
    the work. Raises NoCapacity if the offer or an allocation does not fit this machine.
    """
    host = make_host(machine)
    if gang.offer.provider != PROVIDER or gang.offer.region != machine.hostname:
        raise NoCapacity(
            f"{gang.offer.key}: this machine, which is now {host.name}, has no such offer"
        )
    if gang.offer.instance_type not in {instance_type(m) for m, _ in list_shapes(machine)}:
        raise NoCapacity(f"{gang.offer.instance_type}: this machine has no such accelerator")
    allocations = {allocation.rank: allocation for allocation in gang.allocations}
    route = AgentRoute(address=gang.agent_endpoint.address, token=gang.agent_endpoint.token)
    folder, cache = home / "gangs" / gang.name, str(home / "cache")
    private = home / "agents" / gang.name
    return [
        replace(
            make_config(
                gang,
                hold_devices(rank, allocations.get(rank), machine, "this machine", "127.0.0.1"),
                route,
                str(folder / str(rank)),
                cache,
                str(private / str(rank)),
            ),
            hides=hides,
            covers=covers,
            separates=separates,
        )
        for rank in range(gang.nodes)
    ]
