"""Defines the lines of a cloud's bill, in the form that is compared with the ledger."""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from cavvy.domain.values import Struct

USD = "USD"


class BilledKind(StrEnum):
    """The kind of resource that a line of a bill charges for."""

    MACHINE = "machine"
    DISK = "disk"
    ADDRESS = "address"
    TRAFFIC = "traffic"
    OTHER = "other"


class BillCategory(StrEnum):
    """The category of a bill's line: usage, or an item that the ledger does not charge."""

    USAGE = "usage"
    TAX = "tax"
    CREDIT = "credit"  # also refunds
    DISCOUNT = "discount"
    ROUNDING = "rounding"  # an adjustment of the invoice's total
    FEE = "fee"  # reservations, support, purchases


class BillLine(Struct, frozen=True, kw_only=True):
    """A line of a bill. `number` is the position of the line in the file; the header is line 1. The
    amount is in `currency`. `gang` is the value of Cavvy's tag, or "" if the line has no such tag.
    """

    number: int
    resource: str  # the cloud's name of the resource
    gang: str = ""
    kind: BilledKind = BilledKind.MACHINE
    category: BillCategory = BillCategory.USAGE
    since: datetime
    until: datetime
    hours: Decimal | None = None  # hours of a machine; None if the bill does not state them
    amount: Decimal
    currency: str = USD
    # an ID that is equal for repeated lines; None if the bill has no IDs
    identity: int | None = None


class BillFault(StrEnum):
    """The reason why a line of a bill could not be read."""

    NUMBER = "number"  # a value is not a number in the form 1234.56
    TIME = "time"
    COLUMNS = "columns"  # the line has more or fewer values than the header
    PERIOD = "period"  # the line ends before it begins


class BadBillLine(Struct, frozen=True, kw_only=True):
    """An unreadable line of a bill."""

    number: int
    fault: BillFault
    column: str = ""
    value: str = ""
