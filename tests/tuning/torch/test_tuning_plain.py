"""`cavvy tune` for scripts with a plain loop."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cavvy.capabilities.tuning.command import tune_command
from cavvy.capabilities.tuning.probe.levers import _without_waiting
from cavvy.capabilities.tuning.probe.plain import READY, PlainWindows
from cavvy.capabilities.tuning.session import ScriptEnded, ScriptError, TuningSession
from cavvy.capabilities.tuning.text import describe_script_changes
from cavvy.capabilities.tuning.tune import (
    PlanTuner,
    describe_levers,
    list_exact_levers,
    list_fixed,
    list_other_levers,
)

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = str(Path(__file__).parents[2].joinpath("train", "plain.py"))
LOADER = {
    "number": 0,
    "line": "/a/train.py:7",
    "workers": 0,
    "prefetch": 0,
    "pin": False,
    "batch_size": 8,
    "iterable": False,
    "reads": 1,
    "samples": 800,
}
FACTS: dict[str, Any] = {
    "plain": True,
    "name": "cpu",
    "device": "cpu",
    "ranks": 1,
    "cores": 4,
    "tensor_cores": False,
    "samples": 800,
    "global_batch": 8,
    "staged": 0,
    "plan": {"workers": 0, "prefetch": 0, "threads": 0},
    "loader": LOADER,
    "precision": "fp32",
    "images": False,
    "compiled": False,
    "model_line": "/a/train.py:9",
}
GPU = {**FACTS, "device": "cuda", "tensor_cores": True, "images": True}


class Ended(BaseException):
    """Ends a loop, as the end of a session does."""


class Channel:
    """A session that asks for `windows` windows of two steps, and then ends."""

    def __init__(self, folder: Path, windows: int = 1) -> None:
        self.folder, self.said = str(folder), list[dict[str, Any]]()
        self._windows = windows

    def say(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def hear(self) -> dict[str, Any]:
        if not self._windows:
            raise Ended
        self._windows -= 1
        return {"skip": 1, "steps": 2}


class Images(nn.Module):
    """A small model of images, which records the types and formats of its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.conv(x)
        is_last = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        self.seen.append((made.dtype, is_last))
        out: torch.Tensor = self.head(made.mean((2, 3)))
        return out


def train(
    windows: PlainWindows,
    model: nn.Module,
    batches: Callable[[], Any],
    forward: Callable[[Any], torch.Tensor] | None = None,
    every: int = 1,
) -> None:
    """Train with the loop of a script until the session ends it or the batches end. The optimizer
    steps after every `every` batches.
    """
    windows.install()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(), 1):
            loss = nn.functional.cross_entropy((forward or model)(x), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        windows.finish()
    except Ended:
        pass
    finally:
        windows.remove()


def samples(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.ones(count, 3, 5, 5), torch.arange(count) % 2)


def test_a_window_of_a_plain_loop_is_measured(tmp_path: Path) -> None:
    channel = Channel(tmp_path)
    train(PlainWindows(channel, {}), Images(), lambda: DataLoader(samples(), batch_size=2))
    facts, window = channel.said
    assert window["seconds"] > 0
    assert (facts["plain"], facts["global_batch"], facts["samples"]) == (True, 2, 32)
    assert (facts["precision"], facts["images"], facts["compiled"]) == ("fp32", True, False)
    assert Path(facts["loader"]["line"]).name.startswith("test_tuning_plain.py:")
    assert Path(facts["model_line"]).name.startswith("test_tuning_plain.py:")


def test_a_loop_that_ends_says_so(tmp_path: Path) -> None:
    channel = Channel(tmp_path, windows=100)
    train(PlainWindows(channel, {}), Images(), lambda: DataLoader(samples(), batch_size=4))
    assert channel.said[-1] == {"rank": 0, "ended": 8}
    few = Channel(tmp_path)
    train(PlainWindows(few, {}), Images(), lambda: DataLoader(samples(READY - 1)))
    assert few.said == []


def test_levers_act_and_end_with_the_session(tmp_path: Path, monkeypatch: Any) -> None:
    compiled = []

    def compile_eagerly(work: Any) -> Any:
        compiled.append(work)
        return work

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    model, levers = Images(), {"precision": "bf16", "channels_last": True, "compile": True}
    levers |= {"loader": 0, "workers": 1, "batch_size": 4}
    channel = Channel(tmp_path, windows=1)
    before = DataLoader.__init__, torch.Tensor.to, torch.autograd.backward
    train(PlainWindows(channel, levers), model, lambda: DataLoader(samples(), batch_size=2))
    assert (DataLoader.__init__, torch.Tensor.to, torch.autograd.backward) == before
    loader = channel.said[0]["loader"]
    assert (loader["workers"], loader["batch_size"]) == (1, 4)
    assert channel.said[0]["plan"] == {"workers": 1, "prefetch": 2, "threads": 0}
    assert model.seen[0] == (torch.float32, True)
    assert model.seen[-1] == (torch.bfloat16, True)
    assert len(compiled) == 1
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_set(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        train(PlainWindows(Channel(tmp_path), {"precision": "tf32"}), Images(), _in_memory)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def _in_memory() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(2, 3, 5, 5), torch.tensor([0, 1])


def test_a_loop_without_a_data_loader_and_with_its_own_precision(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path), Images()

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = model(x)
        return out

    train(PlainWindows(channel, {}), model, _in_memory, half)
    facts = channel.said[0]
    assert (facts["loader"], facts["global_batch"]) == (None, 2)
    assert facts["precision"] == "torch.bfloat16"
    assert list(list_exact_levers(facts)) == []
    assert all("precision" not in each for each in list_other_levers(facts))
    assert "do not come from a DataLoader" in list_fixed(facts)[0]


def test_the_loader_of_the_loop_is_changed_and_no_other(tmp_path: Path) -> None:
    other = []

    def batches() -> Any:
        other.append(DataLoader(samples(), batch_size=2))  # such as the one of an evaluation
        return DataLoader(samples(), batch_size=2)

    channel = Channel(tmp_path)
    train(PlainWindows(channel, {"loader": 1, "batch_size": 8}), Images(), batches)
    assert other[0].batch_size == 2
    assert (channel.said[0]["loader"]["number"], channel.said[0]["global_batch"]) == (1, 8)


def test_the_loaders_of_later_epochs_are_changed_and_can_end(tmp_path: Path) -> None:
    channel, sizes = Channel(tmp_path, windows=2), list[int]()
    alive: list[Any] = []

    def batches() -> Iterator[Any]:
        while True:
            loader = DataLoader(samples(16), batch_size=2)
            sizes.append(loader.batch_size or 0)
            alive.append(ref(loader))
            yield from loader

    train(PlainWindows(channel, {"loader": 0, "batch_size": 4}), Images(), batches)
    assert (len(sizes) > 2, set(sizes)) == (True, {4})
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


def test_accumulated_batches_belong_to_one_step(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path), Images()

    def batches() -> Any:
        return DataLoader(samples(400), batch_size=2)

    train(PlainWindows(channel, {}), model, batches, every=4)
    facts = channel.said[0]
    assert (facts["loader"]["reads"], facts["global_batch"]) == (4, 8)
    [text] = describe_levers({"batch_size": 4}, facts)
    assert "one optimizer step after 2 instead of 4 batches" in text


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return _in_memory()


def test_the_workers_of_a_stream_are_not_changed(tmp_path: Path) -> None:
    channel = Channel(tmp_path)
    train(PlainWindows(channel, {}), Images(), lambda: DataLoader(Stream(), batch_size=None))
    facts = channel.said[0]
    assert list(list_exact_levers(facts)) == []
    workers, size = list_fixed(facts)
    assert "repeats its samples in each worker" in workers
    assert "has no batch_size" in size


def test_copies_from_page_locked_memory_do_not_wait() -> None:
    seen: list[dict[str, Any]] = []

    class Locked:
        device = torch.device("cpu")

        def is_pinned(self) -> bool:
            return True

    call = _without_waiting(lambda tensor, *given, **options: seen.append(options))
    call(Locked(), "cuda")
    call(Locked(), "cuda", non_blocking=False)
    call(torch.ones(1), "cuda")
    assert seen == [{"non_blocking": True}, {"non_blocking": False}, {}]


def test_the_levers_that_are_tried() -> None:
    assert list(list_exact_levers(FACTS)) == [{"workers": 2}, {"workers": 4}]
    assert list(list_exact_levers(GPU))[-1] == {"pin": True}
    tried = list(list_other_levers(GPU))
    assert tried[:2] == [{"precision": "tf32"}, {"precision": "bf16"}]
    assert tried[2:4] == [{"channels_last": True}, {"compile": True}]
    assert tried[4:] == [{"batch_size": 16}, {"batch_size": 32}, {"batch_size": 64}]
    small = {**FACTS, "compiled": True, "loader": {**LOADER, "samples": 20}}
    assert list(list_other_levers(small)) == [{"batch_size": 16}]


def test_the_chosen_levers_are_lines_to_change() -> None:
    chosen = {"workers": 4, "pin": True, "precision": "bf16", "compile": True, "batch_size": 16}
    text = describe_script_changes(chosen, GPU)
    assert "train.py:7: DataLoader(..., num_workers=4)" in text
    assert "train.py:7: DataLoader(..., pin_memory=True)" in text
    assert "train.py:9: compute this forward pass" in text
    assert 'torch.autocast("cuda", torch.bfloat16)' in text
    assert "model.compile()" in text
    assert "a step then learns from 2 times as many samples" in text
    assert "set_float32_matmul_precision" in describe_script_changes({"precision": "tf32"}, GPU)
    assert describe_script_changes({}, GPU) == "the script needs no change"


class Played:
    """A session of a plain loop that takes 8 ms for a batch of 8 or more samples, and whose script
    ends after every second window.
    """

    def __init__(self, plan: dict[str, Any] | None) -> None:
        self.size = (plan or {}).get("batch_size", 8)
        self.facts = {**FACTS, "global_batch": self.size}
        self.restarts = self.windows = 0

    def measure(self, *, steps: int, skip: int) -> list[dict[str, Any]]:
        self.windows += 1
        if self.windows == 3:
            raise ScriptEnded("the script's loop ended")
        return [{"seconds": 0.008 * max(self.size / 32, 1.0)}]

    def restart(self) -> None:
        self.windows = 0
        self.restarts += 1

    def close(self) -> None:
        pass


def test_larger_batches_are_tried_while_they_bring_a_gain() -> None:
    started = []

    class Tuner(PlanTuner):
        def _start(self, plan: Any) -> Any:
            started.append(Played(plan))
            return started[-1]

    tuner = Tuner("train.py", numerics=True, pairs=5)
    kept = [trial.kept for trial in tuner.run() if "batch_size" in trial.change]
    assert kept == [True, True, False]
    assert tuner.plan == {"batch_size": 32}
    assert tuner.after_s == pytest.approx(tuner.before_s / 4)
    assert all(each.restarts for each in started)


def test_a_failure_of_the_best_plan_does_not_end_the_other_trials() -> None:
    """The two sessions of the first trial do not fit in the memory of the GPU together."""

    class Crowded(Played):
        is_dead = False

        def measure(self, *, steps: int, skip: int) -> list[dict[str, Any]]:
            if self is started[0] and len(started) == 2 and not self.restarts:
                self.is_dead = True
            if self.is_dead:
                raise ScriptError("out of memory")
            return [{"seconds": 0.008 * max(self.size / 32, 1.0)}]

        def restart(self) -> None:
            self.is_dead = False
            super().restart()

    started: list[Crowded] = []

    class Tuner(PlanTuner):
        def _start(self, plan: Any) -> Any:
            started.append(Crowded(plan))
            return started[-1]

    first, *others = Tuner("train.py", numerics=True, pairs=5).run()
    assert first.error == "out of memory"
    assert others
    assert not any(each.error for each in others)


def test_a_script_that_exits_without_an_error_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "exits.py"
    script.write_text(f"{Path(SCRIPT).read_text()}    sys.exit(0)\n")
    with (
        TuningSession(str(script), ["none"], levers={"loader": 0}) as session,
        pytest.raises(ScriptEnded, match="ended after 100 steps"),
    ):
        session.measure(steps=200, skip=1)


def test_a_session_of_a_plain_loop_pauses_restarts_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TuningSession(SCRIPT, ["none"], ranks=2, levers={"loader": 0, "workers": 1}) as session:
        assert session.is_plain
        assert session.facts["plan"]["workers"] == 1
        assert len(session.measure(steps=2, skip=1)) == 2
        with pytest.raises(ScriptEnded, match="ended after 100 steps"):
            session.measure(steps=200, skip=1)
        session.restart()
        assert session.measure(steps=2, skip=1)[1]["rank"] == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_what_it_cannot_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(3, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = CliRunner().invoke(tune_command, [str(script)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "the batches for train.py:5 do not come from a DataLoader" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


RANKED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{start}
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(40):
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "start",
    [
        "dist.init_process_group('gloo')",
        "rank = int(os.environ['LOCAL_RANK']); dist.init_process_group('gloo')",
    ],
    ids=["group", "variable"],
)
def test_a_script_for_torchrun_is_measured_as_one_rank(tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKED.format(start=start))
    with TuningSession(str(script)) as session:
        assert (session.is_plain, session.facts["ranks"], session.facts["batch"]) == (True, 1, 6)


def test_a_script_that_fails_for_another_reason_runs_once(tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    note = f"print('run', file=open({str(runs)!r}, 'a'))"
    script.write_text(
        f"import os\nos.environ.get('RANK')\n{note}\nopen({str(tmp_path / 'data')!r})\n"
    )
    with pytest.raises(ScriptError, match="FileNotFoundError"):
        TuningSession(str(script))
    assert runs.read_text() == "run\n"


@pytest.mark.parametrize(
    "start",
    [
        "torch.multiprocessing.spawn(work, (2,), 2)",
        "[torch.multiprocessing.Process(target=work, args=(n, 2)).start() for n in range(2)]",
    ],
)
def test_a_script_that_starts_its_ranks_is_told_so_at_once(tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nimport torch\n"
        "def work(rank, count):\n    time.sleep(1000)\n    torch.zeros(1).backward()\n"
        f"if __name__ == '__main__':\n    {start}\n"
    )
    with pytest.raises(ScriptError, match="the script starts its ranks itself"):
        TuningSession(str(script))
