"""Saves write with several threads, and copies of many small tensors are one operation each."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.utils._python_dispatch import TorchDispatchMode

from cavvy import train
from cavvy.train.checkpoint import store
from cavvy.train.parallel.reduce import GradientReducer
from cavvy.train.step import ModelBuffers

HANG_S = 60  # only for a defect: without it, a save with too few threads would wait forever
LAYERS = 24


class CopyCount(TorchDispatchMode):
    """Counts the operations that write a tensor into another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch declares it
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in func._schema.name:
            self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def save(folder: Path) -> list[str]:
    """Save a run with 64 KiB of state. Return the names of the checkpoint's data files."""
    made = train.Run(folder, plan=train.Plan(), device="cpu", save_every=1e9)
    made.model(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    made.optimizer(torch.optim.SGD, lr=0.1)
    made.save()
    made.close()
    found = store.find_latest(folder)
    assert found is not None
    return sorted(each.name for each in found.path.glob("*.distcp"))


@pytest.mark.parametrize("threads", [2, store.MOST_THREADS])
def test_a_save_writes_its_files_at_the_same_time(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(threads, timeout=HANG_S)
    wrote: dict[str, int] = {}
    create = FileSystem.create_stream

    @contextmanager
    def wait_for_others(self: Any, path: Any, mode: str) -> Iterator[Any]:
        """Open a file only when as many threads as expected want to write a file."""
        if str(path).endswith(".distcp"):
            wrote[str(path)] = threading.get_ident()
            together.wait()
        with create(self, path, mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", wait_for_others)
    monkeypatch.setattr(store, "THREAD_BYTES", 2**16 // threads)
    assert len(save(tmp_path / "run")) == threads
    assert len(set(wrote.values())) == threads


def test_a_small_state_is_written_to_one_file(tmp_path: Path) -> None:
    assert len(save(tmp_path / "run")) == 1


def test_the_number_of_threads_grows_with_the_state_up_to_a_limit() -> None:
    part = torch.empty(store.THREAD_BYTES, dtype=torch.uint8, device="meta")
    found = [store.count_threads({"a": [part] * number}) for number in (0, 1, 2, 3, 4, 100)]
    assert found == [1, 1, 2, 3, 4, store.MOST_THREADS]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    where = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_of_a_bucket_are_copied_by_one_operation_each_way(group: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    reducer = GradientReducer(list(model.parameters()), group)
    loss = model(torch.ones(2, 4)).sum()
    reducer.arm()
    with CopyCount() as count:
        loss.backward()
        reducer.finish()
    assert count.seen == {"_foreach_copy_": 2}


def test_gradients_that_only_some_parameters_have_are_copied_by_one_operation(group: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    reducer = GradientReducer(list(model.parameters()), group)
    loss = model[: LAYERS // 2](torch.ones(2, 4)).sum()
    reducer.arm()
    loss.backward()
    with CopyCount() as count:
        reducer.finish()
    # The second operation copies the marks of the parameters with a gradient.
    assert count.seen == {"_foreach_copy_": 2, "copy_": 1}


def test_buffers_are_kept_and_restored_by_one_operation_each() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(LAYERS)))
    before = {name: value.clone() for name, value in model.named_buffers()}
    buffers = ModelBuffers(model, None)
    with CopyCount() as count:
        buffers.keep()
    model(torch.randn(8, 4))
    with count:
        buffers.undo()
    assert count.seen == {"_foreach_copy_": 2}
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
