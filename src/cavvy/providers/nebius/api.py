"""Calls Nebius's gRPC API with Nebius's own package, which also obtains and renews tokens.

Requests and replies are protobuf messages in JSON form:
https://protobuf.dev/programming-guides/json/. The messages are described in
https://github.com/nebius/api. The fields of a resource's metadata, such as the id and the name, are
returned at the top level, beside the resource's specification.

Finds the credentials of Nebius: an IAM token, or the key of a service account.
"""

import asyncio
import importlib
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.packages import extra_command
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import RECORDER, Json

_VARIABLE = "NEBIUS_IAM_TOKEN"
_FILE = "~/.nebius/credentials.json"
_PAGE = "https://docs.nebius.com/iam/service-accounts/authorized-keys"


class NebiusCredentials(Struct, frozen=True, kw_only=True):
    """Credentials, and the file or variable (`source`) from which the credentials were read. Either
    the field `token` or the field `file` is set.
    """

    source: str
    token: str = ""
    file: str = ""  # the credentials of a service account, which Nebius's package reads


def find_credentials(settings: Mapping[str, Scalar]) -> NebiusCredentials:
    """Return the credentials: from the file that the settings name, otherwise from the environment,
    otherwise from the default file `_FILE`. Raises Refused.
    """
    named = str(settings.get("key_file") or "")
    if not named and (token := os.environ.get(_VARIABLE, "").strip()):
        return NebiusCredentials(source=f"${_VARIABLE}", token=token)
    file = named or _FILE
    path = Path(file).expanduser()
    if not path.exists():
        places = f"{file} (`key_file`)" if named else f"${_VARIABLE}, {file}"
        raise _refuse(
            f"no credentials in {places}; create a key of a service account with `nebius iam "
            f"auth-public-key generate` ({_PAGE}), and name its file in `key_file`"
        )
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the file is not a text file"
        raise _refuse(f"{file} cannot be read: {why}") from error
    if len(text.split()) == 1 and not text.startswith("{"):
        return NebiusCredentials(source=file, token=text)
    if not _is_service_account(text):
        raise _refuse(
            f"{file} contains neither an IAM token nor the credentials of a service account; "
            f"create it with `nebius iam auth-public-key generate` ({_PAGE})"
        )
    return NebiusCredentials(source=file, file=str(path))


def _is_service_account(text: str) -> bool:
    try:
        told = json.loads(text)
    except ValueError:
        return False
    return isinstance(told, dict) and isinstance(told.get("subject-credentials"), dict)


def _refuse(text: str) -> Refused:
    return Refused(f"[providers.nebius]: {text}")


# method -> the message of its request, and the package that contains the message
_REQUESTS = {
    "compute.InstanceService/Create": "compute.CreateInstanceRequest",
    "compute.InstanceService/Delete": "compute.DeleteInstanceRequest",
    "compute.InstanceService/Get": "compute.GetInstanceRequest",
    "compute.InstanceService/List": "compute.ListInstancesRequest",
    "compute.OperationService/List": "common.ListOperationsRequest",
    "compute.DiskService/Delete": "compute.DeleteDiskRequest",
    "compute.DiskService/List": "compute.ListDisksRequest",
    "compute.GpuClusterService/List": "compute.ListGpuClustersRequest",
    "compute.ImageService/ListPublic": "compute.ListPublicRequest",
    "compute.PlatformService/List": "compute.ListPlatformsRequest",
    "iam.ProjectService/Get": "iam.GetProjectRequest",
    "vpc.SubnetService/List": "vpc.ListSubnetsRequest",
}
_CALL_S = 20.0  # maximum time of one attempt in seconds
_CLOSE_S = 10.0
_ATTEMPTS = 3  # attempts of a call that only reads
_MOST_PAGES = 500
# https://grpc.io/docs/guides/status-codes/
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNAVAILABLE": 503,
}
# The kinds of `nebius.common.v1.ServiceError` that say more than the status, and their statuses
_DETAILS = {
    "quotaFailure": 400,
    "notEnoughResources": 400,
    "tooManyRequests": 429,
    "operationConflict": 409,
    "operationAborted": 409,
}


class NebiusApi:
    """One connection to the API. Calls raise CloudFault, or Refused if the credentials or Nebius's
    package are missing.
    """

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._sdk: Any = None

    def credentials(self) -> NebiusCredentials:
        """Return the credentials of the account. Raises Refused."""
        return find_credentials(self._settings)

    def close(self) -> None:
        with self._lock:
            if self._sdk is not None:
                # the client, which has an event loop of its own, must not be closed in another one
                closing = threading.Thread(target=self._sdk.sync_close, args=(_CLOSE_S,))
                closing.start()
                closing.join(_CLOSE_S)
                self._sdk = None

    async def read(self, method: str, body: Json) -> Json:
        """Make a read-only call, and repeat the call if necessary."""
        return await self._run(method, body, token="", writes=False)

    async def change(self, method: str, body: Json, token: str = "") -> Json:
        """Make a call once. A second call with the same token has no further effect."""
        return await self._run(method, body, token=token, writes=True)

    async def list(self, method: str, body: Json) -> list[Json]:
        """Return the items of all pages of a list."""
        found: list[Json] = []
        following = ""
        for _ in range(_MOST_PAGES):
            page = {"pageToken": following} if following else {}
            told = await self.read(method, {**body, **page})
            found += told.get("items") or told.get("operations") or []
            following = str(told.get("nextPageToken") or "")
            if not following:
                return found
        raise CloudFault(400, "too many pages", method)

    async def _run(self, method: str, body: Json, *, token: str, writes: bool) -> Json:
        what = f"{'POST' if writes else 'GET'} /{method.replace('Service/', '/')}"
        try:
            reply = await self._call(method, body, token=token, writes=writes)
        except CloudFault as fault:
            told = {"status": fault.status, "code": fault.code, "reply": fault.message}
            _record(what, body, told, writes)
            raise
        _record(what, body, {"status": 200, "reply": reply}, writes)
        return reply

    async def _call(self, method: str, body: Json, *, token: str, writes: bool) -> Json:
        sdk = await asyncio.to_thread(self._connect)
        from nebius.aio.service_error import RequestError
        from nebius.base.error import SDKError
        from nebius.base.protos.json_format import message_to_dict, parse_dict

        # in a thread, because the first import of a package of the API takes long
        call, request = await asyncio.to_thread(_find_method, sdk, method)
        options: dict[str, Any] = {
            "timeout": _CALL_S * (1 if writes else _ATTEMPTS),
            "per_retry_timeout": _CALL_S,
            "retries": 1 if writes else _ATTEMPTS,
            "auth_timeout": _CALL_S * _ATTEMPTS,
            # wrong credentials must be reported at once, and not be tried for minutes
            "auth_options": {
                "token_renew_synchronous": "true",
                "token_renew_request_timeout": "10",
            },
        }
        if token:
            options["metadata"] = [("x-idempotency-key", token)]
        try:
            reply = await call(parse_dict(body, request), **options)
            return flatten(message_to_dict(getattr(reply, "raw", lambda: reply)()))
        except RequestError as error:
            raise _read_error(message_to_dict(error.status.to_rpc_status())) from error
        except (SDKError, TimeoutError, OSError) as error:
            raise CloudFault(0, "no reply", str(error) or type(error).__name__) from error

    def _connect(self) -> Any:
        """Return Nebius's client, which is created at the first call. Blocks. Raises Refused."""
        with self._lock:
            if self._sdk is None:
                self._sdk = self._make_client()
            return self._sdk

    def _make_client(self) -> Any:
        # Without this variable, gRPC's threads continue in each process that the server forks.
        # There they use descriptors that are already closed, and write errors into the output of
        # the program that the process starts:
        # https://github.com/grpc/grpc/blob/master/doc/fork_support.md
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
        try:
            from nebius.base.options import INSECURE
            from nebius.base.resolver import Constant
            from nebius.sdk import SDK
        except ImportError as error:
            raise Refused(
                "the provider nebius needs the package nebius, which is not installed: "
                f"{extra_command('nebius')}"
            ) from error
        found, endpoint = self.credentials(), str(self._settings["endpoint"])
        options: dict[str, Any] = {"user_agent_prefix": "cavvy"}
        if endpoint.startswith("http://"):
            address = endpoint.removeprefix("http://").rstrip("/")
            options |= {"resolver": Constant(address), "options": [(INSECURE, True)]}
        else:
            options["domain"] = endpoint.removeprefix("https://").rstrip("/")
        if found.token:
            return SDK(credentials=found.token, **options)
        try:
            return SDK(credentials_file_name=found.file, **options)
        # the text of these errors is left out, because it may quote the key
        except (ValueError, TypeError, LookupError) as error:
            raise Refused(
                f"[providers.nebius]: {found.source} has no valid private key of a service account"
            ) from error


def _find_method(sdk: Any, method: str) -> tuple[Any, Any]:
    """Return the client's function for an API method, and an empty request for the method."""
    service, _, name = method.partition("/")
    package, _, service = service.partition(".")
    home, _, request = _REQUESTS[method].partition(".")
    module = _import(package)
    if service == "OperationService":  # each service has its own OperationService
        client = module.InstanceServiceClient(sdk).operation_service()
    else:
        client = getattr(module, f"{service}Client")(sdk)
    messages = _import(home)
    function = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return getattr(client, function), getattr(messages, request)()


def _import(package: str) -> Any:
    """Return the module of an API package, in the newest version that defines all requests in
    `_REQUESTS`.
    """
    version = "v2" if package == "iam" else "v1"
    return importlib.import_module(f"nebius.api.nebius.{package}.{version}")


def flatten(told: Json) -> Json:
    """Return a reply in which the fields of each resource's metadata are at the top level."""
    items = {"items": [flatten(each) for each in told["items"]]} if "items" in told else {}
    if "metadata" not in told:
        return {**told, **items}
    parts = {"spec": told.get("spec") or {}, "status": told.get("status") or {}}
    return {**told["metadata"], **parts}


def find_detail(status: Json) -> str:
    """Return the kind of error in a `google.rpc.Status`, such as "notEnoughResources", or "" if the
    status states no kind.
    """
    details = status.get("details") or []
    kinds = [kind for each in details for kind in _DETAILS if kind in (each.get("value") or each)]
    return next(iter(kinds), "")


def _read_error(status: Json) -> CloudFault:
    code = _name_of(int(status.get("code") or 2))
    detail = find_detail(status)
    number = _DETAILS.get(detail) or _STATUSES.get(code, 0)
    return CloudFault(number, detail or code, str(status.get("message") or "")[:500])


def _name_of(code: int) -> str:
    from grpc import StatusCode

    return next((each.name for each in StatusCode if each.value[0] == code), "UNKNOWN")


def _record(what: str, body: Json, outcome: Mapping[str, object], writes: bool) -> None:
    if recorder := RECORDER.get():
        recorder.add(what, body, outcome, writes=writes)
