"""Removes the definitions of jobs from AWS Batch and ECS, which need one for each job. Definitions
cost nothing, so failed calls are ignored.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from cavvy.providers.managed.aws import AwsService
from cavvy.providers.vm.cloud import CloudFault

# Maximum definitions that one poll removes, because each takes a separate call and polls must be
# quick. ECS deletes at most as many in one call:
# https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_DeleteTaskDefinitions.html
_MOST_REMOVED = 10


class JobDefinitions:
    """The definitions of one service. `kind` is "job" or "task". If `deletes` is set, the service
    keeps deregistered definitions until they are deleted.
    """

    def __init__(self, aws: AwsService, kind: str, *, deletes: bool = False) -> None:
        self._aws, self._kind, self._deletes = aws, kind, deletes
        # the names of unused definitions, in the order of the ends of their jobs
        self._unused: dict[str, None] = {}

    def retire(self, newest: str) -> None:
        """Remove the definition of an ended job, and its earlier revisions, in later polls."""
        self._unused |= dict.fromkeys(list_revisions(newest))

    async def tidy(self, region: str) -> None:
        """Remove some of the unused definitions."""
        some = list(islice(self._unused, _MOST_REMOVED))
        for each in some:
            del self._unused[each]
        await self.remove(region, some)

    async def remove(self, region: str, definitions: Sequence[str]) -> None:
        """Remove the given definitions, of jobs that have ended or were not started."""
        inactive = []
        for each in definitions:
            named: Mapping[str, Any] = {f"{self._kind}Definition": each}
            with suppress(CloudFault):
                await self._aws.call(region, f"deregister_{self._kind}_definition", **named)
                inactive.append(each)
        if inactive and self._deletes:
            gone: Mapping[str, Any] = {f"{self._kind}Definitions": inactive}
            with suppress(CloudFault):
                await self._aws.call(region, f"delete_{self._kind}_definitions", **gone)


def list_revisions(newest: str) -> Sequence[str]:
    """Return a definition and its earlier revisions, which repeated requests created."""
    name, _, number = newest.rpartition(":")
    return [f"{name}:{revision}" for revision in range(1, int(number) + 1)]
