"""Computes the amounts of discounts on the charges of a month, and distributes these amounts over
the charges.

The rules for discounts, in the order of application:

1. A percentage (a negotiated price, committed use, a reservation) applies to all charges of one
account at a provider. If several percentages apply to a charge, the percentages are added, up to at
most 100 %. 2. A credit is an amount for each month. The credit reduces the amount that remains
after the percentages are applied, at most down to 0.

The amount of a discount is rounded down to whole micro-dollars once. The amount is distributed over
the attempts in proportion to the attempts' charges. Each attempt's share is rounded down. The
remaining micro-dollars are assigned, one each, to the attempts with the largest remainders; among
equal remainders, the attempt with the lowest ID comes first. Therefore the parts add up exactly to
the amount of the discount.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from cavvy.domain.units import Money, UnitError, parse_usd
from cavvy.domain.values import Struct

_FULL = 1_000_000  # 100 %, in millionths
_DISCOUNT = re.compile(r"([a-z0-9_-]+(?:@[a-z0-9-]+)?):(?:(\d+(?:\.\d{1,4})?)%|(\$.+))")


class Discount(Struct, frozen=True, kw_only=True):
    """A discount on the charges of an account at a provider. `domain/credentials.py` defines the
    names of accounts. A discount is either a share of the charges (`millionths`) or an amount for
    each month (`credit`).
    """

    account: str
    millionths: int = 0
    credit: Money = Money()

    @property
    def name(self) -> str:
        """The name of the discount in the ledger's entries."""
        size = f"{self.millionths / 10_000:g}%" if self.millionths else f"${self.credit.usd:f}"
        return f"{self.account}:{size}"


class DiscountBase(Struct, frozen=True, kw_only=True):
    """The charges for one attempt in a month, without discounts."""

    subject: str
    account: str
    micros: int


def parse_discounts(text: str) -> tuple[Discount, ...]:
    """Read discounts such as `aws:12%, gcp@vision:5%, aws:$500`. Raises UnitError."""
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _DISCOUNT.fullmatch(part)
        if match is None:
            raise UnitError(
                f"expected PROVIDER:PERCENT% or PROVIDER:$AMOUNT, with @PROJECT after the provider "
                f"for a project's own account, such as aws:12% or gcp@vision:$500, not {part!r}"
            )
        account, percent, credit = match.groups()
        millionths = round(float(percent) * 10_000) if percent else 0
        if millionths > _FULL:
            raise UnitError(f"{part!r} is more than 100 %")
        money = parse_usd(credit) if credit else Money()
        found.append(Discount(account=account, millionths=millionths, credit=money))
    if len({each.name for each in found}) < len(found):
        raise UnitError(f"a discount is named twice in {text!r}")
    return tuple(found)


def spread_discounts(
    discounts: Sequence[Discount], charged: Sequence[DiscountBase]
) -> dict[str, dict[str, int]]:
    """Return the reductions in micro-dollars, 0 or more, by the discount's name and then by
    attempt.
    """
    left = {each.subject: each.micros for each in charged if each.micros > 0}
    # percentages refer to the charges, not to the amounts that remain after other discounts
    whole = dict(left)
    found: dict[str, dict[str, int]] = {}
    for discount in sorted(discounts, key=lambda each: (each.millionths == 0, each.name)):
        meant = [
            each.subject
            for each in charged
            if each.subject in left and each.account == discount.account
        ]
        if discount.millionths:
            most = sum(whole[subject] for subject in meant) * discount.millionths // _FULL
        else:
            most = discount.credit.micros
        weights = {subject: left[subject] for subject in meant}
        parts = spread(min(most, sum(weights.values())), weights)
        for subject, part in parts.items():
            left[subject] -= part
        found[discount.name] = parts
    return found


def spread(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Use the method of largest remainders to divide `amount` in proportion to the weights, which
    are 0 or more. The parts add up to the amount, unless all weights are 0.
    """
    total = sum(weights.values())
    if not total or amount <= 0:
        return dict.fromkeys(weights, 0)
    parts = {key: amount * weight // total for key, weight in weights.items()}
    rest = amount - sum(parts.values())
    by_remainder = sorted(weights, key=lambda key: (-(amount * weights[key] % total), key))
    for key in by_remainder[:rest]:
        parts[key] += 1
    return parts


def list_bases(rows: Iterable[tuple[Mapping[str, str], int]]) -> list[DiscountBase]:
    """Return a `DiscountBase` for each row. A row contains the sum of the charges of one subject
    (an attempt) under one account.
    """
    return [
        DiscountBase(
            subject=groups["subject"],
            account=groups["account"],
            micros=micros,
        )
        for groups, micros in rows
    ]
