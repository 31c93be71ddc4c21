"""Selects the address that the agent of a task polls for the notice that its instance will be
reclaimed."""

from collections.abc import Sequence

from cavvy.domain.offers import Purchase
from cavvy.providers.aws.manifest import NOTICES
from cavvy.providers.base import GangSpec
from cavvy.providers.notices import NoticeSource

_FARGATE = frozenset(
    {"FARGATE", "FARGATE_SPOT"}
)  # other capacity providers cannot have these names


def list_notices(gang: GangSpec) -> Sequence[NoticeSource]:
    """Return EC2's notice sources for tasks on spot instances, and () for other tasks. Tasks on
    spot instances use the network of their instance, so the tasks can read the instance's metadata.
    On Fargate Spot, a task gets SIGTERM instead of a notice.
    """
    offer = gang.offer
    spot = offer.purchase is Purchase.SPOT and offer.zone not in _FARGATE
    return NOTICES if spot else ()
