"""Handles machines with several hosts that are rented together, such as slices of TPUs: requests a
node for each host, rejects offers if the task's nodes do not use whole machines, and describes the
hosts to users.
"""

from cavvy.catalog.needs import NeedError, parse_accelerator
from cavvy.catalog.tpu_slices import find_requested, find_slice, spread_slices
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import format_rate
from cavvy.domain.values import replace


def explain_slice(task: TaskSpec, offer: Offer) -> Objection | None:
    """Return an objection if the task's number of nodes does not fill whole machines of the offer;
    otherwise return None. A machine, such as a slice of TPUs, may have several hosts.
    """
    if task.nodes % offer.hosts == 0:
        return None
    return Objection(
        "nodes",
        f"{offer.instance_type} has {offer.hosts} hosts, which are rented together; set `nodes` "
        f"to {offer.hosts} or a multiple of {offer.hosts}",
    )


def spread_task(task: TaskSpec) -> TaskSpec:
    """Return the task with one node for each host, if each node of the task stands for a TPU slice
    that has several hosts. Otherwise return the task unchanged.
    """
    found = spread_slices(task.resources)
    if found.hosts == 1:
        return task
    work = task.work and replace(task.work, measured_on=_spread_device(task.work.measured_on))
    return replace(task, resources=found.needs, nodes=task.nodes * found.hosts, work=work)


def _spread_device(measured_on: str | None) -> str | None:
    """If `measured_on` is a whole slice, such as TPU-v5e:16, return the accelerators of one of its
    nodes, such as TPU-v5e:4. Return other values unchanged.
    """
    try:
        needs = parse_accelerator(measured_on) if measured_on else ()
    except NeedError:  # CPUs
        needs = ()
    kind = find_requested(needs[0]) if len(needs) == 1 else None
    return f"{kind.accelerator}:{kind.chips // kind.hosts}" if kind else measured_on


def describe_slice(task: TaskSpec) -> str:
    """Describe the slices whose hosts are the task's nodes, such as "the 4 hosts of a TPU slice
    v5litepod-16 (16 chips)". The result is "" if the task does not name a slice of several hosts.
    """
    kinds = [find_slice(each.instance or "") for each in task.resources.choices]
    known = [each for each in kinds if each is not None and each.hosts > 1]
    if len(known) < len(kinds) or len({each.hosts for each in known}) != 1:
        return ""
    hosts, count = known[0].hosts, task.nodes // known[0].hosts
    names = " or ".join(f"{each.type} ({each.chips} chips)" for each in known)
    if count == 1:
        return f"the {hosts} hosts of a TPU slice {names}"
    return f"the hosts of {count} TPU slices {names}, {hosts} hosts each"


def note_slice(offer: Offer) -> str:
    """Return a note about an offer of a host that is rented together with other hosts; "" for other
    offers.
    """
    if offer.hosts == 1:
        return ""
    chips = offer.accelerator_count * offer.hosts
    return (
        f"a host of a slice of {chips} {offer.accelerator} chips; the slice's {offer.hosts} hosts "
        f"are nodes and cost {format_rate(offer.rate.times(offer.hosts))} together"
    )
