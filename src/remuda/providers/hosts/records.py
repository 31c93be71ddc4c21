"""Records on disk: small JSON files that appear whole or not at all."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """What an agent wrote to `exit.json` when its work was over; fields that a place does not need are ignored."""

    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""


def write(path: Path, value: object) -> None:
    """Write a record in one piece, readable by its user only. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError:  # a full disk must not leave a torn file behind
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read(path: Path, kind: type[_T]) -> _T | None:
    """A record; None where there is none or it makes no sense (records are written whole, so somebody changed it)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
