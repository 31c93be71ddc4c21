"""EC2's error codes by what the caller does next.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html lists them.
"""

from remuda.providers.base import NoCapacity, NotFound, ProviderError, Refused, TryAgain

ELSEWHERE = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientFreeAddressesInSubnet",
        "SpotMaxPriceTooLow",
        "ReservationCapacityExceeded",
        "UnfulfillableCapacity",
        "Unsupported",  # this type in that zone
        "UnsupportedOperation",
        "InvalidAvailabilityZone",
    }
)
LATER = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
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
    }
)
SAME_TOKEN = frozenset({"IdempotentParameterMismatch", "IdempotentInstanceTerminated"})  # the launch was made before
_HINTS = {
    "VcpuLimitExceeded": "the account's quota of vCPUs for this family is used up; ask AWS for more (Service Quotas)",
    "MaxSpotInstanceCountExceeded": "the account's spot quota for this family is used up; ask AWS for more",
    "InstanceLimitExceeded": "the account's quota of instances is used up; ask AWS for more (Service Quotas)",
    "UnauthorizedOperation": "the account may not do this; `remuda check aws --policy` prints what it needs",
    "AccessDeniedException": "the account may not do this; `remuda check aws --policy` prints what it needs",
    "AuthFailure": "AWS does not accept the credentials",
    "OptInRequired": "the account has not accepted the terms of this image or region",
}


class Fault(Exception):
    """What AWS answered instead of doing it; `status` 0 where there was no answer."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.message, self.status = code, message, status


def translate(fault: Fault, what: str) -> ProviderError:
    """The seam's error for a fault of the call `what`."""
    hint = _HINTS.get(fault.code)
    text = f"{what}: {fault}" + (f"; {hint}" if hint else "")
    if fault.code in ELSEWHERE:
        return NoCapacity(text)
    if fault.code in LATER or fault.status >= 500 or (fault.status == 0 and fault.code == "Unreachable"):
        return TryAgain(text)
    if fault.code.endswith((".NotFound", ".Unknown")) and not what.startswith("RunInstances"):
        return NotFound(text)
    return Refused(text)
