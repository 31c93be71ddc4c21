"""Calls AWS through boto3. Each call runs in a thread and has a time limit; a failed call raises
`AwsFault`, which `translate` turns into an error of the provider interface.

No other module imports boto3.
"""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.packages import extra_command
from cavvy.providers import base
from cavvy.providers.base import Refused
from cavvy.providers.recording import CallRecorder

HOME = "us-east-1"
_CONNECT_S = 5
_MOST_PAGES = 500
_READS = ("describe_", "get_", "list_")  # prefixes of operations that change nothing
_KEY_LINE = re.compile(
    r"^[^\S\n]*(aws_access_key_id|aws_secret_access_key|aws_session_token)[^\S\n]*="
    r"[^\S\n]*(\S+)[^\S\n]*$",
    re.MULTILINE,
)
_THREADS = ThreadPoolExecutor(
    16, "aws"
)  # a separate thread pool, so that slow AWS calls do not delay other providers
Json = Mapping[str, Any]  # an AWS response, parsed by botocore; used only within this package
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


class CallLimits(Struct, frozen=True, kw_only=True):
    """The read timeout of a call in seconds, and the maximum number of a client's connections."""

    read_s: float = 30
    connections: int = 16


class AwsAccount:
    """The AWS account that the settings select. `run` executes blocking calls; simulations pass a
    function that uses no threads. `provider` is the name of the provider that has the settings;
    error messages contain the name.
    """

    # The SDK retries read-only calls in the call's thread, with growing pauses while AWS throttles.
    # The control plane retries all other calls, after it has checked whether they took effect.
    read_attempts = 3

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        run: InThread = in_thread,
        provider: str = "aws",
        limits: CallLimits | None = None,
    ) -> None:
        self._settings, self._provider = settings, provider
        self._limits = limits or CallLimits()
        self.run = run
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[tuple[str, str, int], Any] = {}
        self.recorder: CallRecorder | None = None

    async def call(
        self, region: str, operation: str, *, service: str = "ec2", **arguments: Any
    ) -> Json:
        """Call an operation, such as "run_instances", in a region. Raises AwsFault with AWS's error
        code.
        """
        what = f"{region} {service} {operation}"
        try:
            answer: Json = await self.run(lambda: self._call(region, service, operation, arguments))
        except AwsFault as fault:
            self._record(what, arguments, {"code": fault.code, "reply": str(fault)})
            raise
        told = {key: value for key, value in answer.items() if key != "ResponseMetadata"}
        self._record(what, arguments, {"reply": told})
        return answer

    def _record(self, what: str, body: object, outcome: Mapping[str, object]) -> None:
        if self.recorder is not None:
            writes = not what.split()[2].startswith(_READS)
            self.recorder.add(what, body, outcome, writes=writes)

    async def ask(self, region: str, operation: str, **arguments: Any) -> Json:
        """Do the same as `call`, but raise TryAgain, NotFound or Refused instead of AwsFault."""
        try:
            return await self.call(region, operation, **arguments)
        except AwsFault as fault:
            raise translate(fault, f"{camel(operation)} in {region}") from fault

    async def items(
        self,
        region: str,
        operation: str,
        filters: Mapping[str, str] | None = None,
        field: str = "",
        **arguments: Any,
    ) -> list[Json]:
        """Return all items that an EC2 list operation, such as "describe_volumes", returns in
        `field`. Raises the same errors as `ask`.
        """
        if filters:
            arguments["Filters"] = [{"Name": name, "Values": [filters[name]]} for name in filters]
        return await self.pages(
            region, operation, field or camel(operation).removeprefix("Describe"), **arguments
        )

    async def pages(self, region: str, operation: str, field: str, **arguments: Any) -> list[Json]:
        """Return the items of all pages of a list. Raises the same errors as `ask`."""
        found: list[Json] = []
        token = "NextToken"
        for _ in range(_MOST_PAGES):
            answer = await self.ask(region, operation, **arguments)
            found += answer.get(field, [])
            if not answer.get(token):
                return found
            arguments[token] = answer[token]
        raise Refused(f"{camel(operation)} in {region}: the list has too many pages")

    async def regions(self) -> tuple[str, ...]:
        """Return the regions that the settings name. If the settings name no region, return the
        region in the AWS configuration. Raises Refused if no region is found.
        """
        named = tuple(
            name.strip()
            for name in str(self._settings.get("regions", "")).split(",")
            if name.strip()
        )
        if named:
            return named
        found = await self.run(lambda: self._get_session().region_name)
        if not found:
            raise Refused(
                f"[providers.{self._provider}] regions: no region is set; name one, such as "
                "`us-east-1`"
            )
        return (str(found),)

    def _call(
        self, region: str, service: str, operation: str, arguments: Mapping[str, Any]
    ) -> Json:
        errors = _import("botocore.exceptions")
        try:
            reads = operation.startswith(_READS)
            client = self._client(service, region, self.read_attempts if reads else 1)
            answer: Json = getattr(client, operation)(**arguments)
        except errors.ClientError as error:
            told = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise AwsFault(
                str(told.get("Code", "Unknown")),
                str(told.get("Message", "")),
                int(status),
                error.response,
            ) from error
        except (
            errors.NoCredentialsError,
            errors.PartialCredentialsError,
            errors.CredentialRetrievalError,
        ) as error:
            raise AwsFault("NoCredentials", str(error)) from error
        except (errors.HTTPClientError, errors.ConnectionError) as error:
            raise AwsFault("Unreachable", str(error)) from error
        except errors.BotoCoreError as error:
            raise AwsFault(type(error).__name__, str(error)) from error
        return answer

    def _client(self, service: str, region: str, attempts: int) -> Any:
        with self._lock:
            if (service, region, attempts) not in self._clients:
                config = _import("botocore.config").Config(
                    connect_timeout=_CONNECT_S,
                    read_timeout=self._limits.read_s,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=self._limits.connections,
                    user_agent_extra="cavvy",
                )
                endpoint = self._settings.get("endpoint") or None
                client = self._get_session_locked().client(
                    service, region_name=region, config=config, endpoint_url=endpoint
                )
                self._clients[service, region, attempts] = client
            return self._clients[service, region, attempts]

    def _get_session(self) -> Any:
        with self._lock:
            return self._get_session_locked()

    def _get_session_locked(self) -> Any:
        if self._session is None:
            errors = _import("botocore.exceptions")
            try:
                self._session = _import("boto3").Session(**self._name_credentials())
            except errors.BotoCoreError as error:
                raise Refused(f"[providers.{self._provider}]: {error}") from error
        return self._session

    def _name_credentials(self) -> dict[str, str | None]:
        """Return the credential arguments of a boto3 session: the keys in the key file or, without
        a key file, the profile. Raises Refused.
        """
        file = str(self._settings.get("key_file") or "")
        if not file:
            return {"profile_name": str(self._settings.get("profile") or "") or None}
        try:
            text = Path(file).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"[providers.{self._provider}] key_file: {error}") from error
        keys: dict[str, str | None] = dict(_KEY_LINE.findall(text))
        if not {"aws_access_key_id", "aws_secret_access_key"} <= set(keys):
            raise Refused(
                f"[providers.{self._provider}] key_file: expected lines with aws_access_key_id and "
                "aws_secret_access_key, as in ~/.aws/credentials"
            )
        return keys


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise Refused(
            f"the provider aws needs boto3, which is not installed: {extra_command('aws')}"
        ) from error


def camel(operation: str) -> str:
    """Return the API's name of a boto3 operation, such as RunInstances for run_instances."""
    return "".join(word.capitalize() for word in operation.split("_"))


# EC2's error codes, grouped by the caller's reaction:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
ELSEWHERE = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientAddressCapacity",
        "InsufficientVolumeCapacity",
        "VolumeTypeNotAvailableInZone",
        "SpotMaxPriceTooLow",
        "ReservationCapacityExceeded",
        "UnfulfillableCapacity",
        "Unsupported",  # EC2 does not offer this type in that zone
        "UnsupportedOperation",
        "InvalidAvailabilityZone",
        "InvalidZone.NotFound",
        # the reservation was removed after Cavvy offered it
        "InvalidCapacityReservationId.NotFound",
        "InvalidCapacityReservationState.PendingActivation",
        "InvalidCapacityReservationState.Unavailable",
    }
)
LATER = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "EC2ThrottledException",
        "PriorRequestNotComplete",
        "TooManyRequestsException",
        "InternalError",
        "InternalFailure",
        "InternalServerError",
        "InternalServiceError",
        "ServiceException",
        "Unavailable",
        "ServiceUnavailable",
        "RequestExpired",
        "RequestTimeout",
        "IdempotentRequestInProgress",
        "DependencyViolation",
        "InvalidPlacementGroup.InUse",
        "IncorrectState",
        "IncorrectInstanceState",
    }
)
SAME_TOKEN = frozenset(
    {"IdempotentParameterMismatch", "IdempotentInstanceTerminated"}
)  # these codes mean that an earlier call with the same client token launched the gang
NOT_ENABLED = frozenset(
    {"AuthFailure", "UnrecognizedClientException", "InvalidClientTokenId", "OptInRequired"}
)  # the codes of a region that the account has not enabled; wrong credentials cause them too
_SPOT_QUOTA = "MaxSpotInstanceCountExceeded"
_HINTS = {
    "VcpuLimitExceeded": "the account's vCPU quota for this instance family is used up; request "
    "an increase in Service Quotas",
    _SPOT_QUOTA: "the account's spot quota for this instance family is used up; request an "
    "increase in Service Quotas",
    "InstanceLimitExceeded": "the account's quota of instances is used up; request an increase in "
    "Service Quotas",
    "UnauthorizedOperation": "the credentials do not allow this; `cavvy check aws --policy` "
    "prints the permissions that Cavvy needs",
    "AccessDeniedException": "the credentials do not allow this; `cavvy check aws --policy` "
    "prints the permissions that Cavvy needs",
    "NoCredentials": "set AWS_PROFILE or AWS_ACCESS_KEY_ID for the server, or create "
    "~/.aws/credentials",
    **dict.fromkeys(
        (
            "AuthFailure",
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "SignatureDoesNotMatch",
        ),
        "AWS rejects the credentials: check that the key is complete and active",
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException"), "the credentials have expired; sign in again"
    ),
    "PendingVerification": "AWS is still verifying the account for this region; this can take "
    "hours",
    "VPCIdNotSpecified": "the region has no default VPC; set `vpc` in `resources.network` or in "
    "[providers.aws]",
    "OptInRequired": "the account has not accepted the terms of this image or region",
}
_LIMIT = "a limit of the account is reached; request an increase in Service Quotas"


class AwsFault(Exception):
    """The error that an AWS call returned. `status` is the HTTP status, or 0 if AWS did not
    respond. `reply` is AWS's complete reply, or {}.
    """

    def __init__(
        self, code: str, message: str, status: int = 0, reply: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.message, self.status = code, message, status
        self.reply = reply or {}


def translate(fault: AwsFault, what: str, *, making: bool = False) -> base.ProviderError:
    """Return the provider error that corresponds to a fault; `what` names the call in the error's
    message.

    Set `making` to True if the call creates an object for a launch. If `making` is True, a fault
    with a code in ELSEWHERE becomes NoCapacity, after which Cavvy tries another offer. If `making`
    is True and an object is missing, the fault becomes Refused.
    """
    limit = fault.code.endswith("LimitExceeded") and fault.code not in LATER
    hint = _HINTS.get(fault.code) or (_LIMIT if limit else "")
    text = f"{what}: {fault}" + (f"; {hint}" if hint else "")
    if making and fault.code in ELSEWHERE:
        return base.NoCapacity(text)
    if (
        fault.code in LATER
        or fault.status >= 500
        or (fault.status == 0 and fault.code == "Unreachable")
    ):
        return base.TryAgain(text)
    gone = fault.code.endswith((".NotFound", ".Unknown")) or fault.code == "ParameterNotFound"
    if gone and not making:  # with `making`, the missing object is one that the user named
        return base.NotFound(text)
    return (base.QuotaTooSmall if limit or fault.code == _SPOT_QUOTA else base.Refused)(text)


# a region that every account has enabled; it reports which other regions are enabled
