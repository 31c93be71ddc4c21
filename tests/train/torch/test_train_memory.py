"""The micro-batch: found by measurement, agreed, and smaller for all when one rank runs out."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.programs import by_hand, mistaken, short_of_memory, split_and_short
from tests.train.ranks import Ranks, run

from cavvy.train import Plan
from cavvy.train.checkpoint import emergency_save
from cavvy.train.checkpoint.notice import AGAIN
from cavvy.train.micro import MicroBatch, OutOfMemory, find, is_no_memory

STEPS, PLENTY = 5, 10**6


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Card:
    """A device whose memory fills evenly with samples, beside what is always held."""

    def __init__(self, total: int, held: int, each: int) -> None:
        self.memory_bytes: int | None = total
        self._held, self._each, self._most = held, each, 0
        self.tried: list[int] = []

    def attempt(self, size: int) -> None:
        self.tried.append(size)
        self._most = max(self._most, self._held + size * self._each)

    def peak_bytes(self) -> int:
        return self._most

    def reset_peak(self) -> None:
        self._most = 0


@pytest.mark.parametrize("each", [1, 7, 90, 400])
@pytest.mark.parametrize("coming", [0, 2000])
def test_the_largest_that_fits_is_found_without_trying_one_that_does_not(
    each: int, coming: int
) -> None:
    card = Card(10_000, 1000, each)
    size = find(500, card, card.attempt, coming, lambda n: n)
    fits = 1000 + size * each + coming <= 9200
    assert fits or size <= 4
    assert size == 500 or 1000 + (size + 1) * each + coming > 9200
    assert max(card.tried) <= 4


def test_the_rank_with_the_least_room_decides() -> None:
    card = Card(10_000, 1000, 10)
    answers = iter([1, 123])
    assert find(5000, card, card.attempt, 0, lambda n: next(answers)) == 123


def test_a_device_that_tells_nothing_takes_the_whole_share() -> None:
    card = Card(10_000, 1000, 10)
    card.memory_bytes = None
    assert find(640, card, card.attempt, 0, lambda n: n) == 640
    assert card.tried == []


def test_sizes_are_known_by_the_kind_of_gpu() -> None:
    micro = MicroBatch("A", {"B": 4})
    assert micro.size == 0
    micro.settle(32)
    micro.shrink(32)
    assert micro.known == {"A": 16, "B": 4}
    with pytest.raises(OutOfMemory, match="a single sample"):
        micro.shrink(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cublas: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (_caused(RuntimeError("a stage failed"), torch.OutOfMemoryError("x")), True),
        (_caused(RuntimeError("a stage failed"), ValueError("x")), False),
    ],
)
def test_what_is_no_memory(error: BaseException, expected: bool) -> None:
    assert is_no_memory(error) is expected


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("size", "normed"), [(1, False), (1, True), (2, False), (2, True), (4, False)]
)
def test_one_rank_out_of_memory_shrinks_all_and_loses_no_step(
    size: int, normed: bool, at: int, tmp_path: Path
) -> None:
    (tmp_path / "plenty").mkdir()
    room = 24 // size // 3
    plenty = run(size, short_of_memory, STEPS, 0, PLENTY, at, False, folder=tmp_path / "plenty")
    found = run(size, short_of_memory, STEPS, size - 1, room, at, normed, folder=tmp_path)
    sizes = [24 // size] * at + [24 // size // 4] * (STEPS - at)
    for rank in found:
        assert rank["sizes"] == sizes
        assert rank["state"] == pytest.approx(found[0]["state"], rel=0, abs=0)
        if not normed:
            assert rank["losses"] == pytest.approx(plenty[0]["losses"], rel=1e-6)


def test_one_rank_out_of_memory_in_the_backward_pass_leaves_no_other_waiting(
    tmp_path: Path,
) -> None:
    (tmp_path / "plenty").mkdir()
    plenty = run(2, short_of_memory, STEPS, 0, PLENTY, 1, False, folder=tmp_path / "plenty")
    found = run(2, short_of_memory, STEPS, 1, 6, 1, False, folder=tmp_path, env={"BACKWARD": "1"})
    for rank in found:
        assert rank["sizes"] == [12] + [6] * (STEPS - 1)
        assert rank["losses"] == pytest.approx(plenty[0]["losses"], rel=1e-6)


FSDP, TENSOR, PIPELINE = Plan(shards=2), Plan(tensor=2), Plan(pipeline=2, micro_batch=6)
SPLIT = [
    pytest.param(FSDP, 12, 0, 3, 24, id="fsdp2"),
    pytest.param(FSDP, 12, 0, 0, 24, id="fsdp2, first step"),
    pytest.param(TENSOR, 24, 1, 3, 24, id="tensor"),
    pytest.param(TENSOR, 24, -1, 3, 24, id="tensor, both ranks"),
    pytest.param(PIPELINE, 6, 1, 3, 24, id="pipeline"),
    pytest.param(PIPELINE, 6, 0, 0, 24, id="pipeline, first step"),
    pytest.param(
        Plan(pipeline=2, micro_batch=15),
        15,
        1,
        2,
        30,
        id="pipeline, half of it does not divide the share",
    ),
]


@pytest.mark.parametrize(("plan", "size", "rank", "at", "batch"), SPLIT)
def test_a_split_model_out_of_memory_is_run_again_from_the_same_step(
    plan: Plan, size: int, rank: int, at: int, batch: int, tmp_path: Path
) -> None:
    losses, _ = by_hand("fp32", steps=STEPS, batch=batch)
    ranks = Ranks(2, split_and_short, plan, STEPS, at, rank, size - 1, batch, folder=tmp_path)
    said: list[Any] = [[value for _, value in ranks.rest(n)] for n in range(2)]
    assert ranks.end() == [AGAIN, AGAIN]
    assert [len(each) for each in said] == [at, at]
    rest = run(2, split_and_short, plan, STEPS, at, rank, size - 1, batch, folder=tmp_path)
    for before, after in zip(said, rest, strict=True):
        assert after["steps"] == STEPS
        assert before + after["losses"] == pytest.approx(
            losses, rel=1e-6
        )  # no step was lost, none was done twice
        assert after["micro"] == size // 2


def test_tensor_ranks_with_replicas_do_not_wait_for_one_that_ran_out(tmp_path: Path) -> None:
    plan = Plan(tensor=2, replicas=2)
    assert Ranks(4, split_and_short, plan, STEPS, 1, 3, 11, folder=tmp_path).end() == [AGAIN] * 4
    assert {
        each["micro"] for each in run(4, split_and_short, plan, STEPS, 1, 3, 11, folder=tmp_path)
    } == {6}


def test_the_first_step_after_a_checkpoint_runs_out(tmp_path: Path) -> None:
    """What is rescued is at the checkpoint's own step: it is not needed, but its note is."""
    run(2, split_and_short, FSDP, STEPS, 0, 0, PLENTY, 24, 3, folder=tmp_path)
    assert Ranks(2, split_and_short, FSDP, STEPS, 3, 0, 11, folder=tmp_path).end() == [AGAIN, AGAIN]
    assert {
        each["micro"] for each in run(2, split_and_short, FSDP, STEPS, 3, 0, 11, folder=tmp_path)
    } == {6}


@pytest.mark.parametrize("at", [0, 2])
def test_where_one_sample_does_not_fit_the_run_ends_with_an_error(at: int, tmp_path: Path) -> None:
    for _ in (12, 6, 3):
        assert Ranks(2, split_and_short, FSDP, STEPS, at, 1, 0, folder=tmp_path).end() == [
            AGAIN,
            AGAIN,
        ]
    ranks = Ranks(2, split_and_short, FSDP, STEPS, at, 1, 0, folder=tmp_path)
    (text,) = ranks.rest(1)
    assert "a single sample does not fit into memory; try Plan(recompute=True)" in text
    assert ranks.end() == [1, 1]


def test_a_mistake_in_the_loss_of_a_pipeline_is_no_lack_of_memory(tmp_path: Path) -> None:
    ranks = Ranks(2, mistaken, PIPELINE, folder=tmp_path)
    (text,) = ranks.rest(1)
    assert text.endswith("RuntimeError: a mistake of the user's\n")
    assert ranks.end() == [1, 1]


AVERAGED = [pytest.param(FSDP, 12, 1), pytest.param(PIPELINE, 6, 0), pytest.param(PIPELINE, 6, 1)]


@pytest.mark.parametrize(
    ("plan", "size", "rank"), AVERAGED, ids=["fsdp2", "pipeline, first", "pipeline, last"]
)
def test_running_means_are_those_of_a_run_that_had_the_memory(
    plan: Plan, size: int, rank: int, tmp_path: Path
) -> None:
    env, calm = {"AVERAGED": "1"}, tmp_path / "calm"
    calm.mkdir()
    assert Ranks(
        2, split_and_short, plan, STEPS, 3, rank, size - 1, folder=tmp_path, env=env
    ).end() == [AGAIN, AGAIN]
    found = run(2, split_and_short, plan, STEPS, 3, rank, size - 1, folder=tmp_path, env=env)
    run(
        2,
        split_and_short,
        replace(plan, micro_batch=size),
        STEPS,
        0,
        0,
        PLENTY,
        24,
        3,
        folder=calm,
        env=env,
    )
    expected = run(
        2,
        split_and_short,
        replace(plan, micro_batch=size // 2),
        STEPS,
        0,
        0,
        PLENTY,
        folder=calm,
        env=env,
    )
    assert [each["state"] for each in found] == [each["state"] for each in expected]


def test_two_that_run_out_together_both_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes its note between the first one's writing and naming."""
    first, second = (SimpleNamespace(rank=rank, size=2) for rank in range(2))
    name = Path.rename

    def rename(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", name)
        emergency_save.write(tmp_path, 0, second, None, {}, {"A": 6})  # type: ignore[arg-type]
        return name(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    emergency_save.write(tmp_path, 0, first, None, {}, {"A": 6})  # type: ignore[arg-type]
    assert emergency_save.note(tmp_path, 0) == {"A": 6}


def test_parts_of_two_attempts_are_no_whole(tmp_path: Path) -> None:
    """One attempt keeps the one part, the next one the other: neither is a step that both ranks
    were at.
    """
    first, second = (SimpleNamespace(rank=rank, size=2) for rank in range(2))
    for world in (first, second):
        emergency_save.write(tmp_path, 4, world, {}, {"plan": "P"}, {})  # type: ignore[arg-type]
        assert emergency_save.find(tmp_path, world, "P", 2) == (None, {})  # type: ignore[arg-type]
    for world in (first, second):
        emergency_save.write(tmp_path, 4, world, {}, {"plan": "P"}, {})  # type: ignore[arg-type]
    assert emergency_save.find(tmp_path, first, "P", 2) == (4, {})  # type: ignore[arg-type]


def test_a_step_that_begins_again_leaves_no_trace(tmp_path: Path) -> None:
    """Running means and noise are those of a run that had the smaller micro-batch from the
    beginning.
    """
    (tmp_path / "small").mkdir()
    (short,) = run(1, short_of_memory, STEPS, 0, 12, 0, True, folder=tmp_path)
    (small,) = run(
        1, short_of_memory, STEPS, 0, 12, 0, True, folder=tmp_path / "small", env={"MICRO": "12"}
    )
    assert short["sizes"] == small["sizes"] == [12] * STEPS
    assert short["losses"] == small["losses"]
    assert short["state"] == small["state"]
