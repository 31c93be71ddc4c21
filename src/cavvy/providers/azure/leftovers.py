"""Finds network interfaces and public addresses that a failed creation has left without a machine:
Azure bills a public address that nothing uses.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.providers.azure.account import AzureAccount
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault
from cavvy.providers.vm.rest import Json

INTERFACES = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
# The field of an interface that names its machine, and of an address that names its interface.
_USED_BY = {INTERFACES: "virtualMachine", ADDRESSES: "ipConfiguration"}
# The pause between two checks. Azure makes the interface before the machine; a creation takes less
# than this time.
_EVERY = timedelta(minutes=10)


class AzureLeftovers:
    """Checks every ten minutes, and deletes interfaces and addresses that two successive checks
    have found unused.
    """

    def __init__(self, account: AzureAccount, now: Callable[[], datetime]) -> None:
        self._account, self._now = account, now
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
            for kind, field in _USED_BY.items()
            for each in await self._account.resources(kind)
            if _is_unused(each, field)
        }
        late, self._unused = found & self._unused, found
        for kind, name in sorted(late):  # interfaces first: they use the addresses
            with suppress(CloudFault):  # the next check tries again
                await self._account.delete(kind, name)


def _is_unused(told: Json, field: str) -> bool:
    properties = told.get("properties") or {}
    return str(told.get("name")).startswith(NAME_PREFIX) and not properties.get(field)
