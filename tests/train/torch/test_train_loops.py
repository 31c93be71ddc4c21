"""Loops that differ from the documented one, on two ranks: they learn what a plain loop learns, and
continue with exactly the next samples.
"""

from pathlib import Path

import pytest
from tests.train.loops import lonely
from tests.train.ranks import Ranks
from tests.train.torch.test_train_torchrun import Found, run_cases

from cavvy import train


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_cases("loops", tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize(
    "loop",
    [
        "two batches a step",
        "skipped batches",
        "unused parameters",
        "parameters that are thawed",
        "an optimizer that steps later",
        "random numbers of the loop",
        "random numbers of the data",
    ],
)
def test_a_loop_learns_the_same_if_a_notice_interrupts_it(loop: str, found: Found) -> None:
    first, second = found(loop)
    assert first == second
    whole, parts = first
    assert whole == parts
    assert whole[2] == 240


def test_a_run_refuses_what_it_would_ignore(found: Found) -> None:
    expected = [
        "unknown option 'shufle'",
        "run.keep('schedule'): another object already has this name",
        "create each optimizer with run.optimizer",
        "create each optimizer with run.optimizer",
        "12 samples are fewer than a global batch of 24 samples",
        "run.keep was called after the run resumed",
        "run.optimizer was called after the run resumed",
        "run.data was called after the run resumed",
        "the loss is a sum, so its value would depend on how the batch is split",
    ]
    for said in found("refused"):
        assert all(text in each for text, each in zip(expected, said, strict=True)), said


def test_all_optimizers_of_a_step_use_the_same_loss_scale(found: Found) -> None:
    assert found("fp16 optimizers") == [True, True]


def test_ranks_that_would_read_other_samples_end_with_an_error(found: Found) -> None:
    for sampler, data, epochs in found("other orders"):
        assert (
            "the order of samples of rank 1 differs from the order of samples of rank 0" in sampler
        )
        assert (
            "the number of samples of rank 1 differs from the number of samples of rank 0" in data
        )
        assert "the last sample of rank 1 differs from the last sample of rank 0" in epochs


def test_a_checkpoint_is_refused_if_a_part_of_it_would_be_lost(found: Found) -> None:
    for begun, fewer, forgotten in found("lost tensors"):
        assert begun == "False"
        assert "the checkpoint of step 0 contains model.scale, but the script has no such" in fewer
        assert "(3 tensors would be lost)" in fewer
        assert "contains optimizers.0.state.one.bias.exp_avg, but" in forgotten


def test_a_skipped_batch_leaves_the_gradients_that_wait_for_a_step(found: Found) -> None:
    assert max(found("skipped between")) < 1e-6


def test_both_data_sets_of_a_loop_continue_where_they_were(found: Found) -> None:
    numbers = sorted([*range(120), *[12] * 10])
    assert found("two data sets") == [numbers, numbers]


def test_a_loop_that_computes_its_own_gradients_saves_on_a_notice(tmp_path: Path) -> None:
    ranks = Ranks(1, lonely, folder=tmp_path)
    assert ranks.rest(0) == [1, 2]
    assert ranks.end() == [train.AGAIN]
    assert (tmp_path / "checkpoints/step-000000000002/complete.json").exists()
