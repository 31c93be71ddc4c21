"""Saves a split model after one rank ran out of memory. Without an emergency save, the ranks with
enough memory would wait forever.

The ranks cannot communicate after one of them ran out of memory, so each rank writes its own part
of the last step. The save is used only if the parts of all ranks exist, and the number of ranks and
the plan have not changed. The rank that ran out of memory also writes a note with a micro-batch
that fits. The next attempt trains with the micro-batch from the note, even if the attempt cannot
load the emergency save.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cavvy.train.parallel.reduce import local
from cavvy.train.world import RankWorld

_NOTE = "micro.json"


def note(folder: Path, step: int) -> dict[str, int]:
    """Read the note that a rank wrote because it ran out of memory at this step. Returns the sizes
    of micro-batches that fit into memory, or {} if no rank wrote a note.
    """
    try:
        return dict(json.loads((_path(folder, step) / _NOTE).read_text()))
    except (OSError, ValueError):
        return {}


def write(
    folder: Path,
    step: int,
    world: RankWorld,
    state: Any,
    facts: dict[str, Any],
    micro: dict[str, int],
) -> None:
    """Write this rank's part of the state, unless `state` is None. A rank that ran out of memory
    also writes the sizes in `micro` to a note. Ranks with enough memory pass {} as `micro`.
    """
    part = _path(folder, step) / f"{world.rank}-of-{world.size}.pt"
    half = part.with_suffix(".half")
    part.parent.mkdir(parents=True, exist_ok=True)
    if state is not None:
        tensors = tree_map(
            lambda value: local(value) if isinstance(value, torch.Tensor) else value, state
        )
        with half.open("wb") as file:
            torch.save({"state": tensors, "facts": json.dumps(facts)}, file)
            file.flush()
            os.fsync(file.fileno())
        half.rename(part)
    if micro:
        half.write_text(json.dumps(micro))
        half.rename(part.with_name(_NOTE))


def find(
    folder: Path, world: RankWorld, plan: str, newest: int
) -> tuple[int | None, dict[str, int]]:
    """Find the newest complete emergency save that is newer than the checkpoint `newest`. Returns
    the step of the save (or None) and the micro-batches that fit. Emergency saves that are older
    than `newest`, incomplete or of a different plan are removed.
    """
    step: int | None = None
    micro: dict[str, int] = {}
    for path in sorted(folder.glob("rescue-" + 12 * "[0-9]")):
        if (number := int(path.name[-12:])) < newest:
            shutil.rmtree(path, ignore_errors=True)
            continue
        micro |= note(folder, number)
        parts = [path / f"{rank}-of-{world.size}.pt" for rank in range(world.size)]
        whole = number > newest and all(part.exists() for part in parts)
        if whole and json.loads(_read(parts[0])["facts"])["plan"] == plan:
            step = number
        else:
            for part in parts:
                # An old part could otherwise complete a later emergency save.
                part.unlink(missing_ok=True)
    return step, micro


def load(folder: Path, step: int, world: RankWorld) -> tuple[dict[str, Any], Any]:
    """Read the facts, and this rank's part of the state."""
    found = _read(_path(folder, step) / f"{world.rank}-of-{world.size}.pt")
    return dict(json.loads(found["facts"])), found["state"]


def fill(state: Any, found: Any) -> None:
    """Copy a saved state into the tensors of `state`."""
    for name, value in found.items():
        if isinstance(value, dict):
            fill(state[name], value)
        elif isinstance(value, torch.Tensor):
            local(state[name]).copy_(value)
        else:
            state[name] = value


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"rescue-{step:012d}"
