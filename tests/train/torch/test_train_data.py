"""One order for any number of ranks: every sample once, resumed anywhere, with the same
augmentations.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from cavvy.train import Data, Tensors, open_source, register_reader
from cavvy.train.data import stream
from cavvy.train.data.stream import Batch, BatchShare, cut, move
from cavvy.train.seeds import mix, sow_host


class Numbers:
    """A plain dataset: sample n is n itself."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def jitter(sample: int, random: np.random.Generator) -> tuple[int, float]:
    return sample, float(random.random())


def draw(sample: int) -> tuple[float, ...]:
    return sample, random.random(), float(np.random.rand()), float(torch.rand(()))


def read(data: Data, ranks: int, steps: int, **options: Any) -> list[list[Any]]:
    """The next global batches, put together from all ranks, each a list of samples; the data
    moves on.
    """
    until = data.position + steps * data.global_batch
    shares = [BatchShare(rank, ranks, data.global_batch) for rank in range(ranks)]
    streams: list[Iterator[Any]] = [data.read(share, until, **options) for share in shares]
    found = [
        [sample for part in parts for sample in samples(part)]
        for parts in zip(*streams, strict=True)
    ]
    data.position = until
    assert len(found) == steps
    return found


class Pairs(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index), str(index)


def test_workers_hand_over_what_threads_do_and_may_be_left_early() -> None:
    options = {"threads": 1, "prefetch": 4}
    threads, workers = (
        Data(Pairs(64), global_batch=4).read(BatchShare(1, 2, 4), 64, **options, workers=n)
        for n in (0, 1)
    )
    for _ in range(2):
        (numbers, names), (expected, same) = next(workers), next(threads)
        assert numbers.dtype == expected.dtype
        assert (numbers.tolist(), list(names)) == (expected.tolist(), list(same))
    time.sleep(0.5)  # so that the worker has made more ready than is read
    workers.close()
    threads.close()


def samples(part: Any) -> list[Any]:
    return (
        list(zip(*(v.tolist() for v in part), strict=True))
        if isinstance(part, list | tuple)
        else part.tolist()
    )


@pytest.mark.parametrize("global_batch", [12, 10, 7])
@pytest.mark.parametrize(
    "source", [Numbers(60), Tensors(torch.arange(60))], ids=["dataset", "tensors"]
)
def test_any_ranks_read_what_one_reads(source: Any, global_batch: int) -> None:
    alone = Data(source, global_batch=global_batch, seed=4)
    shared = Data(source, global_batch=global_batch, seed=4)
    expected = read(alone, 1, 12)
    assert [batch for ranks in (4, 2, 1, 3, 5) for batch in read(shared, ranks, 2)] == expected[:10]


@pytest.mark.parametrize("listed", [True, False])
def test_each_epoch_has_each_sample_once_in_another_order(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.setattr(stream, "LISTED", 0)
    data = Data(Numbers(60), global_batch=7, seed=1)
    order = [data.indices(range(e * 60, e * 60 + 60)).tolist() for e in range(3)]
    assert [Counter(epoch) for epoch in order] == [Counter(range(60))] * 3
    assert len({tuple(epoch) for epoch in order}) == 3
    assert data.indices(range(50, 70)).tolist() == order[0][50:] + order[1][:10]
    other = Data(Numbers(60), global_batch=7, seed=2).indices(range(60)).tolist()
    assert other != order[0]
    assert Data(Numbers(60), global_batch=7, shuffle=False).indices(range(58, 62)).tolist() == [
        58,
        59,
        0,
        1,
    ]


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 3, "prefetch": 4}], ids=str)
def test_augmentations_follow_the_sample_and_not_the_rank(options: dict[str, int]) -> None:
    alone = Data(Numbers(40), global_batch=8, seed=9, transform=jitter)
    shared = Data(Numbers(40), global_batch=8, seed=9, transform=jitter)
    expected = read(alone, 1, 6)
    assert [batch for ranks in (3, 1, 2) for batch in read(shared, ranks, 2, **options)] == expected
    assert (
        len({value for batch in expected for _, value in batch}) == 48
    )  # another one in the next epoch too


def test_worker_processes_read_the_same() -> None:
    expected = read(Data(Numbers(40), global_batch=8, seed=9, transform=jitter), 1, 2)
    assert (
        read(Data(Numbers(40), global_batch=8, seed=9, transform=jitter), 1, 2, workers=1)
        == expected
    )


def test_a_stream_that_is_left_early_ends_its_threads() -> None:
    data = Data(Numbers(10**9), global_batch=4)
    batches = data.read(BatchShare(0, 1, 4), 10**9)
    next(batches)
    batches.close()
    assert list(batches) == []


def test_what_is_not_whole_is_left_out() -> None:
    data = Data(Numbers(10), global_batch=4)
    assert len(list(data.read(BatchShare(0, 1, 4), 10))) == 2
    with pytest.raises(ValueError, match="too small for 5 ranks"):
        next(data.read(BatchShare(0, 5, 4), 10))


def test_a_collate_function_makes_the_batches() -> None:
    data = Data(
        Numbers(6),
        global_batch=3,
        shuffle=False,
        transform=lambda n: [n] * n,
        collate=lambda lists: torch.tensor([one + [-1] * (5 - len(one)) for one in lists]),
    )
    first, second = data.read(BatchShare(0, 1, 3), 6)
    assert first.shape == second.shape == (3, 5)
    assert second[0].tolist() == [3, 3, 3, -1, -1]


def test_sources() -> None:
    named = Tensors(x=torch.ones(3, 2), y=torch.arange(3))
    assert named[1]["y"] == 1
    assert open_source(torch.utils.data.TensorDataset(torch.arange(3)))[2][0] == 2
    register_reader("count", lambda path, **options: Numbers(int(path)))
    assert len(open_source("count:12")) == 12
    with pytest.raises(ValueError, match="no reader is known for 'nosuch:x'"):
        open_source("nosuch:x")
    with pytest.raises(TypeError, match="no length"):
        open_source(iter([1]))
    with pytest.raises(ValueError, match="different lengths"):
        Tensors(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="both must be at least 1"):
        Data(Numbers(0), global_batch=1)


def test_batches_on_their_way() -> None:
    batch = {"x": torch.ones(4, 3, 2, 2), "name": ["a", "b"]}
    moved = move(batch, torch.device("cpu"), pin=True, channels_last=True)
    assert moved["x"].is_contiguous(memory_format=torch.channels_last)
    assert moved["name"] == ["a", "b"]
    assert cut(batch, 1, 3, 4)["x"].shape == (2, 3, 2, 2)


def test_names_are_split_with_the_samples() -> None:
    names, arrays = [*"abcdefg"], np.arange(7)
    parts = Batch({"x": torch.arange(7), "name": names, "n": arrays, "lot": "B"}, 7, 7, 7).pieces(3)
    assert [(*each["name"],) for each, _ in parts] == [("a", "b"), ("c", "d"), ("e", "f", "g")]
    for each, size in parts:
        assert each["x"].tolist() == each["n"].tolist()
        assert (len(each["x"]), len(each["name"]), each["lot"]) == (size, size, "B")


@pytest.mark.parametrize("values", [torch.ones(8), torch.tensor(1.0), object()])
def test_a_batch_that_cannot_be_split_is_refused(values: Any) -> None:
    batch = Batch((torch.ones(4), values), 4, 4, 4)
    assert len(batch.pieces(1)) == 1
    with pytest.raises(ValueError, match="cannot be split into micro-batches"):
        batch.pieces(2)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({"threads": 0}, 1), ({"threads": 0}, 3), ({"workers": 2, "threads": 2}, 1)],
)
def test_global_random_numbers_depend_only_on_the_position(
    options: dict[str, int], ranks: int
) -> None:
    data = Data(Numbers(64), global_batch=6, transform=draw)
    data.find_random()
    assert data.is_random
    expected = []
    for position in range(24):
        sow_host(mix(0, position))
        expected.append(draw(int(data.indices(range(position, position + 1))[0])))
    found = [sample for batch in read(data, ranks, 4, **options) for sample in batch]
    assert np.allclose([[*map(float, each)] for each in found], expected)


def test_a_sampler_without_a_fixed_order_is_refused() -> None:
    class Shuffled(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(64).tolist())

    with pytest.raises(ValueError, match="Shuffled yields a new order each time"):
        Data(Numbers(64), global_batch=4, sampler=Shuffled(range(64))).indices(range(4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_orders_the_samples_the_same_on_any_number_of_ranks(ranks: int) -> None:
    def make() -> Data:
        weights = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0, 1.0])
        sampler = WeightedRandomSampler(weights, 8)  # type: ignore[arg-type]
        return Data(range(6), global_batch=4, sampler=sampler, seed=5)

    data = make()
    whole = data.indices(range(16)).tolist()
    assert data.length == 8
    assert 1 not in whole
    assert whole[:8] != whole[8:]
    again = make()
    again.resume(8, data.order)
    assert read(again, ranks, 2) == [whole[8:12], whole[12:]]


def test_a_batch_sampler_has_global_batches() -> None:
    batches = BatchSampler(RandomSampler(range(9)), 4, drop_last=True)
    data = Data(range(9), global_batch=4, sampler=batches)
    assert len(set(data.indices(range(8)).tolist())) == data.length == 8
    ragged = BatchSampler(RandomSampler(range(9)), 4, drop_last=False)
    with pytest.raises(ValueError, match="yields a batch of 1 samples"):
        Data(range(9), global_batch=4, sampler=ragged).indices(range(8))


def test_another_sampler_is_refused_on_resume() -> None:
    data = Data(range(9), global_batch=4)
    other = Data(range(9), global_batch=4, sampler=RandomSampler(range(9)))
    with pytest.raises(ValueError, match="sampler was None and is now RandomSampler"):
        other.resume(4, data.order)
