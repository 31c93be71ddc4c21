"""Deletes network interfaces and public addresses that remain after a failed creation of a machine.
Azure bills a public address even if nothing uses it.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.providers.azure.account import AzureAccount
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.records import INSTALLATION

INTERFACES = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
# An address belongs to an interface or a NAT gateway. An interface belongs to a machine or a
# private endpoint. These fields contain the owner.
_USED_BY = {
    INTERFACES: ("virtualMachine", "privateEndpoint"),
    ADDRESSES: ("ipConfiguration", "natGateway"),
}
# The time between two checks. This time is longer than a creation takes, because Azure makes the
# interface before the machine.
_EVERY = timedelta(minutes=10)


class AzureLeftovers:
    """Deletes network interfaces and addresses that belonged to no machine in two successive
    checks, ten minutes apart. Checks only interfaces and addresses with the installation's tag.
    """

    def __init__(self, account: AzureAccount, mark: str, now: Callable[[], datetime]) -> None:
        self._account, self._mark, self._now = account, mark, now
        self._next: datetime | None = None
        # (type, name) of the unused parts that the last check found
        self._unused: set[tuple[str, str]] = set()

    async def sweep(self) -> None:
        """Run the check, unless the last check was less than ten minutes ago. Raises CloudFault,
        Refused.
        """
        now = self._now()
        if self._next is not None and now < self._next:
            return
        self._next = now + _EVERY
        found = {
            (kind, str(each["name"]))
            for kind, fields in _USED_BY.items()
            for each in await self._account.resources(kind)
            if (each.get("tags") or {}).get(INSTALLATION) == self._mark
            and not any((each.get("properties") or {}).get(field) for field in fields)
        }
        late, self._unused = found & self._unused, found
        # interfaces are deleted first, because they use the addresses
        for kind, name in sorted(late):
            with suppress(CloudFault):  # the next check tries again
                await self._account.delete(kind, name)
