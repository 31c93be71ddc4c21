"""Calls Azure Resource Manager with the credentials of azure-identity. No other module imports
Azure's SDK.

The file of a service principal that a project has set is checked first. The check reads only the
fields that identify the principal, because the files of other kinds of credentials can point to
local files or addresses.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from cavvy.domain.tasks import Scalar
from cavvy.packages import extra_command
from cavvy.providers.base import KeyFileRefused, Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# The versions of the API, from the packages azure-mgmt-compute 39 and azure-mgmt-network 33. The
# tests check requests with these packages.
COMPUTE, SKUS, NETWORK = "2026-04-01", "2021-07-01", "2026-03-01"
_RESOURCES, _SUBSCRIPTIONS = "2021-04-01", "2022-12-01"
_VERSIONS = {
    "Microsoft.Compute": COMPUTE,
    "Microsoft.Network": NETWORK,
    "Microsoft.MachineLearningServices": "2024-04-01",
}

_CONNECT_S, _READ_S = 10.0, 20.0  # time limits in seconds of a request for a token

_NO_GROUP = frozenset({"ResourceGroupNotFound"})
_NO_SUBSCRIPTION = frozenset(
    {"SubscriptionNotFound", "InvalidSubscriptionId", "MissingSubscription"}
)
_NOT_REGISTERED = "MissingSubscriptionRegistration"

_HOME = "https://login.microsoftonline.com"
_GUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
# field -> its names in the two output formats of `az ad sp create-for-rbac`, and its pattern
_TAKEN = {
    "clientId": (("appId", "clientId"), re.compile(_GUID)),
    "tenantId": (("tenant", "tenantId"), re.compile(rf"{_GUID}|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")),
    "clientSecret": (("password", "clientSecret"), re.compile(r"[!-~]{1,200}")),
}


class AccessToken(Protocol):
    """A token of azure-identity."""

    @property
    def token(self) -> str: ...


class Credential(Protocol):
    """A credential of azure-identity, which caches tokens."""

    def get_token(self, *scopes: str) -> AccessToken:
        """Return a valid access token."""


# makes the credential; if None, azure-identity's default credential is used
MakeCredential = Callable[[], Credential] | None


class AzureAccount:
    """Calls Azure Resource Manager for one subscription and one resource group. Methods raise
    CloudFault, and Refused if a person must change the setup.
    """

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        make_credential: MakeCredential,
        *,
        provider: str = "azure",
        namespaces: Sequence[str] = ("Microsoft.Compute", "Microsoft.Network"),
    ) -> None:
        """`provider` is the name of the provider that has the settings; error messages contain the
        name. `namespaces` are the services that the subscription must have registered.
        """
        self._settings, self._table = settings, f"[providers.{provider}]"
        self._namespaces = namespaces
        self._scope = f"{str(settings['endpoint']).rstrip('/')}/.default"
        self._make_credential = make_credential or self._find_credential
        self._credential: Credential | None = None
        self._lock = threading.Lock()
        self._api = RestClient(
            str(settings["endpoint"]),
            self.token,
            _read_error,
        )
        self._file = str(settings.get("key_file") or "")
        # the server's environment names the subscription of the server's own account
        usual = "" if self._file else os.environ.get("AZURE_SUBSCRIPTION_ID", "")
        self._subscription = str(settings.get("subscription") or usual)
        self.close = self._api.close
        self.group = str(settings.get("resource_group") or "")

    async def subscription(self) -> str:
        """Return the path of the subscription."""
        if not self._subscription:
            found = await self._pages(f"/subscriptions?api-version={_SUBSCRIPTIONS}")
            ids = [str(each["subscriptionId"]) for each in found if each["state"] == "Enabled"]
            if len(ids) != 1:
                raise Refused(
                    f"{self._table} subscription: the account has {len(ids)} enabled "
                    "subscriptions; name the one to use"
                )
            self._subscription = ids[0]
        return f"/subscriptions/{self._subscription}"

    async def path(self, kind: str, name: str) -> str:
        """Return the path of a resource in the resource group. `kind` is the resource's type, such
        as "Microsoft.Compute/virtualMachines".
        """
        group = f"{await self.subscription()}/resourceGroups/{self.group}"
        return f"{group}/providers/{kind}{f'/{name}' if name else ''}"

    async def group_region(self) -> str:
        """Return the region of the resource group."""
        path = f"{await self.subscription()}/resourceGroups/{self.group}"
        told = await self._ask(self._api.get(f"{path}?api-version={_RESOURCES}"))
        return str(told["location"]).lower().replace(" ", "")

    async def find(self, kind: str, name: str, query: str = "") -> Json | None:
        """Return one resource, or None if it does not exist."""
        path = await self.path(kind, name)
        try:
            return await self._ask(self._api.get(f"{path}?{_version(kind)}{query}"))
        except CloudFault as fault:
            if fault.status == 404:
                return None
            raise

    async def put(
        self, kind: str, name: str, body: Mapping[str, Any], *, version: str = ""
    ) -> Json:
        """Create or change a resource. A repeated call does not create a second resource. `version`
        overrides the usual API version of the resource type.
        """
        path = await self.path(kind, name)
        query = f"api-version={version}" if version else _version(kind)
        return await self._ask(self._api.send("PUT", f"{path}?{query}", body))

    async def delete(self, kind: str, name: str, query: str = "") -> None:
        """Start deleting a resource. Does nothing if the resource does not exist."""
        path = await self.path(kind, name)
        await self._ask(self._api.send("DELETE", f"{path}?{_version(kind)}{query}"))

    async def post(self, kind: str, name: str) -> None:
        """Call an action of a resource, such as `cancel`. Append a slash and the action to the
        `name` of the resource, such as "NAME/cancel".
        """
        path = await self.path(kind, name)
        await self._ask(self._api.send("POST", f"{path}?{_version(kind)}"))

    async def resources(self, kind: str) -> list[Json]:
        """Return all resources of a type in the resource group."""
        path = await self.path(kind, "")
        return await self._pages(f"{path}?{_version(kind)}")

    async def all(self, path: str, query: str) -> list[Json]:
        """Return the entries from all pages of the list at `path` in the subscription."""
        return await self._pages(f"{await self.subscription()}/{path}?{query}")

    async def follow(self, url: str) -> Json:
        """Return an object, such as an operation, from the object's address in Azure Resource
        Manager.
        """
        return (await self._ask(self._api.pages(url, lambda _: None)))[0]

    async def _pages(self, path: str) -> list[Json]:
        pages = await self._ask(self._api.pages(path, lambda page: page.get("nextLink") or None))
        return [each for page in pages for each in page["value"]]

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except CloudFault as fault:
            if fault.code in _NO_GROUP:
                raise Refused(
                    f"{self._table} resource_group: the resource group {self.group} does not "
                    f"exist; create it: az group create --name {self.group} --location REGION"
                ) from fault
            if fault.code in _NO_SUBSCRIPTION:
                raise Refused(f"{self._table} subscription: {fault}") from fault
            if fault.code == _NOT_REGISTERED:
                names = "; az provider register --namespace ".join(self._namespaces)
                raise Refused(
                    f"{fault}; register the services of the subscription once: az provider "
                    f"register --namespace {names}"
                ) from fault
            raise

    def token(self, scope: str = "") -> str:
        """Return a token for Azure Resource Manager, or for another scope. Blocks."""
        errors = self._import("azure.core.exceptions")
        try:
            with self._lock:
                if self._credential is None:
                    self._credential = self._make_credential()
                return self._credential.get_token(scope or self._scope).token
        except errors.ClientAuthenticationError as error:
            text = " ".join(str(error).split())[:1000]
            if self._file:
                raise Refused(f"{self._table} key_file: Azure refuses the key: {text}") from error
            raise Refused(
                f"{self._table}: Azure accepts no credential on this server; sign in with `az "
                f"login`, or set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET: {text}"
            ) from error
        except errors.AzureError as error:
            raise CloudFault(0, "no token", type(error).__name__) from error

    def _find_credential(self) -> Credential:
        """Return a credential whose calls have time limits. Without limits, one call could take 20
        minutes and delay all calls of the provider.
        """
        limits = {"connection_timeout": _CONNECT_S, "read_timeout": _READ_S, "retry_total": 1}
        identity = self._import("azure.identity")
        found: Credential
        if not self._file:
            found = identity.DefaultAzureCredential(**limits)
            return found
        try:
            told = read_principal(Path(self._file).expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError, KeyFileRefused) as error:
            raise Refused(f"{self._table} key_file: {error}") from error
        found = identity.ClientSecretCredential(
            told["tenantId"], told["clientId"], told["clientSecret"], **limits
        )
        return found

    def _import(self, module: str) -> Any:
        try:
            return import_module(module)
        except ImportError as error:
            raise Refused(
                f"{self._table}: the package `azure-identity` is missing; install it: "
                f"{extra_command('azure')}"
            ) from error


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error. Some services give the reason only in the
    error's details.
    """
    error = told["error"]
    details = [str(each["message"]) for each in error.get("details") or () if each.get("message")]
    return error["code"], "; ".join([str(error["message"]), *details])


def _version(kind: str) -> str:
    return f"api-version={_VERSIONS[kind.split('/')[0]]}"


def clean_key(text: str) -> str:
    """Return the text of a key file that contains only the necessary fields. Raises KeyFileRefused;
    the error message contains no part of the key.
    """
    return json.dumps(read_principal(text))


def read_principal(text: str) -> Mapping[str, str]:
    """Return the values of `clientId`, `tenantId` and `clientSecret`. Raises KeyFileRefused."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise KeyFileRefused("the key is not JSON") from None
    if not isinstance(told, dict):
        raise KeyFileRefused("expected the output of `az ad sp create-for-rbac`")
    if str(told.get("activeDirectoryEndpointUrl", _HOME)).rstrip("/") != _HOME:
        raise KeyFileRefused(f"`activeDirectoryEndpointUrl` must be {_HOME}")
    taken = {}
    for field, (names, form) in _TAKEN.items():
        value = next((told[name] for name in names if name in told), None)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise KeyFileRefused(
                f"`{names[0]}` is missing, or is not valid for a service principal"
            )
        taken[field] = value
    return taken
