"""Units: money in whole micro-US-dollars, memory in whole MiB, durations as timedelta."""

import re
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from math import floor

from cavvy.domain.values import Struct

MICROS_PER_USD = 1_000_000
_LARGE, _LARGEST = 1e6, 1e15  # between these bounds, numbers are written out
_HOUR_US = 3_600_000_000  # microseconds in an hour


class UnitError(ValueError):
    """A quantity that cannot be parsed. The message states the expected format."""


class TooMuch(UnitError):
    """A quantity that can be parsed but is too large."""


class Money(Struct, frozen=True, order=True):
    """An amount in micro-US-dollars (1 USD = 1_000_000)."""

    micros: int = 0

    def __add__(self, other: "Money") -> "Money":
        return Money(self.micros + other.micros)

    def __sub__(self, other: "Money") -> "Money":
        return Money(self.micros - other.micros)

    @property
    def usd(self) -> Decimal:
        return Decimal(self.micros) / MICROS_PER_USD


class HourlyRate(Struct, frozen=True, order=True):
    """A price in micro-US-dollars per hour, as providers quote it."""

    micros_per_hour: int = 0

    def over(self, length: timedelta) -> Money:
        """Return the cost of `length` at this rate, in whole micro-dollars; half a micro-dollar is
        rounded up.
        """
        microseconds = length // timedelta(microseconds=1)
        return Money((2 * self.micros_per_hour * microseconds + _HOUR_US) // (2 * _HOUR_US))

    def times(self, count: int) -> "HourlyRate":
        return HourlyRate(self.micros_per_hour * count)

    def divide(self, part: Fraction) -> "HourlyRate":
        """Return the price of a part; half a micro-dollar is rounded up."""
        return HourlyRate(floor(self.micros_per_hour * part + Fraction(1, 2)))

    @property
    def usd(self) -> Decimal:
        return Decimal(self.micros_per_hour) / MICROS_PER_USD


# The maximum of a signed 64-bit column: about nine trillion dollars.
_MOST_MICROS = (1 << 63) - 1


# Commas only separate thousands: 1.000,50 and 2,50 are amounts in the notation of other countries.
_THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")


def read_number(text: str) -> float:
    """Parse a number with the digits 0 to 9. Python's numbers may have the digits of any script,
    which people could not compare with the other numbers of a list. Raises ValueError.
    """
    if not text.isascii():
        raise ValueError(f"{text!r} is not a number in ASCII")
    return float(text)


def is_whole(text: str) -> bool:
    """Return whether the text consists of the digits 0 to 9."""
    return text.isascii() and text.isdigit()


def parse_usd(text: str | int | float | Decimal) -> Money:
    """Parse dollars ("3.60", "$15" or 2.5) into micro-dollars. Half a micro-dollar is rounded up.
    Raises UnitError."""
    try:
        digits = str(text).strip().removeprefix("$").removesuffix("USD").strip()
        if not digits.isascii():
            raise InvalidOperation
        amount = Decimal(digits.replace(",", "") if _THOUSANDS.fullmatch(digits) else digits)
    except InvalidOperation:
        raise UnitError(f"expected an amount of dollars, such as 3.60, not {text!r}") from None
    if not amount.is_finite() or amount < 0:
        raise UnitError(f"expected 0 or more dollars, such as 3.60, not {text!r}")
    if amount.adjusted() > 15 or amount * MICROS_PER_USD > _MOST_MICROS:
        raise TooMuch(f"{str(text)[:40]} exceeds the maximum amount of money")
    return Money(int((amount * MICROS_PER_USD).quantize(Decimal(1), rounding="ROUND_HALF_UP")))


def parse_rate(text: str | int | float | Decimal) -> HourlyRate:
    """Parse dollars per hour ("3.60" or "$15/h"). Raises UnitError."""
    if isinstance(text, str):
        text = re.sub(r"(?<!\s)\s*/\s*(h|hr|hour)$", "", text.strip())
    return HourlyRate(parse_usd(text).micros)


_LENGTHS: dict[str, float] = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
    **dict.fromkeys(("w", "week", "weeks"), 604800),
}
# A match never begins inside a number, so that the search reads a long number only once.
_LENGTH = re.compile(r"(?<![\d.])([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", re.IGNORECASE)


def parse_duration(text: str | int | float) -> timedelta:
    """Parse a length of time, such as "90s", "10m", "1h30m" or "2 days". A number without a unit is
    in seconds. Raises UnitError.
    """
    expected = f"expected a length of time such as 90s, 10m, 1h30m or 2d, not {text!r}"
    try:
        if isinstance(text, (int, float)) and not isinstance(text, bool) and text >= 0:
            return timedelta(seconds=text)
        stripped = str(text).strip()
        parts = _LENGTH.findall(stripped)
        if (
            not parts
            or _LENGTH.sub("", stripped).strip()
            or any(unit.lower() not in _LENGTHS for _, unit in parts)
        ):
            raise UnitError(expected)
        return timedelta(
            seconds=sum(float(number) * _LENGTHS[unit.lower()] for number, unit in parts)
        )
    except OverflowError:
        raise TooMuch(f"{str(text)[:40]} exceeds the maximum length of time") from None


_MOST_MEMORY_MIB = 1 << 40  # one exbibyte
# Vendors state memory in powers of two, regardless of the unit that they write: 80GB means 80 GiB.
_MEMORY = {
    "": 1024,
    "G": 1024,
    "GB": 1024,
    "GIB": 1024,
    "M": 1,
    "MB": 1,
    "MIB": 1,
    "T": 1 << 20,
    "TB": 1 << 20,
    "TIB": 1 << 20,
}


def parse_memory_mib(text: str | int | float) -> int:
    """Parse an amount of memory into whole MiB, such as "80GB", "512MiB" or "1.5TB". A number
    without a unit is in GiB. Raises UnitError.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2].upper() not in _MEMORY or isinstance(text, bool):
        raise UnitError(f"expected memory such as 16GB, 512MB or 1TB, not {text!r}")
    mib = round(Decimal(match[1]) * _MEMORY[match[2].upper()])
    if mib > _MOST_MEMORY_MIB:
        raise UnitError(f"{match[1][:40]} exceeds the maximum amount of memory")
    return mib


def format_count(count: float, noun: str) -> str:
    """Return "1 line", "0 lines" or "1,200 lines"."""
    text = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def format_usd(money: Money, decimals: int = 2) -> str:
    """Format dollars for people: "$1.20" or "-$1.20". If `decimals` is 2, an amount below a cent
    becomes "<$0.01" or ">-$0.01"."""
    if decimals == 2 and 0 < abs(money.micros) < 10_000:
        return "<$0.01" if money.micros > 0 else ">-$0.01"
    return f"{'-' if money.micros < 0 else ''}${abs(money.usd):,.{decimals}f}"


def count_decimals(amounts: Sequence[Money]) -> int:
    """Return the smallest number of decimals, from 2 to 6, that is enough to print these amounts.
    The number of decimals is enough if the printed amounts add up to the printed sum, and no amount
    above 0 is printed as 0. With 6 decimals, amounts are printed exactly.
    """
    total = Money(sum(each.micros for each in amounts))
    for decimals in range(2, 6):
        shown = [round(each.usd, decimals) for each in amounts]
        if sum(shown) == round(total.usd, decimals) and all(
            part or not each.micros for part, each in zip(shown, amounts, strict=True)
        ):
            return decimals
    return 6


def format_price(usd: Decimal | float) -> str:
    """Format the price of one hour, one GB or another unit for people: "$1.20". Prices below $0.10
    have more decimals, so that no price above 0 is printed as 0."""
    if 0 < usd < 0.000001:
        return "<$0.000001"
    decimals = 6 if 0 < usd < 0.001 else 4 if 0 < usd < 0.1 else 2
    text = f"{usd:,.{decimals}f}"
    return f"${text.rstrip('0') if decimals == 6 else text}"


def format_rate(rate: HourlyRate) -> str:
    """Format a rate for people: "$1.20/h"."""
    return f"{format_price(rate.usd)}/h"


def format_duration(length: timedelta) -> str:
    """Format a length of time for people: 0.4s, 5s, 42s, 3m05s, 2h10m or 3d04h."""
    seconds = length.total_seconds()
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_memory(mib: int) -> str:
    return (
        f"{mib / 1024:.0f} GiB"
        if mib % 1024 == 0 or mib >= 10240
        else f"{mib / 1024:.1f} GiB"
        if mib >= 1024
        else f"{mib} MiB"
    )


_UNITS = {"mib": "", "mib_s": " MiB/s", "percent": "%", "w": " W"}


def format_measure(name: str, value: float | str) -> str:
    """Return a value that a node reports, with its name, such as "memory 2.0 GiB", "CPU 25%" or
    "loss 0.12". The ends `_mib`, `_mib_s`, `_w` and `_percent` of a name are units.
    """
    what, unit = next(
        ((name.removesuffix(f"_{each}"), each) for each in _UNITS if name.endswith(f"_{each}")),
        (name, ""),
    )
    has_unit = bool(what and unit)
    words = (what if has_unit else name).replace("_", " ")
    words = re.sub(r"\b(cpu|gpu)\b", lambda found: found[0].upper(), words)
    if not has_unit or isinstance(value, str):
        return f"{words} {format_number(value)}"
    if unit == "mib":
        return f"{words} {format_memory(round(value))}"
    ending = _UNITS[unit]
    return f"{words} {value:.0f}{ending}" if value >= 100 else f"{words} {value:.3g}{ending}"


def format_energy(joules: float) -> str:
    """Return an energy, such as "820 J", "54.2 Wh" or "1.3 MWh"."""
    if joules < 3600:
        return f"{joules:.3g} J" if joules < 100 else f"{joules:.0f} J"
    amount, unit = joules / 3600, "Wh"
    for larger in ("kWh", "MWh", "GWh"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.3g} {unit}"


def format_grams(grams: float) -> str:
    """Return a mass, such as "12 g" or "3.4 kg"."""
    for unit in ("g", "kg"):
        if grams < 999.5:
            return f"{grams:.3g} {unit}"
        grams /= 1000
    return f"{grams:,.0f} t" if grams >= 100 else f"{grams:.3g} t"


def format_number(value: float | str) -> str:
    """Return a number in at most six digits. Large numbers are written out: 12,000,000."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if _LARGE <= abs(value) < _LARGEST else f"{value:g}"
