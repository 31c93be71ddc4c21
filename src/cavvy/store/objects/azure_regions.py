"""Finds the region of an Azure storage account. The storage itself does not report its region, so
Azure Resource Manager is queried with a service principal:
https://learn.microsoft.com/rest/api/storagerp/storage-accounts/list and
https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from cavvy.domain.values import Struct
from cavvy.http_client import HttpReply, NoReply
from cavvy.store.objects.base import ObjectDenied, ObjectMissing
from cavvy.store.objects.http import ask

# the variables of Azure's own libraries, and the subscription of the account
KEYS = (
    "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_SUBSCRIPTION_ID",
)
_VERSION = "2023-05-01"
_MOST_PAGES = 100


class AzureDirectory(Struct, frozen=True, kw_only=True):
    """The two Azure services that are queried."""

    login: str = "https://login.microsoftonline.com"
    manager: str = "https://management.azure.com"

    def find_region(self, account: str, keys: Mapping[str, str]) -> str:
        """Return the region of the account, such as `westeurope`. Raises ObjectError."""
        tenant, client, secret, subscription = (keys.get(name, "") for name in KEYS)
        if not all((tenant, client, secret, subscription)):
            raise ObjectDenied(
                "Azure reports the region of a container only to a service principal that may "
                f"read the account {account}: set {', '.join(KEYS)}"
            )
        token = self._log_in(tenant, client, secret)
        url = (
            f"{self.manager}/subscriptions/{quote(subscription, safe='')}/providers/"
            f"Microsoft.Storage/storageAccounts?api-version={_VERSION}"
        )
        for _ in range(_MOST_PAGES):
            told = _read(ask("GET", url, headers={"Authorization": f"Bearer {token}"}))
            for each in told.get("value") or ():
                if str(each.get("name", "")).lower() == account.lower():
                    return str(each["location"]).replace(" ", "").lower()
            url = str(told.get("nextLink") or "")
            if not url:
                break
            if not url.startswith(f"{self.manager}/"):  # the token must not be sent elsewhere
                raise ObjectDenied("Azure named another server for the next page of accounts")
        raise ObjectMissing(
            f"the subscription {subscription} has no storage account {account} that the service "
            "principal may read"
        )

    def _log_in(self, tenant: str, client: str, secret: str) -> str:
        asked = {
            "grant_type": "client_credentials",
            "client_id": client,
            "client_secret": secret,
            "scope": "https://management.azure.com/.default",
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        url = f"{self.login}/{quote(tenant, safe='')}/oauth2/v2.0/token"
        told = _read(ask("POST", url, urlencode(asked).encode(), headers))
        return str(told.get("access_token") or "")


def _read(answer: HttpReply) -> dict[str, Any]:
    """Return the parsed reply. Raises ObjectDenied if the reply reports an error."""
    try:
        told = answer.parse_json()
    except NoReply:
        told = None
    if answer.status == 200 and isinstance(told, dict):
        return told
    error = told.get("error") if isinstance(told, dict) else None
    code = error.get("code") if isinstance(error, dict) else error
    raise ObjectDenied(
        f"Azure does not report the region of the storage account: HTTP {answer.status}"
        + (f", {code}" if code else "")
    )
