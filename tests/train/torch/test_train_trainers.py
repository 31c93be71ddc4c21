"""The trainers of other libraries resume, keep the order of samples, and leave on a notice."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.train import guests
from tests.train.ranks import run

from cavvy.train.checkpoint.notice import AGAIN
from cavvy.train.checkpoint.store import make_name
from cavvy.train.trainers.watch import RankBatches, SampleOrder, count_batches, find_newest

KINDS = ("huggingface", "lightning")
STEPS = guests.SAMPLES // 8 * guests.EPOCHS


def join(found: list[Any]) -> list[list[int]]:
    """The samples of each global batch, of all ranks."""
    return [sorted(chain(*parts)) for parts in zip(*(seen for seen, *_ in found), strict=True)]


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_the_same_batches_on_fewer_ranks(
    kind: str, batch: int, tmp_path: Path
) -> None:
    whole, told = tmp_path / "whole", tmp_path / "told"
    whole.mkdir()
    told.mkdir()
    expected = join(run(1, guests.train, kind, 4, 2, 0, 0, folder=whole))
    assert len(expected) == STEPS
    before = run(2, guests.train, kind, 2, 2, 3, 1, folder=told)
    assert [code for _, code, _ in before] == [AGAIN, AGAIN]
    assert len(before[0][0]) == 3
    after = run(1, guests.train, kind, batch, 8 // batch, 0, 0, folder=told)
    assert after[0][1] is None
    assert join(before) + join(after) == expected
    epoch = list(chain(*expected[: guests.SAMPLES // 8]))
    assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_within_a_global_batch_saves_after_it(kind: str, tmp_path: Path) -> None:
    ((seen, code, complete),) = run(1, guests.train, kind, 4, 2, 3, 0, True, folder=tmp_path)
    assert (len(seen), code) == (3, AGAIN)
    newest = find_newest(tmp_path / "out")
    assert newest is not None
    assert (newest.step, newest.path.name in complete) == (3, True)


def test_lightning_leaves_no_incomplete_checkpoint(tmp_path: Path) -> None:
    half = tmp_path / "out" / make_name(77)
    half.mkdir(parents=True)
    (half / "lightning.ckpt").write_text("half")
    run(1, guests.train, "lightning", 4, 2, 0, 0, folder=tmp_path)
    assert not half.exists()


def test_an_evaluation_is_no_part_of_the_cost_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guests, "EPOCHS", 1)
    costs: list[float] = []
    monkeypatch.setattr("cavvy.train.checkpoint.async_saver.tell_cost", costs.append)
    guest, work = guests.start("huggingface", 1, 0, 4, 2)
    guest.evaluates = True
    work()
    assert costs
    assert max(costs) < guests.EVALUATION_S


@pytest.mark.parametrize("name", ["auto_find_batch_size", "ignore_data_skip", "save_only_model"])
def test_options_that_prevent_a_resume_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    guests.install()
    from cavvy.train.trainers.huggingface import follow

    guest = guests.HuggingFaceTrainer("out", 4, 1, 0, 2)
    setattr(guest.args, name, True)
    with pytest.raises(ValueError, match=f"{name}=True"):
        follow(guest)


def test_a_sequential_order_stays_sequential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    guests.install()
    from cavvy.train.trainers.huggingface import follow

    guest = guests.HuggingFaceTrainer("out", 4, 1, 0, 2)
    guest.args.train_sampling_strategy = "sequential"
    follow(guest)
    assert list(guest._get_train_sampler()) == list(range(16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_cut_does_not_count(kind: str, tmp_path: Path) -> None:
    ((_, code, complete),) = run(1, guests.train, kind, 4, 2, 5, 0, folder=tmp_path)
    assert (code, len(complete) > 1) == (AGAIN, True)
    newest = find_newest(tmp_path / "out")
    assert newest is not None
    assert newest.step == 5
    next(path for path in newest.path.iterdir() if path.name != "complete.json").write_text("")
    before = find_newest(tmp_path / "out")
    assert before is not None
    assert before.step == 4
    ((seen, *_),) = run(1, guests.train, kind, 4, 2, 0, 0, folder=tmp_path)
    assert len(seen) == STEPS - 4


def test_an_order_of_other_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(1, guests.train, "huggingface", 4, 2, 2, 0, folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guests, "SAMPLES", guests.SAMPLES + 1)
    with pytest.raises(ValueError, match="samples was 22 and is now 23"):
        guests.start("huggingface", 1, 0, 4, 2)


def test_ranks_that_cannot_make_the_global_batch_are_refused() -> None:
    assert count_batches(24, 4, 3) == 2
    with pytest.raises(ValueError, match="5 ranks with batches of 4 samples cannot make"):
        count_batches(24, 4, 5)


def test_data_smaller_than_a_global_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than a global batch of 8"):
        SampleOrder(7, global_batch=8)


def test_batches_begin_at_their_position() -> None:
    batches = RankBatches(10, batch=2, global_batch=4, seed=1)
    first, whole = list(batches), batches.order.indices()
    assert [number for batch in first for number in batch] == whole
    batches.position = 4
    assert list(batches) == first[2:]
    batches.position = 8
    assert list(batches) != first
    assert len(batches) == 4
