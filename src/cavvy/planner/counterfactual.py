"""Estimates what a finished run would have cost on other offers. If the task states its work, the
measured time is multiplied by the ratio of the estimated times on the two offers.
"""

from collections.abc import Iterable
from datetime import timedelta

from cavvy.catalog.tables import find_architecture
from cavvy.costs.counterfactual import CounterfactualCost, price_counterfactuals
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.planner.work import MACHINE_START, estimate, shape_of

# Memory for the operating system and the agent, in addition to the memory for the work. The value
# is about the smallest size that the images of cloud providers require.
SYSTEM_MIB = 1024


def compare_counterfactuals(
    task: TaskSpec, ran: timedelta, here: Offer, offers: Iterable[Offer], *, count: int = 3
) -> list[CounterfactualCost]:
    """Return the `count` offers on which a past run would have cost least. This run took the time
    `ran` on the offer `here`.

    If the task's stated work gives an estimated time for both offers, the measured time is
    multiplied by the ratio of the two estimates. An error in the stated work, such as a wrong
    efficiency, changes both estimates by the same factor, so it does not change their ratio. If an
    estimated time is missing, the run is assumed to take the same time on both offers. Each result
    states whether its time was multiplied by this ratio or is the measured time itself. Offers
    whose CPUs have a different architecture from the run's CPUs are left out.
    """
    own = find_architecture(here)
    at_hand = [offer for offer in offers if find_architecture(offer) == own]
    expected_here = estimate(task, here).run_time
    ratios: dict[tuple[object, ...], float | None] = {}
    lengths: dict[str, timedelta] = {}
    for offer in at_hand if expected_here else ():
        shape = shape_of(offer, task)
        if shape not in ratios:
            there = estimate(task, offer).run_time
            ratios[shape] = None if there is None or not expected_here else there / expected_here
        ratio = ratios[shape]
        if ratio is not None and ratio != 1:
            lengths[offer.key] = ran * ratio
    return price_counterfactuals(
        at_hand, nodes=task.nodes, ran=ran, start=MACHINE_START, lengths=lengths, count=count
    )
