"""The cost that a finished run would have had on other offers, with its time scaled by the stated
work if possible.
"""

from collections.abc import Iterable
from datetime import timedelta

from cavvy.costs.counterfactual import CounterfactualCost, price_counterfactuals
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.planner.work import MACHINE_START, estimate, shape_of


def compare_counterfactuals(
    task: Task, ran: timedelta, here: Offer, offers: Iterable[Offer], *, count: int = 3
) -> list[CounterfactualCost]:
    """The cheapest `count` of `offers`, as if the run, measured as `ran` on `here`, had been there.

    If the task's work gives a time for both offers, the measured time is scaled by their ratio, so
    that errors in the stated work, such as its efficiency, cancel out. Otherwise the same time is
    assumed. Each line says which.
    """
    at_hand = list(offers)
    expected_here = estimate(task, here).run_time
    ratios: dict[tuple[object, ...], float | None] = {}
    lengths: dict[str, timedelta] = {}
    for offer in at_hand if expected_here else ():
        shape = shape_of(offer)
        if shape not in ratios:
            there = estimate(task, offer).run_time
            ratios[shape] = None if there is None or not expected_here else there / expected_here
        ratio = ratios[shape]
        if ratio is not None and ratio != 1:
            lengths[offer.key] = ran * ratio
    return price_counterfactuals(
        at_hand, nodes=task.nodes, ran=ran, start=MACHINE_START, lengths=lengths, count=count
    )
