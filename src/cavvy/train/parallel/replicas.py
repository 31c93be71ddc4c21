"""Keeps the copies of a model equal. All ranks begin with the first rank's values of parameters and
buffers. If one rank's copy later differs from the copies of the other ranks, Cavvy reports the
difference.

Tensors are compared by fingerprints. A fingerprint is one number per tensor: the sum of its bits as
integers. Equal copies stay equal in every bit, because each rank applies the same summed gradients.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cavvy.train.parallel.reduce import local
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
AXES = ("pipeline", "replicas", "shards", "tensor")
EVERY = 100  # number of batches between two comparisons; each comparison reads all parameters once
NONE = -(2**63)  # a placeholder for the facts of other ranks, which are always larger
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
Tensors = dict[str, Any]


class RanksDiverged(RuntimeError):
    """Raised if the ranks no longer train the same model. The newest checkpoint was saved before
    the ranks' models became different.
    """


class ReplicaCheck:
    """Compares the parameters on this rank with the copies on other ranks."""

    def __init__(self, model: Any, mesh: Any, world: RankWorld) -> None:
        self._mesh, self._world, self._model = mesh, world, model
        self._has_copies = mesh is not None and mesh["replicas"].size() > 1
        self._batches = 0

    @property
    def _named(self) -> Tensors:
        return dict(self._model.named_parameters())

    def due(self) -> bool:
        """Count a batch. Returns whether the copies must be compared after this batch: after the
        first step, and then once in every EVERY batches. The returned value is the same on all
        ranks.
        """
        self._batches += 1
        return self._has_copies and self._batches % EVERY == 2

    def facts(self) -> list[int]:
        """Return this rank's fingerprint for `are_equal`. The list has two entries for each part of
        a split model.
        """
        pipeline, _, shards, tensor = self._mesh.mesh.shape
        stage, _, shard, column = self._mesh.get_coordinate()
        part = (stage * shards + shard) * tensor + column
        facts = [NONE] * (2 * pipeline * shards * tensor)
        total = int(fingerprints(self._named.values()).sum())
        facts[2 * part : 2 * part + 2] = total, ~total
        return facts

    def compare(self) -> None:
        """Compare the copies now. All ranks must call this method.

        Raises: RanksDiverged: some copies differ.
        """
        if self._has_copies and not are_equal(self._world.agree(self.facts())):
            self.explain()

    def explain(self) -> None:
        """Find the differing ranks and parameters, and raise an error with their names.

        Raises: RanksDiverged: always.
        """
        named = self._named
        odd = {
            name: ranks
            for name, prints in _gather(named, self._mesh, ("replicas",), self._world).items()
            if (ranks := _odd(prints))
        }
        first = sorted(self._world.gather(next(iter(odd.items()), None)), key=lambda one: not one)
        name, ranks = first[0] or ("a parameter", [])
        raise RanksDiverged(
            f"rank {' and '.join(map(str, ranks))}: the copy of parameter {name!r} differs from "
            f"the other ranks ({len(odd)} of {len(named)} parameters differ). Every rank must "
            "update its model equally: calls of run.step, the learning rate and changes of "
            "parameters must not depend on the rank or on the rank's share of the batch. "
            "run.accumulate returns the same loss on all ranks. The checkpoints that were saved "
            "before are still correct"
        )


def are_equal(maxima: Sequence[int]) -> bool:
    """Return whether all ranks passed the same facts. For each fact, `maxima` contains two numbers:
    the highest value on any rank, and the highest value of the inverted bits (~fact), from which
    the lowest value follows.
    """
    return all(high == ~low for high, low in zip(maxima[::2], maxima[1::2], strict=True))


def fingerprints(tensors: Any) -> Any:
    """Return one 64-bit number for each tensor, or for the local part of a split tensor. The
    returned numbers are in CPU memory.
    """
    sums = [
        local(each).detach().view(INTEGERS[each.element_size()]).sum(dtype=torch.int64)
        for each in tensors
    ]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def align(named: Tensors, axes: Sequence[str], mesh: Any, world: RankWorld) -> None:
    """Send the first rank's values to all ranks along these axes of the mesh. Only tensors that
    differ between the ranks are sent. All ranks must call this function.

    Raises: ValueError: the ranks have different tensors.
    """
    if mesh is None:
        return
    odd, mine = [], []
    for name, prints in _gather(named, mesh, axes, world).items():
        if None in prints.values():
            absent = next(rank for rank, value in prints.items() if value is None)
            raise ValueError(f"the ranks built different models: rank {absent} has no {name!r}")
        if _odd(prints):
            odd.append(name)
            first = min(prints)
            mine += [name] if prints[world.rank] != prints[first] else []
    for axis in axes:
        group = mesh[axis].get_group()
        for name in odd if mesh[axis].size() > 1 else ():
            values = local(named[name]).to(world.device.torch, copy=True).contiguous()
            dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
            with torch.no_grad():
                local(named[name]).copy_(values)
    if mine:
        text = "rank %d: %d initial tensors (the first is %s) were replaced by tensors of rank %d"
        log.warning(text, world.rank, len(mine), mine[0], first)


def name_tensors(model: Any) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def align_placed(model: Any, mesh: Any, world: RankWorld) -> None:
    """Make all copies of each part of a model equal, after the model is placed on the ranks."""
    named = name_tensors(model)
    split = {name: value for name, value in named.items() if hasattr(value, "device_mesh")}
    align(split, ("replicas",), mesh, world)
    plain = {name: value for name, value in named.items() if name not in split}
    align(plain, ("shards", "replicas"), mesh, world)


def _gather(
    named: Tensors, mesh: Any, axes: Sequence[str], world: RankWorld
) -> dict[str, dict[int, int | None]]:
    """Return the fingerprints of each tensor by rank. The result covers the ranks along the mesh
    dimensions `axes`; a fingerprint is None if the rank has no copy of the tensor.
    """
    mine = dict(zip(named, fingerprints(named.values()).tolist(), strict=True))
    every = world.gather(mine)
    at = mesh.get_coordinate()
    peers = mesh.mesh[
        tuple(slice(None) if axis in axes else n for axis, n in zip(AXES, at, strict=True))
    ]
    ranks = sorted(peers.flatten().tolist())
    names = dict.fromkeys(name for rank in ranks for name in every[rank])
    return {name: {rank: every[rank].get(name) for rank in ranks} for name in names}


def _odd(prints: dict[int, int | None]) -> list[int]:
    """Return the ranks whose fingerprint differs from the most common fingerprint. If two
    fingerprints are equally common, the first rank's fingerprint is used.
    """
    ((usual, _),) = Counter(prints.values()).most_common(1)
    return [rank for rank, value in prints.items() if value != usual]
