"""Calls AWS's managed services, with the account and the regions from the settings. Errors of the
calls are raised as `CloudFault`s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.providers.aws.account import AwsAccount, Json, camel
from cavvy.providers.aws.errors import LATER, AwsFault, translate
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.rest import RECORDER

_NO_REPLY = "Unreachable"
_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "UnrecognizedClientException"})
_MOST_PAGES = 500


class AwsService:
    """One of AWS's services. `gone` are the codes of faults that mean "no such object"."""

    def __init__(
        self,
        service: str,
        settings: Mapping[str, Scalar],
        account: AwsAccount | None,
        *,
        gone: frozenset[str],
        provider: str,
    ) -> None:
        """If `account` is None, the settings of the provider select the account."""
        self._service, self._settings, self._gone = service, settings, gone
        self._provider = provider
        self._account = account or AwsAccount(settings, provider=provider)

    async def regions(self) -> Sequence[str]:
        """Return the regions in the settings, or the region of the AWS configuration. Raises
        Refused."""
        return list_setting(self._settings, "regions") or await self._account.regions()

    async def only_region(self, holds: str) -> str:
        """Return the one region, in which the objects named by `holds` are, such as "queues".
        Raises Refused.
        """
        found = await self.regions()
        if len(found) != 1:
            table = f"[providers.{self._provider}]"
            raise Refused(f"{table} regions: name only the region of the {holds}")
        return found[0]

    async def check_region(self, region: str) -> None:
        """Raise Refused if the region is not one of `regions`, because Cavvy would never list
        objects that it creates in such a region.
        """
        if region not in await self.regions():
            raise Refused(f"the region {region} is not among the `regions` of the settings")

    async def call(
        self, region: str, operation: str, *, service: str = "", **arguments: Any
    ) -> Json:
        """Call an operation, such as "create_training_job". Raises CloudFault, or Refused if no
        credentials exist.
        """
        name = service or self._service
        self._account.recorder = RECORDER.get()
        try:
            return await self._account.call(region, operation, service=name, **arguments)
        except AwsFault as fault:
            if fault.status == 0 and fault.code != _NO_REPLY:
                raise translate(fault, f"{camel(operation)} in {region}") from fault
            raise CloudFault(self._status(fault), fault.code, fault.message) from fault

    async def pages(
        self, region: str, operation: str, field: str, token: str = "NextToken", **arguments: Any
    ) -> Sequence[Any]:
        """Return the items of all pages of a list; `token` is the name of the page token in
        replies."""
        found: list[Any] = []
        asked = token if token[0].isupper() else "nextToken"
        for _ in range(_MOST_PAGES):
            told = await self.call(region, operation, **arguments)
            found += told.get(field, [])
            if not told.get(token):
                return found
            arguments[asked] = told[token]
        raise CloudFault(400, "too many pages", f"{camel(operation)} in {region}")

    def _status(self, fault: AwsFault) -> int:
        """Return the HTTP status by which the package `vm` identifies the kind of a fault. AWS
        itself uses the status 400 for most errors.
        """
        if fault.code == _NO_REPLY:
            return 0
        if fault.status >= 500:
            return fault.status
        if fault.code in LATER:
            return 429
        if fault.code in self._gone:
            return 404
        return 403 if fault.code in _DENIED else fault.status
