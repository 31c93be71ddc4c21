"""Selects which offer of a shared host a task may use, and checks whether the task fits on the
host.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.scheduler.packing import AllocationOwner, allocate_across, host_of, hosts_of


def smallest_shares(task: TaskSpec, offers: Iterable[Offer], hosts: Sequence[Host]) -> list[Offer]:
    """For each shared host, keep only the offer with the fewest devices. Offers of machines that
    are not shared hosts are all kept.

    A shared host has one offer for each number of devices. If all offers were kept, a task that
    needs two devices could receive eight devices. The offers of a group of `hosts` are left out for
    a task with one node, because each host of the group has its own offers.
    """
    kept: list[Offer] = []
    shared: list[Offer] = []
    for offer in offers:
        if offer.shared and task.nodes == 1 and _is_group(offer, hosts):
            continue
        (shared if offer.shared else kept).append(offer)

    def place(offer: Offer) -> tuple[str, ...]:
        kind = (offer.instance_type,) if task.resources.accelerators else ()
        return (offer.provider, offer.region, offer.zone or "", *kind)

    for _, group in groupby(
        sorted(shared, key=lambda offer: (*place(offer), offer.accelerator_count)), key=place
    ):
        kept.append(next(group))
    return kept


def _is_group(offer: Offer, hosts: Sequence[Host]) -> bool:
    return host_of(offer, hosts) is None and bool(hosts_of(offer, hosts))


def fits_empty(task: TaskSpec, offer: Offer, hosts: Sequence[Host]) -> bool:
    """Return whether all nodes of the task would fit on the offer's hosts at the same time if the
    hosts were idle.
    """
    return (
        allocate_across(task, offer, hosts, (), AllocationOwner(gang="", project=task.project))
        is not None
    )
