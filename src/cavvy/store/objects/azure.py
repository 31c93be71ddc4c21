"""Gives access to containers of Azure Blob Storage. Each request is signed with a shared access
signature (SAS), which is valid for one blob or, to list blobs, for the container.

Source: learn.microsoft.com/rest/api/storageservices/create-service-sas (version 2020-12-06 and
later).

Finds the region of an Azure storage account. The storage itself does not report its region, so
Azure Resource Manager is queried with a service principal:
https://learn.microsoft.com/rest/api/storagerp/storage-accounts/list and
https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow
"""

import base64
import hmac
import xml.etree.ElementTree as Xml
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from cavvy.domain.values import Struct, replace
from cavvy.http_client import HttpReply, NoReply
from cavvy.store.objects.base import ObjectDenied, ObjectInfo, ObjectMissing, SignedRequest
from cavvy.store.objects.http import SignedStorage, ask, check, found_of, parsing
from cavvy.store.objects.s3 import quote_key

_VERSION = "2021-12-02"
_PERMISSIONS = {
    "HEAD": "r",
    "GET": "r",
    "PUT": "cw",
    "DELETE": "d",
}  # permissions for one blob, by HTTP method
_SKEW = timedelta(minutes=5)

# the variables of Azure's own libraries, and the subscription of the account
KEYS = (
    "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_SUBSCRIPTION_ID",
)
_MANAGEMENT_VERSION = "2023-05-01"
_MOST_PAGES = 100


class AzureContainer(SignedStorage):
    """One container of an Azure storage account. `endpoint` is the root of the account's URLs, such
    as https://ACCOUNT.blob.core.windows.net.
    """

    bills_parts: ClassVar = False  # `abort` cannot remove parts; Azure removes them after a week
    headers: ClassVar = {"x-ms-version": _VERSION}
    put_headers: ClassVar = {"x-ms-blob-type": "BlockBlob"}

    def __init__(
        self,
        container: str,
        account: str,
        key: str,
        now: Callable[[], datetime],
        *,
        endpoint: str = "",
    ) -> None:
        super().__init__(container)
        self.account = account
        self._key = base64.b64decode(key)
        self._now = now
        self.root = (endpoint or f"https://{account}.blob.core.windows.net").rstrip("/")

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._ask("HEAD", key)
        if answer.status == 404:
            return None
        found = found_of(key, check(answer, self._say(key)))
        with parsing(self._say(key)):
            return replace(found, md5=_hex(answer.headers.get("content-md5", "")))

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        query = {"restype": "container", "comp": "list", "prefix": prefix, "maxresults": str(limit)}
        if after:
            query["marker"] = after
        root = self._listed(query, "container")
        with parsing(f"the container {self.name}"):
            found = [_read_entry(each) for each in root.iter("Blob")]
        return found, root.findtext("NextMarker") or ""

    def begin(self, key: str) -> str:
        # Azure needs no request to start an upload, and deletes uncommitted blocks after a week
        return "blocks"

    def complete(self, key: str, upload: str, tags: Sequence[str]) -> None:
        blocks = "".join(f"<Latest>{_block(number)}</Latest>" for number in range(1, len(tags) + 1))
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode()
        headers = {"Content-Type": "application/xml"}
        check(self._ask("PUT", key, {"comp": "blocklist"}, body, headers), self._say(key))

    def abort(self, key: str, upload: str) -> None:
        return

    def sign_put(self, key: str, expires_s: int, upload: str = "", part: int = 0) -> SignedRequest:
        query = {"comp": "block", "blockid": _block(part)} if upload else {}
        headers = {**self.headers, **({} if upload else self.put_headers)}
        url = self._sign("PUT", key, query, expires_s)
        return SignedRequest(method="PUT", url=url, headers=headers)

    def _sign(self, method: str, key: str, query: Mapping[str, str], expires_s: int) -> str:
        now, may = self._now(), _PERMISSIONS[method] if key else "l"
        start, end = (
            each.strftime("%Y-%m-%dT%H:%M:%SZ")
            for each in (now - _SKEW, now + timedelta(seconds=expires_s))
        )
        resource = f"/blob/{self.account}/{self.name}" + (f"/{key}" if key else "")
        kind = "b" if key else "c"
        fields = (may, start, end, resource, "", "", "", _VERSION, kind, "", "", "", "", "", "", "")
        signature = base64.b64encode(
            hmac.digest(self._key, "\n".join(fields).encode(), "sha256")
        ).decode()
        asked = {
            **query,
            "sv": _VERSION,
            "sr": kind,
            "sp": may,
            "st": start,
            "se": end,
            "sig": signature,
        }
        path = f"/{quote_key(key)}" if key else ""
        return f"{self.root}/{quote(self.name)}{path}?{urlencode(asked, quote_via=quote)}"


def _block(number: int) -> str:
    """Return the ID of a block in Base64. All block IDs of a blob must have the same length."""
    return base64.b64encode(f"{number:06d}".encode()).decode()


def _hex(md5: str) -> str:
    return base64.b64decode(md5).hex() if md5 else ""


def _read_entry(blob: Xml.Element) -> ObjectInfo:
    size, changed = (
        blob.findtext("Properties/Content-Length"),
        blob.findtext("Properties/Last-Modified"),
    )
    tag = (blob.findtext("Properties/Etag") or "").strip('"')
    return ObjectInfo(
        key=blob.findtext("Name") or "",
        size=int(size) if size else None,
        tag=f'"{tag}"' if tag else "",  # listings omit the quotes that requests need
        md5=_hex(blob.findtext("Properties/Content-MD5") or ""),
        changed_at=parsedate_to_datetime(changed) if changed else None,
    )


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
            f"Microsoft.Storage/storageAccounts?api-version={_MANAGEMENT_VERSION}"
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
