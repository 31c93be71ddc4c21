"""Builds a task's container for services that expect CPUs and memory, not an instance type."""

from cavvy.domain.tasks import TaskSpec, Volume, VolumeKind
from cavvy.domain.values import Struct
from cavvy.providers.batch.export import list_variables
from cavvy.providers.formats.machines import Machine, count_accelerators

# The assumed part of a machine's memory that a container can use. The system and the service's
# agent need the rest.
_USABLE_MEMORY = 0.9


class ContainerSize(Struct, frozen=True, kw_only=True):
    """The resources that a container reserves on its machine."""

    cpus: int
    memory_mib: int
    accelerators: int


def choose_size(task: TaskSpec, machine: Machine | None) -> ContainerSize:
    """Return the CPUs, memory and accelerators that the container reserves. A task that requests
    accelerators or an instance type gets the machine's CPUs and memory by default. All other tasks
    get one CPU by default, and 2 GiB of memory for each CPU.
    """
    need = task.resources
    offer = machine.offer if machine else None
    whole = offer is not None and bool(need.accelerators or need.instance)
    cpus = round(need.cpus_min or (offer.vcpus if offer and whole else 1)) or 1
    memory = need.least_memory_mib(cpus)
    if not memory:
        memory = int(offer.memory_mib * _USABLE_MEMORY) if offer and whole else 2048 * cpus
    count = machine.accelerators if machine and whole else count_accelerators(need)
    return ContainerSize(cpus=cpus, memory_mib=memory, accelerators=count)


def list_container_variables(task: TaskSpec, accelerators: int) -> dict[str, str]:
    """Return the environment variables of a container, except the variables for the rank and the
    addresses.
    """
    return {**list_variables(task, task.nodes), "NPROC_PER_NODE": str(accelerators or 1)}


def list_host_volumes(task: TaskSpec) -> list[Volume]:
    """Return the task's volumes that mount a folder of the machine at an absolute path."""
    return [
        each for each in task.volumes if each.kind is VolumeKind.HOST and each.path.startswith("/")
    ]


# Lines of a program for a job with one node.
ALONE = ("export MASTER_ADDR=127.0.0.1 NODE_RANK=0 CAVVY_HOSTS=127.0.0.1",)
