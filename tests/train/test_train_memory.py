"""The micro-batch: found by measurement, agreed, and smaller for all when one rank runs out."""

from pathlib import Path

import pytest
import torch
from tests.train.programs import short_of_memory
from tests.train.ranks import run

from remuda.train.micro import Micro, OutOfMemory, find, is_no_memory

STEPS, PLENTY = 5, 10**6


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
def test_the_largest_that_fits_is_found_without_trying_one_that_does_not(each: int, coming: int) -> None:
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
    micro = Micro("A", {"B": 4})
    assert micro.size == 0
    micro.settle(32)
    micro.shrink(32)
    assert micro.known == {"A": 16, "B": 4}
    with pytest.raises(OutOfMemory, match="one sample"):
        micro.shrink(1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cublas: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_no_memory(error: BaseException, expected: bool) -> None:
    assert is_no_memory(error) is expected


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("size", "normed"), [(1, False), (1, True), (2, False), (2, True), (4, False)])
def test_one_rank_out_of_memory_shrinks_all_and_loses_no_step(size: int, normed: bool, at: int, tmp_path: Path) -> None:
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


def test_one_rank_out_of_memory_in_the_backward_pass_leaves_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "plenty").mkdir()
    plenty = run(2, short_of_memory, STEPS, 0, PLENTY, 1, False, folder=tmp_path / "plenty")
    found = run(2, short_of_memory, STEPS, 1, 6, 1, False, folder=tmp_path, env={"BACKWARD": "1"})
    for rank in found:
        assert rank["sizes"] == [12] + [6] * (STEPS - 1)
        assert rank["losses"] == pytest.approx(plenty[0]["losses"], rel=1e-6)


def test_a_step_that_begins_again_leaves_no_trace(tmp_path: Path) -> None:
    """Running means and noise are those of a run that had the smaller micro-batch from the beginning."""
    (tmp_path / "small").mkdir()
    (short,) = run(1, short_of_memory, STEPS, 0, 12, 0, True, folder=tmp_path)
    (small,) = run(1, short_of_memory, STEPS, 0, 12, 0, True, folder=tmp_path / "small", env={"MICRO": "12"})
    assert short["sizes"] == small["sizes"] == [12] * STEPS
    assert short["losses"] == small["losses"]
    assert short["state"] == small["state"]
