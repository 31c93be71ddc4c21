"""The field `resources.gpu`: the accelerators of each node, written in one line or as a table."""

import re
from collections.abc import Sequence
from enum import StrEnum

from cavvy.domain.tasks import AcceleratorNeed
from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    SectionReader,
    WrongValue,
    choice,
    filled,
    section,
    text_kind,
)
from cavvy.spec.problems import shown


class ShareIsolation(StrEnum):
    """Whether a part of a GPU must be protected from the work on the rest of the GPU."""

    NONE = "none"
    REQUIRED = "required"


def _accelerators(text: str) -> tuple[AcceleratorNeed, ...]:
    from cavvy.catalog.needs import NeedError, parse_accelerator

    try:
        return parse_accelerator(text)
    except NeedError as error:
        hint = error.hint or ""
        raise WrongValue(str(error).removesuffix(f"; {hint}"), suggestion=hint) from error


def read_device(text: str) -> str:
    """Parse the devices of one node: accelerators such as A100:8 or A100:80GB:8, or CPUs such as
    cpu or cpu:16. Returns a key of `work.rates`. Raises WrongValue.
    """
    if re.fullmatch(r"cpu(:[1-9][0-9]{0,4})?", plain := filled(text).strip().lower()):
        return plain
    key = name_device(_accelerators(text))
    if key is None:
        raise WrongValue(f"{shown(text)} does not state exactly one accelerator and count")
    return key


def name_device(needs: Sequence[AcceleratorNeed]) -> str | None:
    """Return the key of `work.rates` that belongs to `needs`, such as A100-80GB:8. Returns None if
    `needs` accepts several accelerators or counts.
    """
    from cavvy.catalog.accelerators import find_accelerator

    if len(needs) != 1 or not needs[0].name or not find_accelerator(needs[0].name):
        return None
    [need] = needs
    low, high = need.memory_min_mib, need.memory_max_mib
    if need.count_max not in (None, need.count_min) or low != high or need.part < 1:
        return None
    return f"{need.name}{f'-{low // 1024}GB' if low else ''}:{need.count_min}"


def _no_colon(text: str) -> str:
    if ":" in filled(text):
        raise WrongValue(
            f"{shown(text)} contains a colon, but `name` accepts only an accelerator's name",
            suggestion="write `gpu: NAME:COUNT`, or use the keys `name`, `memory` and `count`",
        )
    return text.strip()


def _read_share(text: str) -> str:
    plain = _no_colon(text)
    if re.fullmatch(r"0?\.[0-9]+|[0-9]+/[0-9]+|[1-9]g\.[1-9][0-9]*gb.*", plain, re.IGNORECASE):
        return plain
    if "=" in plain or not re.fullmatch(r"[0-9].*[a-z]", plain, re.IGNORECASE):
        raise WrongValue(
            f"{shown(text)} is not a part of one GPU",
            suggestion="write a fraction such as 0.25, or memory with its unit, such as 10GB; "
            "`count` is for whole GPUs",
        )
    return f"share={plain}"


def _build(table: SectionReader) -> tuple[AcceleratorNeed, ...]:
    names, count, memory = table.get("name"), table.get("count"), table.get("memory")
    share: str | None = table.get("share")
    if share and count:
        table.wrong("share", "`count` and `share` exclude each other", suggestion="delete `count`")
        return ()
    isolated = "isolated" if table.get("isolation") is ShareIsolation.REQUIRED else None
    if memory and re.fullmatch(r"[0-9.]+", memory) and ".." not in memory:
        # In the table form, a number without a unit is in GiB, as in other keys; in the one-line
        # form, it is a count.
        memory += "GB"
    if table.has("name") and not names:
        return ()
    needs: list[AcceleratorNeed] = []
    for name in names or ("any",):
        try:
            parts = (name, memory, count or share, isolated)
            needs += _accelerators(":".join(part for part in parts if part))
        except WrongValue as error:
            table.notes.add(table.node.mark, str(error), suggestion=error.suggestion)
    return tuple(needs)


_TABLE = section(
    "resources.gpu",
    _build,
    name=ListKind(text_kind("an accelerator's name such as H100", _no_colon), single=True),
    count=text_kind("a count such as 8 or 1..4", numbers=True),
    memory=text_kind("memory such as 40GB or 40GB..80GB", _no_colon, numbers=True),
    share=text_kind(
        "the part of one GPU, as a fraction such as 0.25, memory such as 10GB, or a MIG profile",
        _read_share,
        numbers=True,
    ),
    isolation=choice(ShareIsolation),
)
_LINE = text_kind(
    "an accelerator such as H100:8, A100:40GB..80GB:1..4 or A100:80GB, or a list of alternatives",
    lambda text: _accelerators(filled(text)),
)
ACCELERATORS = ListKind(EitherKind((_LINE, _TABLE)), single=True, flat=True)
