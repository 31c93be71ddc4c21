"""Finds network interfaces and public addresses that a failed creation has left without a machine:
Azure bills a public address that nothing uses.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.providers.azure.account import AzureAccount
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.records import INSTALLATION

INTERFACES = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
# An address belongs to an interface or to a NAT gateway, and an interface to a machine or to a
# private endpoint; the fields say to which.
_USED_BY = {
    INTERFACES: ("virtualMachine", "privateEndpoint"),
    ADDRESSES: ("ipConfiguration", "natGateway"),
}
# Azure makes the interface before the machine. A creation takes less than this time.
_EVERY = timedelta(minutes=10)


class AzureLeftovers:
    """Looks every ten minutes, and deletes what two looks in turn have shown without a machine.
    Looks only at parts whose tag has the installation's mark.
    """

    def __init__(self, account: AzureAccount, mark: str, now: Callable[[], datetime]) -> None:
        self._account, self._mark, self._now = account, mark, now
        self._next: datetime | None = None
        self._unused: set[tuple[str, str]] = set()  # type and name, of the last check

    async def sweep(self) -> None:
        """Check if the last check is ten minutes old. Raises CloudFault, Refused."""
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
        for kind, name in sorted(late):  # interfaces first: they use the addresses
            with suppress(CloudFault):  # the next check tries again
                await self._account.delete(kind, name)
