"""The ranks of this run: their numbers, their process groups, and the values that they exchange in
each step.
"""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not list them
    PrefixStore,
    TCPStore,
)

from cavvy.train.device import TrainDevice, pick
from cavvy.train.failures import FailureWatch

# a variable that is set by a program that runs again in the same process
ATTEMPT = "CAVVY_TRAIN_ATTEMPT"
PATIENCE = timedelta(minutes=10)  # maximum time that a collective waits for another rank
T = TypeVar("T")


class RankWorld:
    """One of `size` ranks. Small values are exchanged over gloo (on the CPU), so that accelerators
    do not have to wait.
    """

    def __init__(self, device: str = "auto") -> None:
        rank, size, local = _place()
        self.rank, self.size = rank, size
        self.device: TrainDevice = pick(device, local)
        self._ours = False
        self._facts: Any = None
        self._files: Any = None
        if size > 1 or dist.is_initialized():
            self._join(rank, size)
        self._failures = self._watch_failures()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def can_join_again(self) -> bool:
        """Whether this program can run again in the same process. A restart requires that torchrun
        started the program and holds the rendezvous store, and that this class joined the process
        group.
        """
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self._ours and held and "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def file_group(self) -> Any:
        """The gloo group of the thread that writes checkpoints; None for a single rank."""
        return self._files

    def agree(self, facts: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks. All ranks must call this method."""
        if self.size == 1:
            return list(facts)
        shared = torch.tensor(list(facts), dtype=torch.int64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._facts)
        return [int(n) for n in shared.tolist()]

    def least(self, fact: int) -> int:
        return -self.agree([-fact])[0]

    def gather(self, fact: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. All ranks must call this method."""
        if self.size == 1:
            return [fact]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, fact, group=self._facts)
        return said

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work`, which reads or writes checkpoints, on all ranks. Returns the results of all
        ranks, in rank order. All ranks must call this method, with only one thread of each rank at
        a time.

        Raises: RuntimeError: the work failed on at least one rank. All ranks raise this error.
        """
        if self._files is None:
            return [work()]
        result: T | None = None
        fault, cause = "", None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - all ranks raise this error below
            fault, cause = str(error) or repr(error), error
        said: list[Any] = [None] * dist.get_world_size(self._files)
        dist.all_gather_object(said, (result, fault), group=self._files)
        for rank, (_, text) in enumerate(said):
            if text:
                raise RuntimeError(f"rank {rank}: {text}") from cause
        return [each for each, _ in said]

    def tell(self, fact: Any) -> Any:
        """Return the value that rank 0 passed. All ranks must call this method."""
        if self.size == 1:
            return fact
        said = [fact]
        dist.broadcast_object_list(said, src=0, group=self._facts)
        return said[0]

    def close(self) -> None:
        """Wait for all ranks, then destroy the process groups. The threads of a group that still
        exists can abort a process that has finished.
        """
        if self._ours and dist.is_initialized():
            self.agree([0])
        self.leave()

    def leave(self) -> None:
        """Destroy the process groups immediately, so that the collectives of other ranks fail
        instead of waiting.
        """
        self._failures.close()
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
        self._ours, self.size = False, 1

    def _join(self, rank: int, size: int) -> None:
        if not dist.is_initialized():
            kind = self.device.torch.type
            backend = (
                "gloo"
                if kind == "cpu"
                else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
            )
            if os.environ.get("LOCAL_WORLD_SIZE") == str(size) and sys.platform == "linux":
                os.environ.setdefault(
                    "GLOO_SOCKET_IFNAME", "lo"
                )  # All ranks are on this machine, but its name may resolve to another address.
            own: dict[str, Any] = {"device_id": self.device.torch} if kind == "cuda" else {}
            if run := _name_rerun(size):
                own["store"] = _open_store(run)
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE, **own)
            self._ours = True
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._facts = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._files = dist.new_group(backend="gloo", timeout=timedelta(hours=2))

    def _watch_failures(self) -> FailureWatch:
        if self.size == 1:
            return FailureWatch(None, self.rank, self.size)
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.distributed_c10d._get_default_store()
        # Torchrun keeps its store when it restarts the ranks, so it still contains earlier
        # failures.
        store = PrefixStore(self.tell(uuid4().hex), store)
        return FailureWatch(store, self.rank, self.size, ours=not held)


def _name_rerun(size: int) -> str:
    """Return a name for this start of the program, which differs from the names of earlier starts.
    The name is "" if this is the first start with torchrun's store. Several starts can share one
    store of torchrun: a program can start again in the same process, and torchrun can restart the
    ranks. The restart counts of torchrun are not used, because they can differ between nodes.
    """
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node and held else "0"
    attempt = os.environ.get(ATTEMPT, "0")
    return "" if restarts == attempt == "0" else f"{restarts}-{attempt}"


def _open_store(run: str) -> Any:
    """Return the store of torchrun. The store's keys get a new prefix for this run, because the
    keys of earlier runs refer to closed connections.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=PATIENCE)
    return PrefixStore(f"cavvy-{run}", store)


def _place() -> tuple[int, int, int]:
    """Return the rank, the number of ranks, and the rank within this node. The ranks and the number
    of ranks are read from variables that torchrun sets or, for jobs with one process per node, that
    Cavvy sets.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    if (
        int(env.get("NNODES", "1")) > 1
        and env.get("NPROC_PER_NODE", "1") == "1"
        and "MASTER_ADDR" in env
    ):
        return int(env["NODE_RANK"]), int(env["NNODES"]), 0
    return 0, 1, 0
