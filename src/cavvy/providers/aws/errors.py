"""EC2's error codes, grouped by the caller's reaction.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html lists the codes.
"""

from collections.abc import Mapping
from typing import Any

from cavvy.providers import base

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
