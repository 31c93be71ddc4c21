"""Describes in sentences how a bill differs from the ledger."""

from decimal import Decimal
from typing import assert_never

from cavvy.costs.bills import USD, BadBillLine, BillFault
from cavvy.costs.reconcile import Difference, DifferenceCause
from cavvy.domain.units import Money, format_usd

_SENTENCES = {
    DifferenceCause.NOT_IN_LEDGER: "Cavvy's ledger lacks this charge; another server may have "
    "started the machine",
    DifferenceCause.NOT_IN_BILL: "the bill has no line for the charge, with or without Cavvy's tag",
    DifferenceCause.AMOUNT: "the amount differs, and the bill does not state the duration of "
    "the charge",
    DifferenceCause.DAYS: "the same sum appears on other days; the bill may use another time zone",
    DifferenceCause.ROUNDING: "the difference comes from rounding in the bill",
    DifferenceCause.TAX: "tax, which the ledger does not contain",
    DifferenceCause.CREDIT: "a credit or refund, which the ledger does not contain; with the "
    "setting costs.discounts, Cavvy adds credits to the ledger",
    DifferenceCause.DISCOUNT: "a discount; the setting costs.discounts posts discounts to the "
    "ledger",
    DifferenceCause.FEE: "a fee, such as for a reservation, which the ledger does not contain",
    DifferenceCause.UNTAGGED: "the bill has no line with Cavvy's tag for this charge, but an "
    "untagged line with the same cost; activate Cavvy's tag in the cloud's billing settings",
    DifferenceCause.DELAYED: "the bill does not cover the whole of this day yet",
    DifferenceCause.DUPLICATE: "the bill contains the line twice; the second line was not counted",
}


def explain_difference(found: Difference) -> str:
    """Return a sentence that names the likely cause and, if possible, a remedy."""
    match found.cause:
        case DifferenceCause.RATE:
            billed = _rate(found.bill, found.bill_hours)
            charged = _rate(found.ledger, found.ledger_hours)
            return f"the rate differs: {billed} in the bill, {charged} in the ledger"
        case DifferenceCause.DURATION:
            billed, charged = _hours(found.bill_hours), _hours(found.ledger_hours)
            return f"the time differs: {billed} in the bill, {charged} in the ledger"
        case DifferenceCause.CURRENCY:
            return f"the bill is in {found.billed_in}, and the ledger is in {USD}"
        case DifferenceCause.UNREADABLE:
            return f"the line was ignored: {_fault(found.bad)}" if found.bad else "not readable"
        case _:
            return _SENTENCES[found.cause]


def _rate(amount: Decimal | None, hours: Decimal | None) -> str:
    if amount is None or not hours:
        return "none"
    usd = amount / hours
    return f"{format_usd(Money(round(usd * 10**6)), 4 if usd >= 0.001 else 6)}/h"


def _hours(hours: Decimal | None) -> str:
    return f"{hours or 0:.4f} h"


def _fault(bad: BadBillLine) -> str:
    match bad.fault:
        case BillFault.NUMBER:
            return f"{bad.column} is {bad.value!r}, not a number such as 1234.56"
        case BillFault.TIME:
            return f"{bad.column} is {bad.value!r}, not a time such as 2026-11-03T14:00:00Z"
        case BillFault.COLUMNS:
            return "the number of columns differs from the header"
        case BillFault.PERIOD:
            return "the period ends before it begins, or more than 400 days after it begins"
        case _:
            assert_never(bad.fault)
