"""Parse accelerator requirements as people type them, such as `H100:8` or `A100:40GB..80GB:1..4`.
The spec module and the CLI use this module.

A requirement consists of alternatives joined by `|`. An alternative consists of a name and parts in
any order, joined by `:`.

* name: a product (H100, RTX4090), a vendor (nvidia) or a kind (gpu, tpu, fpga); without a name, any
  GPU fits
* count: 8, 1..4, 2.. or ..4 on each node; the default is 1
* MIG profile: 1g.10gb, for an instance that MIG has made of the named GPU
* part: 0.5 or 1/6, for at least this part of one GPU; share=10GB, for the part of one GPU with this
  memory. `isolated` accepts only a part that is protected from the work on the rest of the GPU
* topology: the arrangement of the chips in a slice of TPUs, such as 2x4 or 4x4x8. The name and the
  number of chips can also be stated together by a type of slice, such as v5litepod-8
* memory: 80GB, 40GB..80GB, 24GB.. or ..48GB of each accelerator

With a product, a single size is exact (A100:80GB); without a product, the size is the minimum
(24GB, nvidia:24GB). `H100|A100:8` requests eight accelerators of either type: an alternative
without a count takes the count of the next alternative that has a count.
"""

import re
from fractions import Fraction

from cavvy.catalog.accelerators import (
    PROFILE,
    AcceleratorKind,
    Vendor,
    find_accelerator,
    instance_memory_mib,
    is_known,
    list_accelerators,
    name_instance,
    names_matching,
    split_instance,
    suggest,
)
from cavvy.catalog.mig import find_tables, plain_profile
from cavvy.catalog.tpu_slices import count_chips, find_slice
from cavvy.domain.tasks import AcceleratorNeed
from cavvy.domain.units import UnitError, is_whole, parse_memory_mib
from cavvy.domain.values import Struct, copy_fields, replace

MOST = 65_536  # the upper end of an open count such as `2..`
_COUNT = re.compile(r"\d+|\d+\s*\.\.\s*\d*|\.\.\s*\d+")
_MIXED = re.compile(r"-?\d*\.\d+|-\d+/\d+")  # numbers that are neither a count nor a fraction
_SHARE = re.compile(r"share\s*=\s*(.*)", re.IGNORECASE)
_SMALLEST = 0.01  # smallest fraction of a GPU
_UNDIVIDED = {Vendor.GOOGLE, Vendor.AWS}  # vendors that make no GPUs
_PART = re.compile(r"0?\.\d*[1-9]\d*|\d+/\d+")
# A number that is too large for a count or a size. A match never begins inside a run of spaces, so
# that the search reads the run only once.
_HUGE = re.compile(r"(?:^|[^.\d\s]|\.\.|(?<!\s)\s)\s*\d{10}")
_TIMES = re.compile(r"(?:(\d+) ?[x×*] ?(.+)|(.+?) ?[x×*] ?(\d+))")
_SIZE = re.compile(r"(\d+(?:\.\d+)?\s*[KMGT]i?B?)", re.IGNORECASE)


class NeedError(ValueError):
    """Raised if a requirement cannot be parsed. The message states which form of requirement was
    expected. `hint` states what to write instead, or is None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class _Parts(Struct, frozen=True, kw_only=True):
    name: str | None = None
    count: tuple[int, int | None] | None = None
    part: float = 1.0
    memory: tuple[int | None, int | None] | None = None
    share_mib: int | None = None
    profile: str = ""
    isolated: bool = False


def parse_accelerator(text: str | int) -> tuple[AcceleratorNeed, ...]:
    """Parse a requirement into alternatives with canonical names. Raises NeedError."""
    if other := next((each for each in str(text) if each.isdigit() and not is_whole(each)), ""):
        raise NeedError(f"{str(text)[:40]!r} has the digit {other!r}", "write the digits 0 to 9")
    alternatives = [part.strip() for part in str(text).split("|")]
    if not all(alternatives) or isinstance(text, bool):
        raise NeedError(
            f"expected accelerators such as H100:8, A100:80GB:1..4 or 24GB, not {str(text)!r}"
        )
    needs: list[AcceleratorNeed] = []
    after = _Parts()
    for part in map(_parse_alternative, reversed(alternatives)):
        full = part if part.count else _take_size(part, after)
        needs.append(_need(full))
        after = full
    return tuple(reversed(needs))


def _take_size(parts: _Parts, after: _Parts) -> _Parts:
    """Return an alternative without a count, with the count or the share of the next one."""
    return copy_fields(parts, after, "count", "part", "share_mib", "profile")


def format_need(need: AcceleratorNeed) -> str:
    """Format a requirement for messages. The result is the shortest text from which
    `parse_accelerator` creates an equal requirement.
    """
    count = str(need.count_min)
    if need.count_max is not None and need.count_max != need.count_min:
        count += ".." if need.count_max >= MOST else f"..{need.count_max}"
    if instance := split_instance(need.name or ""):
        return ":".join(filter(None, [*instance, "isolated" if need.isolated else ""]))
    if need.share_mib is not None:
        count = f"share={_size(need.share_mib)}"
    elif need.part < 1:
        nearest = Fraction(need.part).limit_denominator(64)
        count = str(nearest if float(nearest) == need.part else need.part)
    parts = [need.name or "any", _format_memory(need), count, "isolated" if need.isolated else ""]
    return ":".join(filter(None, parts))


def _format_memory(need: AcceleratorNeed) -> str:
    low, high = need.memory_min_mib, need.memory_max_mib
    if low is None and high is None:
        return ""
    is_open = need.name is None or _is_group(need.name)  # a size alone is then a minimum
    if low is not None and (high is None if is_open else low == high):
        return _size(low)
    return f"{_size(low) if low is not None else ''}..{_size(high) if high is not None else ''}"


def _size(mib: int) -> str:
    return f"{mib // 1024}GB" if mib % 1024 == 0 else f"{mib}MB"


def _parse_alternative(text: str) -> _Parts:
    parts = _Parts()
    if _HUGE.search(text):
        raise NeedError(f"a number in {text[:40]!r} is too large", "a number has at most 9 digits")
    for piece in (piece.strip() for piece in text.split(":")):
        if piece.lower() == "isolated":
            parts = replace(parts, isolated=True)
            continue
        if not piece:
            raise NeedError(
                f"{text!r} has an empty part between colons",
                "write the accelerator as NAME:MEMORY:COUNT, such as A100:80GB:8",
            )
        parts = _add(parts, piece, text)
    return parts


def _add(parts: _Parts, piece: str, text: str) -> _Parts:
    if shared := _add_share(parts, piece, text):
        return shared
    if _COUNT.fullmatch(piece) or _PART.fullmatch(piece) or count_chips(piece):
        if parts.count is not None:
            raise NeedError(
                f"{text!r} has two counts", "write memory with its unit, such as A100:80GB:8"
            )
        if _PART.fullmatch(piece):
            return replace(parts, count=(1, None), part=_part(piece))
        return replace(
            parts, count=(chips, None) if (chips := count_chips(piece)) else _count(piece)
        )
    if (tpu := find_slice(piece)) and parts.count is None and parts.name is None:
        return replace(parts, name=tpu.accelerator, count=(tpu.chips, None))
    if _is_memory(piece):
        if parts.memory is not None:
            raise NeedError(f"{text!r} has two memory sizes", "write a range as 40GB..80GB")
        return replace(parts, memory=_memory(piece))
    if _MIXED.fullmatch(piece):
        raise NeedError(
            f"{piece!r} in {text!r} is neither a count nor a fraction",
            "write a whole number for several GPUs, such as 2, or a fraction of one GPU between 0 "
            "and 1, such as 0.5",
        )
    if re.fullmatch(r"[\d.]+\+|-\d+|[\d.]+|\d+-\d+", piece):
        raise NeedError(
            f"{piece!r} in {text!r} is not a count",
            "write a number such as 8, or a range: 1..4, 2.. (at least two) or ..4 (at most four)",
        )
    if parts.name is not None and not _is_group(parts.name):
        raise NeedError(
            f"{text!r} names both {parts.name!r} and {piece!r}",
            "separate alternatives with |, as in H100:8|A100:8; write memory with a unit, as in "
            "80GB",
        )
    return replace(parts, name=_name(piece, text))


def _add_share(parts: _Parts, piece: str, text: str) -> _Parts | None:
    """Add a MIG profile or the memory of a share. Return None if the piece is neither."""
    share, profile = _SHARE.fullmatch(piece), PROFILE.fullmatch(piece.lower())
    if not share and not profile:
        return None
    if parts.count is not None:
        what = "a share" if share else "a MIG profile"
        raise NeedError(f"{text!r} has both a count and {what}", "delete the count")
    if profile:
        return replace(parts, count=(1, None), profile=piece.lower())
    assert share is not None
    return replace(parts, count=(1, None), share_mib=_share(share[1]))


def _name(piece: str, text: str) -> str:
    if piece.lower() == "any":
        return "any"
    if _is_group(piece):
        return piece.lower()
    if not is_known(piece):
        close = suggest(piece)
        if times := _TIMES.fullmatch(piece):  # as in 8xH100 and H100x8
            name, count = times[2] or times[3], times[1] or times[4]
            close = f"{_canonical(name)}:{count}" if is_known(name) else close
        hint = (
            f"did you mean {close}?"
            if close
            else "`cavvy offers --accelerators` lists the known names"
        )
        raise NeedError(
            f"unknown accelerator {piece!r}" + (f" (in {text!r})" if piece != text else ""),
            hint,
        )
    return piece


def _is_group(name: str) -> bool:
    return name.lower() in {*AcceleratorKind, *Vendor, "any"}


def _count(piece: str) -> tuple[int, int | None]:
    low, dots, high = (part.strip() for part in piece.partition(".."))
    least = int(low or 1)
    most = None if not dots else int(high) if high else MOST
    if least < 1 or (most is not None and most < least):
        raise NeedError(
            f"{piece!r} is not a count",
            "a count must be at least 1, and a range must begin with its smaller number; a part of "
            "one GPU is a fraction such as 0.5",
        )
    return least, None if most == least else most


def _part(piece: str) -> float:
    try:
        part = float(Fraction(piece))
    except (ZeroDivisionError, OverflowError, ValueError):
        # ValueError is raised for more than 4,300 digits.
        part = 0
    if not _SMALLEST <= part < 1:
        raise NeedError(
            f"{piece!r} is not a fraction of an accelerator",
            f"a fraction is between 0 and 1, and at least {_SMALLEST:g}, such as 0.5",
        )
    return part


def _share(text: str) -> int:
    """Return the memory of a share in MiB."""
    try:
        found = parse_memory_mib(text) if text[-1:].isalpha() else 0
    except UnitError as error:
        raise NeedError(str(error)) from None
    if not found:
        raise NeedError(
            f"{text!r} is not a share of a GPU",
            "write the memory with its unit, as in share=10GB, or a fraction, as in A100:0.25",
        )
    return found


def _is_memory(piece: str) -> bool:
    ends = [end.strip() for end in piece.split("..")]
    return (
        len(ends) <= 2
        and any(ends)
        and all(_SIZE.fullmatch(end) for end in ends if end)
        and _has_unit(ends)
    )


def _has_unit(ends: list[str]) -> bool:
    return any(end[-1:].isalpha() for end in ends)


def _memory(piece: str) -> tuple[int | None, int | None]:
    low, dots, high = (part.strip() for part in piece.partition(".."))
    try:
        least = parse_memory_mib(low) if low else None
        most = parse_memory_mib(high) if high else None
    except UnitError as error:
        raise NeedError(str(error)) from None
    if least is not None and most is not None and most < least:
        raise NeedError(f"{piece!r} is not a memory range", "write the smaller size first")
    if most == 0 or (not dots and least == 0):
        raise NeedError(f"{piece!r}: no accelerator has a memory of 0", "write a size such as 40GB")
    return (
        (least, most) if dots else (least, -1)
    )  # -1 marks a single size. `_need` decides by the name whether a single size is exact.


def _need(parts: _Parts) -> AcceleratorNeed:
    low, high = parts.memory or (None, None)
    name = parts.name or "gpu"
    if name == "any" and (parts.part < 1 or parts.share_mib is not None):
        name = "gpu"  # only GPUs are divided
    if high == -1:
        high = None if _is_group(name) else low
    known = None if _is_group(name) else find_accelerator(name)
    if known and known.memory_mib is not None and parts.memory is None:
        low = high = known.memory_mib
    if parts.profile:
        return _instance(parts, name)
    least, most = parts.count or (1, None)
    part = _smallest_part(parts, name) if parts.share_mib else parts.part
    _check_part(parts, name, high)
    if parts.share_mib is not None and (low is None or low < parts.share_mib):
        low = parts.share_mib  # so that a rented GPU or part has the memory, too
    return AcceleratorNeed(
        name=None if name == "any" else _canonical(name),
        count_min=least,
        count_max=most,
        memory_min_mib=low,
        memory_max_mib=high,
        part=part,
        share_mib=parts.share_mib,
        isolated=parts.isolated,
    )


def _instance(parts: _Parts, name: str) -> AcceleratorNeed:
    """Return the need for a MIG instance. It counts as its part of the GPU's memory."""
    known = None if _is_group(name) else find_accelerator(name)
    if known is None or (known.accelerator.vendor, known.accelerator.kind) != (
        Vendor.NVIDIA,
        AcceleratorKind.GPU,
    ):
        raise NeedError(
            f"the MIG profile {parts.profile} needs the name of one of NVIDIA's GPUs",
            f"write the name, as in A100:{parts.profile}",
        )
    if parts.memory is not None:
        raise NeedError(
            f"the MIG profile {parts.profile} already states a memory", "delete the memory"
        )
    family = known.accelerator.family
    memory_mib, largest = instance_memory_mib(parts.profile), (_memory_sizes(name) or [0])[-1]
    if largest and memory_mib > largest:
        raise NeedError(
            f"no {name} has an instance with the profile {parts.profile}: its memory is "
            f"{_size(largest)}",
            "`nvidia-smi mig -lgip` on the host lists the profiles of its GPUs",
        )
    profiles = [each.name for table in find_tables(family) for each in table.profiles]
    if profiles and plain_profile(parts.profile) not in profiles:
        raise NeedError(
            f"no {name} has instances with the profile {parts.profile}",
            f"write one of {', '.join(dict.fromkeys(profiles))}",
        )
    return AcceleratorNeed(
        name=name_instance(known.accelerator.family, parts.profile),
        part=memory_mib / largest if largest else 1.0,
        isolated=parts.isolated,
    )


def _check_part(parts: _Parts, name: str, most_mib: int | None) -> None:
    """Raise NeedError if the accelerator cannot be divided as requested."""
    if parts.part == 1 and parts.share_mib is None:
        if parts.isolated:
            raise NeedError(
                "isolation applies only to a part of a GPU, because whole GPUs are never shared",
                "delete the isolation, or request a part such as A100:0.25",
            )
        return
    known = None if _is_group(name) else find_accelerator(name)
    kind = known.accelerator.kind if known else name.lower()
    if kind in set(AcceleratorKind) - {AcceleratorKind.GPU} or name.lower() in _UNDIVIDED:
        raise NeedError(
            f"{name} cannot be divided: only GPUs have fractions",
            f"write a whole number, as in {name}:1",
        )
    largest = most_mib or (_memory_sizes(name) or [0])[-1]
    if parts.share_mib is not None and largest and parts.share_mib > largest:
        raise NeedError(
            f"a share of {_size(parts.share_mib)} is larger than the memory of {name} "
            f"({_size(largest)})",
            "request a smaller share, or whole GPUs",
        )


def _smallest_part(parts: _Parts, name: str) -> float:
    """Return the smallest part of an accelerator of this name that has the memory of the share."""
    low, high = parts.memory or (None, None)
    if high == -1:  # a single size
        high = None if _is_group(name) else low
    largest = high or (_memory_sizes(name) or [0])[-1]
    return min(1.0, (parts.share_mib or 0) / largest) if largest else 1.0


def _memory_sizes(name: str) -> list[int]:
    """Return the memory sizes in MiB of all GPUs that the name stands for, in ascending order."""
    known = None if _is_group(name) else find_accelerator(name)
    if known and known.memory_mib is not None:
        return [known.memory_mib]
    families = {known.accelerator.family} if known else None
    return sorted(
        size.mib
        for row in list_accelerators()
        if row.kind is AcceleratorKind.GPU
        and (families is None or row.family in families)
        and (name.lower() not in set(Vendor) or row.vendor == name.lower())
        for size in row.memory
    )


def _canonical(name: str) -> str:
    """Return the canonical spelling of a product or family. H100-SXM keeps its suffix, because H100
    alone stands for the whole family.
    """
    if _is_group(name):
        return name
    known = find_accelerator(name)
    if known is None:
        return name
    row = known.accelerator
    if (
        row.name == row.family
        and len(names_matching(row.family)) > 1
        and names_matching(name) == {row.name}
    ):
        return f"{row.name}-SXM"
    return row.name
