"""Selects the address that the agent of a job polls for the notice that its instance will be
reclaimed."""

from collections.abc import Sequence

from cavvy.domain.offers import Purchase
from cavvy.providers.aws.manifest import NOTICES
from cavvy.providers.base import GangSpec
from cavvy.providers.notices import NoticeSource


def list_notices(gang: GangSpec) -> Sequence[NoticeSource]:
    """Return EC2's notice sources for jobs on spot instances, or () for other jobs. Jobs on spot
    instances have one node and use the network of their instance, so these jobs can read the
    instance's metadata:
    https://docs.aws.amazon.com/batch/latest/userguide/networking-modes-jobs.html
    """
    return NOTICES if gang.offer.purchase is Purchase.SPOT else ()
