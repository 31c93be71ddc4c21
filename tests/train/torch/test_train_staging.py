"""Batches that a thread copies to the device ahead of their use."""

import subprocess
import sys
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from tests.waits import PATIENCE_S

from cavvy import train
from cavvy.train import run as runs
from cavvy.train.data import staging
from cavvy.train.data.staging import StagedBatches, open_batches

SIZE = 20


class FakeStream:
    """Records what is done on a stream, and by which thread. A batch must be marked before its
    event is waited for.
    """

    def __init__(self) -> None:
        self.thread: Any = None
        self.marked = 0
        self.waited: list[tuple[int, Any]] = []

    def begin(self) -> None:
        self.thread = threading.current_thread()

    def mark(self) -> int:
        assert threading.current_thread() is self.thread
        self.marked += 1
        return self.marked

    def wait(self, event: int, values: Any) -> None:
        assert threading.current_thread() is not self.thread
        assert event <= self.marked
        self.waited.append((event, values))


class Numbers:
    """The numbers from 0 on as batches. `closed` is set when the generator has ended."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.moved: list[Any] = []
        self.closed = threading.Event()

    def batches(self) -> Generator[Any]:
        try:
            yield from range(self.count)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()

    def move(self, values: Any) -> Any:
        self.moved.append(threading.current_thread())
        return values * 10


def read_all(batches: Any) -> list[Any]:
    found = []
    while (values := batches.read()) is not None:
        found.append(batches.place(values))
    return found


def test_batches_come_in_order_from_another_thread_each_after_its_event() -> None:
    numbers, stream = Numbers(SIZE), FakeStream()
    batches = StagedBatches(numbers.batches(), numbers.move, stream)
    assert read_all(batches) == [10 * n for n in range(SIZE)]
    assert stream.waited == [(n + 1, 10 * n) for n in range(SIZE)]
    assert set(numbers.moved) == {stream.thread}
    assert batches.read() is None
    assert numbers.closed.is_set()


def test_an_error_of_the_data_is_raised_where_batches_are_read() -> None:
    numbers = Numbers(2, ValueError("planted"))
    batches = StagedBatches(numbers.batches(), numbers.move, FakeStream())
    assert [batches.place(batches.read()) for _ in range(2)] == [0, 10]
    with pytest.raises(ValueError, match="planted"):
        batches.read()
    assert batches.read() is None


def test_few_batches_are_ahead_and_a_loop_that_ends_early_ends_the_thread() -> None:
    numbers, stream = Numbers(SIZE), FakeStream()
    batches = StagedBatches(numbers.batches(), numbers.move, stream)
    assert batches.place(batches.read()) == 0
    batches.close()
    assert numbers.closed.wait(PATIENCE_S)
    assert not stream.thread.is_alive()
    assert len(numbers.moved) <= 4
    batches.close()


class SilentSource:
    """A data source that does not answer, until `answer` is set."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def batches(self) -> Generator[Any]:
        yield 0
        self.asked.set()
        self.answer.wait(PATIENCE_S)
        yield 1


def test_a_source_that_does_not_answer_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "END_S", 0.1)
    source, stream = SilentSource(), FakeStream()
    batches = StagedBatches(source.batches(), lambda values: values, stream)
    assert source.asked.wait(PATIENCE_S)
    closer = threading.Thread(target=batches.close, daemon=True)
    closer.start()
    closer.join(PATIENCE_S / 2)
    held = closer.is_alive()
    source.answer.set()
    stream.thread.join(PATIENCE_S)
    assert not held
    assert not stream.thread.is_alive()


def test_an_error_in_closing_the_data_is_raised_where_batches_are_read() -> None:
    class Unclosable:
        def __init__(self) -> None:
            self.left = [0]

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop()

        def close(self) -> None:
            raise OSError("planted")

    unclosable: Any = Unclosable()
    batches = StagedBatches(unclosable, lambda values: values, FakeStream())
    told: list[Any] = []

    def read() -> None:
        with pytest.raises(OSError, match="planted"):
            read_all(batches)
        told.append(True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE_S / 2)
    assert told


def test_an_interpreter_that_ends_with_open_batches_ends_their_thread() -> None:
    code = (
        "import atexit, itertools, threading, torch\n"
        "from cavvy.train.data.staging import StagedBatches\n"
        "from tests.train.torch.test_train_staging import FakeStream\n"
        "def look():\n"
        "    names = [each.name for each in threading.enumerate()]\n"
        "    print('batch stager' in names)\n"
        "atexit.register(look)\n"  # runs after the functions that are registered later
        "batches = StagedBatches((n for n in itertools.count()), str, FakeStream())\n"
        "raise KeyError('planted')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (1, "False"), ended.stderr


def test_a_run_learns_the_same_from_staged_batches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[FakeStream] = []

    def stage(batches: Any, move: Any, device: Any) -> Any:
        used.append(FakeStream())
        return StagedBatches(batches, move, used[-1])

    losses = {}
    for name, make in (("direct", open_batches), ("staged", stage)):
        monkeypatch.setattr(runs, "open_batches", make)
        run = train.Run(tmp_path / name, plan=train.Plan(), device="cpu", save_every=1e9)
        model = run.model(lambda: torch.nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        x = torch.arange(60.0).view(SIZE, 3) / 60
        data = run.data(train.Tensors(x), global_batch=4)
        losses[name] = []
        for batch in run.batches(data, epochs=2):
            value = run.accumulate(lambda part, model=model: model(part[0]).square().mean(), batch)
            losses[name].append(float(value))
            run.step(optimizer)
        run.close()
    assert losses["staged"] == losses["direct"]
    assert len(used[0].waited) == len(losses["direct"]) == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_gpu_gets_the_values_of_each_batch() -> None:
    device = torch.device("cuda", 0)
    values = [torch.full((1 << 22,), float(n)) for n in range(SIZE)]

    def move(value: Any) -> Any:
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        return value.pin_memory().to(device, non_blocking=True)

    batches = open_batches((value for value in values), move, device)
    sums = []
    while (value := batches.read()) is not None:
        sums.append(batches.place(value).sum())
    assert [float(each) for each in sums] == [n * float(1 << 22) for n in range(SIZE)]
