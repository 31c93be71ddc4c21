"""Parses amounts of resources: CPUs, memory, disk sizes and network speeds."""

import re
from collections.abc import Callable
from typing import TypeVar

from cavvy.domain.units import UnitError, parse_memory_mib
from cavvy.spec.fields.kinds import (
    TEXT_OR_NUMBER,
    ScalarKind,
    WrongValue,
    advise_point,
    read_text,
)
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, describe

N = TypeVar("N", int, float)
_MOST_CPUS = 100_000.0
_MOST_MIB = 1 << 40  # one exbibyte


def size_kind(words: str) -> ScalarKind:
    """Return a kind for a data size greater than 0. The value is in MiB."""

    def parse(node: ScalarNode) -> int:
        size = parse_memory_mib(read_text(node))
        if size <= 0:
            raise WrongValue(f"{shown(node.text)} is not a size")
        return size

    return ScalarKind(words, parse, TEXT_OR_NUMBER)


def split_range(text: str, unit: Callable[[str], N]) -> tuple[N | None, N | None]:
    """Parse `8`, `8+`, `8..32`, `8..` or `..32` into the minimum and the maximum. A number alone is
    read as the minimum. Raises WrongValue, or UnitError from `unit`.
    """
    stripped = text.strip()
    if ".." in stripped:
        low, _, high = (part.strip() for part in stripped.partition(".."))
        if not low and not high:
            raise WrongValue(f"{shown(text)} is a range without bounds")
        least, most = unit(low) if low else None, unit(high) if high else None
        if least is not None and most is not None and least > most:
            raise WrongValue(
                f"{shown(text)} is a reversed range", suggestion=f"write {high}..{low}"
            )
        return least, most
    return unit(stripped.removesuffix("+")), None


def _cpus(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text.strip()):
        if re.match(r"-", text.strip()):
            raise WrongValue(f"{shown(text)}: a number of CPUs must be above 0")
        hint = advise_point(text)
        raise WrongValue(f"{shown(text)} is not a number of CPUs", suggestion=hint)
    value = float(text)
    if not 0 < value <= _MOST_CPUS:
        raise WrongValue(f"{text} CPUs are too {'few' if value == 0 else 'many'}")
    return value


def _memory(text: str) -> int:
    mib = parse_memory_mib(text)
    if not 0 < mib <= _MOST_MIB:
        raise WrongValue(f"{shown(text)} is too {'little' if mib <= 0 else 'much'} memory")
    return mib


def _read_memory(node: ScalarNode) -> tuple[int | None, int | None, int | None]:
    """Return the minimum, the maximum and the minimum per CPU of the memory, in MiB."""
    text = read_text(node)
    if (times := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x", text.strip())) is not None:
        return None, None, _memory(times[1])
    try:
        return *split_range(text, _memory), None
    except UnitError:
        sign = "delete the sign; a bare number is in GiB" if text.strip().startswith("-") else ""
        hint = sign or advise_point(text)
        raise WrongValue(f"cannot read {shown(text)} as memory", suggestion=hint) from None


def _read_size(node: ScalarNode) -> int:
    """Read a disk size. Returns GiB, rounded up."""
    return -(-_memory(read_text(node).strip().removesuffix("+")) // 1024)


def _read_speed(node: ScalarNode) -> int:
    """Read a network speed. Returns megabits per second."""
    match = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(g|m)(?:bps|bit/s|b/s)\+?",
        read_text(node).strip(),
        re.IGNORECASE,
    )
    if match is None:
        hint = advise_point(read_text(node)) or "add the unit, for example 100Gbps"
        raise WrongValue(f"{describe(node)} is not a network speed", suggestion=hint)
    mbps = round(float(match[1]) * (1000 if match[2].lower() == "g" else 1))
    if not 0 < mbps <= 100_000_000:
        raise WrongValue(
            f"{shown(node.text)} is outside the range: a network speed is more than 0 "
            "and at most 100 Tbit/s"
        )
    return mbps


def speed_kind(example: str) -> ScalarKind:
    return ScalarKind(f"a network speed such as {example}", _read_speed)


CPUS = ScalarKind(
    "a number of CPUs such as 8, 8+ or 8..32",
    lambda node: split_range(read_text(node), _cpus),
    TEXT_OR_NUMBER,
)
MEMORY = ScalarKind(
    "memory such as 16GB, 64GB+ or 16GB..64GB (a bare number is GiB), or 4x",
    _read_memory,
    TEXT_OR_NUMBER,
)
DISK_SIZE = ScalarKind("a size such as 100GB", _read_size, TEXT_OR_NUMBER)
