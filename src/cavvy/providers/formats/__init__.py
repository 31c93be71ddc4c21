"""Job formats of managed services: `cavvy export` writes a task as a request to the service.

Each module in `services` is one format. It reads the values for a request from a task, and builds
the request from these values. Providers build their requests with the same functions.
A format chooses the instance type of an exported task with `choose_machine`.
"""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import Refused
from cavvy.providers.formats import services

# Returns the catalog's offers for one node, the cheapest first: this many, or None for all.
FindOffers = Callable[[ResourceSpec, int | None], Sequence[Offer]]
_FIRST = 2000  # offers to look at before all of a cloud, of which there are tens of thousands


class JobFormat(Struct, frozen=True, kw_only=True):
    """The job format of one service.

    `write` returns the text for a task. `write` raises Refused if the service cannot run the task.
    """

    title: str
    write: Callable[[TaskSpec, FindOffers], str]


def list_formats() -> Sequence[str]:
    """Return the names of all formats, such as `aws-batch`."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(services.__path__))


def find_format(name: str) -> JobFormat | None:
    """Import the format with this name; return None if no such format exists."""
    if name not in list_formats():
        return None
    module = import_module(f"{services.__name__}.{name.replace('-', '_')}")
    found: JobFormat = module.FORMAT
    return found


# Families of EC2 with accelerators that are not NVIDIA's GPUs, and Macs.
_NOT_NVIDIA = ("trn", "inf", "dl", "f1", "f2", "vt", "mac", "g4ad")
_GRAVITON = re.compile(r"(a1|[a-z]+\d+g[a-z]*|hpc7g|hpc6g)")
# Series from https://learn.microsoft.com/azure/machine-learning/concept-compute-target
_AZURE_TYPE = re.compile(r"Standard_(DS?\d+_v2|D\d+s?_v3|D\d+ds_v4|E\d+s?_v3|F\d+s_v2|N[CD]\d+\w*)")


class Machine(Struct, frozen=True, kw_only=True):
    """An instance type. `offer` is the cloud's offer of this type, or None if the task names a type
    that is not in the catalog.
    """

    instance_type: str  # the cloud's name of the type
    accelerators: int
    offer: Offer | None


def choose_machine(
    task: TaskSpec,
    find_offers: FindOffers,
    cloud: str,
    service: str,
    is_supported: Callable[[str], bool],
) -> Machine:
    """Return a cloud's cheapest instance type that fits the task and that the service supports.
    Types are compared by the prices of the cloud's machines, because the service's prices are
    proportional to these prices. If the task names an instance type, that type is used. Raises
    Refused.
    """
    need = task.resources
    found = [
        machine
        for each in need.choices
        if (machine := _choose(each, find_offers, cloud, is_supported))
    ]
    if found and need.ordered:
        return found[0]
    if found:
        return min(found, key=lambda each: each.offer.rate.micros_per_hour if each.offer else 0)
    raise Refused(
        f"no instance type of {service} fits the task's resources; "
        "change the resources, or name a type as resources.instance"
    )


def count_accelerators(need: ResourceSpec) -> int:
    """Return the accelerators that the task requests for each node."""
    return need.accelerators[0].count_min if need.accelerators else 0


def is_ec2_container_type(instance_type: str) -> bool:
    """Return whether AWS's container services can run a container on this EC2 instance type. The
    type must have NVIDIA's GPUs or no accelerators, because these services can reserve only
    NVIDIA's GPUs. The type's CPU must not be Graviton, because few images are built for Graviton.
    """
    family = instance_type.partition(".")[0]
    return not family.startswith(_NOT_NVIDIA) and not _GRAVITON.fullmatch(family)


def is_azure_type(instance_type: str) -> bool:
    """Return whether Azure's job services support the series of this Azure instance type."""
    return _AZURE_TYPE.fullmatch(instance_type) is not None


def list_types(
    task: TaskSpec, find_offers: FindOffers, cloud: str, is_supported: Callable[[str], bool]
) -> list[str]:
    """Return all instance types that fit the task and are supported by the service. If the task
    names a type, only that type is returned.
    """
    found = {
        each.instance_type
        for need in task.resources.choices
        for each in _list_offers(need, find_offers, cloud, is_supported)
    }
    named = {need.instance for need in task.resources.choices if need.instance}
    return sorted(found | named)


def _choose(
    need: ResourceSpec, find_offers: FindOffers, cloud: str, is_supported: Callable[[str], bool]
) -> Machine | None:
    for limit in (_FIRST, None):
        if offers := _list_offers(need, find_offers, cloud, is_supported, limit):
            best = offers[0]
            return Machine(
                instance_type=best.instance_type, accelerators=best.accelerator_count, offer=best
            )
    if need.instance is None:
        return None
    return Machine(instance_type=need.instance, accelerators=count_accelerators(need), offer=None)


def _list_offers(
    need: ResourceSpec,
    find_offers: FindOffers,
    cloud: str,
    is_supported: Callable[[str], bool],
    limit: int | None = None,
) -> list[Offer]:
    # The catalog's regions and prices are not those of the service, so the region and the maximum
    # price of the task are ignored.
    wanted = replace(
        need, providers=(cloud,), regions=(), max_rate=None, any_of=(), disk_gib=None, network=None
    )
    return [
        each
        for each in find_offers(wanted, limit)
        if each.accelerator_part == 1 and is_supported(each.instance_type)
    ]
